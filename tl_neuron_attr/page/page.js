"use strict";
// Sorting of tables, drawing of figures in the page's own colours, and saving them. Nothing is loaded or sent.
(() => {
  const parse = (id) => JSON.parse(document.getElementById(id).textContent);
  const say = (text) => { document.getElementById("status").textContent = text; };

  // --- tables

  const key = (row, index, numeric) => {
    const cell = row.cells[index];
    if (!numeric) return cell.textContent.trim();
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  };

  const sort = (header, numeric) => {
    const table = header.closest("table");
    const was = header.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const other = numeric ? "ascending" : "descending";
    const order = was === first ? other : first;
    for (const each of header.parentElement.cells) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return sign * (numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true }));
    };
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: key(row, header.cellIndex, numeric) }));
    body.append(...rows.sort(compare).map(({ row }) => row));
    say(`${table.caption.textContent}: sorted by ${header.textContent.trim()}, ${order}`);
  };

  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => sort(button.closest("th"), button.dataset.numeric === "true"));
  }

  // A box that hides rows ends between two of them, not in the middle of one.
  const fit = (box) => {
    box.style.removeProperty("--whole-rows");
    if (box.scrollHeight <= box.clientHeight) return;
    const top = box.getBoundingClientRect().top + box.clientTop - box.scrollTop;
    const ends = Array.from(box.querySelectorAll("tbody tr"), (row) => row.getBoundingClientRect().bottom - top);
    const end = Math.max(...ends.filter((each) => each <= box.clientHeight));
    if (end > 0) box.style.setProperty("--whole-rows", `${end + box.offsetHeight - box.clientHeight}px`);
  };
  const fitAll = () => document.querySelectorAll(".scroll").forEach(fit);
  fitAll();
  addEventListener("resize", fitAll);
  document.querySelector("details").addEventListener("toggle", fitAll);

  // --- figures

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plot = (id) => document.getElementById(`figure-${id}`);
  const drawn = new Map(parse("figures").map((figure) => [figure.id, figure]));
  const options = { responsive: true, displayModeBar: false, showTips: false };
  const top = 28;

  const styled = (layout) => {
    const { color, fontFamily: family } = getComputedStyle(document.body);
    return { ...layout, font: { ...layout.font, color, family } };
  };
  // On the page the caption is the title: what the title took is given back.
  const untitled = ({ title, margin, height, ...layout }) =>
    styled({ ...layout, autosize: true, height: height - margin.t + top, margin: { ...margin, t: top } });

  for (const { id, data, layout } of drawn.values()) Plotly.newPlot(plot(id), data, untitled(layout), options);
  // Plotly measures text in a drawing beside the page, which is none of a reader's business.
  document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
  dark.addEventListener("change", () => {
    for (const { id, data, layout } of drawn.values()) Plotly.react(plot(id), data, untitled(layout), options);
  });

  // --- saving

  // The URL is kept as long as the page: a download that starts late would miss one that is gone.
  const save = (text, type, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    say(`Saved ${name}`);
  };

  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", async () => {
      const { id, data, layout } = drawn.get(button.dataset.save);
      const size = { width: Math.max(plot(id).clientWidth, 480), height: layout.height };
      const url = await Plotly.toImage({ data, layout: styled(layout) }, { format: "svg", ...size });
      save(decodeURIComponent(url.slice(url.indexOf(",") + 1)), "image/svg+xml", `${id}.svg`);
    });
  }
  document.getElementById("save-numbers").addEventListener("click", () => {
    save(JSON.stringify(parse("numbers"), null, 1), "application/json", "attribution.json");
  });
})();
