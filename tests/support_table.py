"""The README's table of supported architectures, from what the tests of each release of TransformerLens measure.

    python tests/support_table.py measure    # with one release installed: writes tests/data/support/<release>.json
    python tests/support_table.py write      # renders all of them into README.md

`tests/test_families.py` runs the same measurements and fails where one is too large, so the table cannot promise what
does not hold; `tests/test_support_table.py` compares README and files.
"""

import json
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILES = ROOT / "tests" / "data" / "support"
BEGIN = "<!-- support table: python tests/support_table.py write -->\n"
END = "<!-- end of the support table -->\n"
INTRODUCTION = """\
Tiny random models of every architecture (every bias and norm weight random), built from their Hugging Face
configurations; each backend with its weights as they are and processed (compatibility mode, or folded and centred).
A cell is the worst error of the two in nats (for query scores, beside the largest of them), against a plain float64
loop on the Hugging Face model itself and against interventions on the model: {n_cases} cases in float32. `refused`:
this release computes another function than the model, so the package names it; `-`: TransformerLens has none.

"""
REFUSED = """
Refused by name on every release: mixture-of-experts layers (dense layers of the same model are attributed when
`layers=` asks for them), state-space, recurrent and hybrid layers, latent attention, encoders and encoder-decoders,
packed quantised weights.
"""
RELEASES = ("4.3", "3.9", "2.18")
NAMES = {
    "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo (local attention)",
    "gptj": "GPT-J (parallel)",
    "neox": "GPT-NeoX, Pythia (parallel)",
    "neox_sequential": "GPT-NeoX (sequential)",
    "opt": "OPT",
    "llama": "Llama",
    "llama_gqa": "Llama (grouped-query attention)",
    "mistral": "Mistral (sliding window)",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3 (query and key norms)",
    "phi": "Phi (parallel)",
    "phi3": "Phi-3 (fused matrices)",
    "gemma": "Gemma",
    "gemma2": "Gemma-2 (soft caps, norms behind sublayers)",
    "gemma3": "Gemma-3 (norms behind sublayers)",
    "olmo": "OLMo",
    "olmo_clipped": "OLMo (clipped values)",
    "olmo2": "OLMo-2 (norms behind sublayers only)",
    "granite": "Granite (multipliers)",
    "cohere": "Cohere (logit scale, parallel)",
    "stablelm": "StableLM",
    "stablelm_parallel": "StableLM (parallel)",
    "falcon": "Falcon (parallel, multi-query)",
    "falcon_sequential": "Falcon (sequential, ALiBi)",
    "falcon_new": "Falcon (new decoder architecture)",
    "bloom": "Bloom (ALiBi)",
    "smollm3": "SmolLM3 (layers without rotary)",
    "gpt_bigcode": "GPT-BigCode (multi-query)",
    "attn_only": "attention-only HookedTransformer",
}


def release() -> str:
    """The installed TransformerLens, as its files are named."""
    return ".".join(metadata.version("transformer-lens").split(".")[:2])


def measure() -> dict[str, Any]:
    """Errors of every architecture behind every backend of the installed release."""
    import families
    import zoo

    cases: dict[str, dict[str, dict[str, float]]] = {}
    for name, backend in zoo.FAMILY_CASES:
        cases.setdefault(name, {})[backend] = {
            k: float(f"{v:.2g}") for k, v in families.errors(name, backend).items()
        }
    packages = ("transformer-lens", "transformers", "torch")
    versions = {package: metadata.version(package).split("+")[0] for package in packages}
    return {"versions": versions, "cases": cases, "refused": sorted(zoo.BRIDGE_FAULTS) if zoo.BRIDGE else []}


def render() -> str:
    """The table, and what its cells are."""
    measured = {name: json.loads((FILES / f"{name}.json").read_text()) for name in RELEASES}
    columns = [("4.3", "bridge"), ("3.9", "bridge"), ("3.9", "hooked"), ("2.18", "hooked")]
    titles = [f"{'TransformerBridge' if kind == 'bridge' else 'HookedTransformer'} {name}" for name, kind in columns]
    lines = [f"| model | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(columns)]
    checks: dict[str, float] = {}
    for family, title in NAMES.items():
        cells = [_cell(measured[name], family, kind, checks) for name, kind in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    n_cases = sum(len(backends) for one in measured.values() for backends in one["cases"].values())
    worst = ", ".join(f"{check} {error:.0e}" for check, error in checks.items())
    text = INTRODUCTION.format(n_cases=n_cases) + "\n".join(lines)
    return text + "\n\n" + textwrap.fill(f"The worst of each check: {worst}.", 118) + "\n" + REFUSED


def _cell(measured: dict[str, Any], family: str, kind: str, checks: dict[str, float]) -> str:
    if kind == "bridge" and family in measured["refused"]:
        return "refused"
    found = [errors for backend, errors in measured["cases"].get(family, {}).items() if backend.startswith(kind)]
    if not found:
        return "-"
    for errors in found:
        for check, error in errors.items():
            checks[check] = max(error, checks.get(check, 0.0))
    return f"{max(max(errors.values()) for errors in found):.0e}"


def main() -> None:
    """`measure` or `write`."""
    if sys.argv[1:] == ["measure"]:
        FILES.mkdir(exist_ok=True)
        (FILES / f"{release()}.json").write_text(json.dumps(measure(), indent=1) + "\n")
    elif sys.argv[1:] == ["write"]:
        readme = ROOT / "README.md"
        before, rest = readme.read_text().split(BEGIN)
        readme.write_text(before + BEGIN + render() + END + rest.split(END)[1])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
