"""Many prompts, many processes, nothing lost: every prompt's attribution in files, in one call that can die anywhere.

The prompts are cut into parts by their numbers (:mod:`tl_neuron_attr.sweep_plan`). The parts that are not done yet
are dealt to the processes; each computes its parts one after the other (:mod:`tl_neuron_attr.sweep_parts`) and
writes each part's tables, which appear whole or not at all (:mod:`tl_neuron_attr.sweep_store`). So a run that was
killed is continued by the same call: parts that are done stay, the others are computed, none twice. A part has the
same bytes whoever computes it; another batch size moves scores by rounding only.

A part that the disk does not take is left for the next run and its prompts are named in ``errors.jsonl``; the run
goes on with the parts for which there is room.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tl_neuron_attr import serialise
from tl_neuron_attr.neurons import check_count
from tl_neuron_attr.numbering import checked_layers
from tl_neuron_attr.sweep_parts import PartRunner, Wanted
from tl_neuron_attr.sweep_plan import MEMORY_BUDGET, PART_SIZE, Plan, plan_of, settings_of, versions
from tl_neuron_attr.sweep_schema import SCHEMA_VERSION
from tl_neuron_attr.sweep_store import SweepFolder
from tl_neuron_attr.trace import Convention, prepare
from tl_neuron_attr.workers import Workers


@dataclass(frozen=True)
class PromptError:
    """A prompt without a result: its number, its line in the file (``None`` of a list), and why.

    ``kind`` is ``unreadable``, ``prompt``, ``target``, ``model``, ``memory`` or ``disk``; only ``disk`` is tried
    again by the next run. ``text`` is the prompt's beginning.
    """

    prompt: int
    line: int | None
    kind: str
    error: str
    text: str | None


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep's folder stands at the end of one run of it.

    ``n_prompts`` prompts in all, of which ``n_new`` were finished by this run (the failed ones included), in
    ``seconds``. ``errors`` are those without a result, in the prompts' order, as ``errors_file`` has them;
    ``errors_file`` is ``None`` where there are none, or where the disk did not take it.
    """

    folder: Path
    n_prompts: int
    n_new: int
    seconds: float
    errors: tuple[PromptError, ...]
    errors_file: Path | None

    @property
    def prompts_per_second(self) -> float:
        """Prompts finished by this run for each second of it."""
        return self.n_new / self.seconds if self.seconds > 0 else 0.0

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON; written to ``path`` as well where one is given."""
        record = {
            "schema": "tl_neuron_attr.sweep_outcome",
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "folder": str(self.folder),
            "errors_file": None if self.errors_file is None else str(self.errors_file),
            "prompts_per_second": self.prompts_per_second,
        }
        return serialise.dump(record, path)


def sweep(
    model: Any,
    prompts: Any,
    out: str | Path,
    *,
    targets: Sequence[Any] | None = None,
    k: int = 300,
    query: bool = False,
    batch_size: int = 16,
    mix_lengths: bool = False,
    convention: Convention = "exact",
    prepend_bos: bool | None = None,
    leading_space: bool = True,
    part_size: int = PART_SIZE,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = True,
) -> SweepOutcome:
    """Attribute many prompts and keep everything in Parquet files under ``out``; call it again to go on.

    For each prompt: its prediction, layer and head scores, the top ``k`` value neurons of both kinds and, under
    ``query``, the top ``k`` MLP neurons that activate the first 30 attention neurons. Columns and units are in
    :mod:`tl_neuron_attr.sweep_schema`; :func:`load_sweep` reads them. Under ``accelerate launch`` the processes split
    the prompts.

    Args:
        model: as for :func:`trace`.
        prompts: the path of a ``.jsonl`` or ``.csv`` file with ``prompt`` (and ``answer``, ``type``), or a list of
            :class:`KnowledgePrompt` and of what :func:`trace` takes.
        out: the folder; new, empty, or that of this very sweep.
        targets: for a list of prompts, one target for each; ``None`` is the model's own prediction.
        k: how many neurons of each kind.
        query: whether to rank query neurons too.
        batch_size: how many prompts of one length to run at once; with more than 1, all of a part share the products
            of their neurons with the vocabulary. Memory permitting, and not part of what must stay the same.
        mix_lengths: whether prompts of like length share a forward pass too, as for :func:`trace_batch`: faster where
            lengths are many, but the pass rounds otherwise, so neurons whose scores are within 1e-5 of each other may
            change places. Not part of what must stay the same either.
        convention: as for :func:`trace`.
        prepend_bos: as for :func:`trace`.
        leading_space: for a file, whether answers without a space before them get one, as for :func:`read_prompts`.
        part_size: how many prompts make a part, so how much work a kill can cost.
        memory_budget: bytes for activations and products.
        progress: whether to show a progress bar on standard error; none is shown where that is not a terminal.

    Raises:
        SweepError: ``out`` was begun with other settings (which, and both values), or holds other files.
        UnsupportedModelError: the method is not defined for this model.
        ValueError: ``k``, ``batch_size``, ``part_size`` below 1, a budget below one MiB, prompts or targets that
            are none.
        OSError: the prompts cannot be read, or the folder or its manifest cannot be written.

    A prompt that cannot be attributed (unreadable, too long, a target of several tokens) costs itself only: see the
    outcome's ``errors``.

    Example:
        >>> import tempfile
        >>> import tl_neuron_attr as na
        >>> with tempfile.TemporaryDirectory() as out:
        ...     done = na.sweep(na.load_demo_model(), ["The capital of France is"], out, k=10)
        ...     again = na.sweep(na.load_demo_model(), ["The capital of France is"], out, k=10)
        ...     frame = na.load_sweep(out).neurons("mlp")
        >>> done.n_new, again.n_new, len(frame)
        (1, 0, 10)
    """
    k, batch_size = check_count("k", k), check_count("batch_size", batch_size)
    if memory_budget < 2**20:
        raise ValueError(f"memory_budget={memory_budget} bytes: give at least one MiB (2**20)")
    view, vocabulary = prepare(model, convention)
    checked_layers(view, "mlp", None)
    plan = plan_of(prompts, targets, part_size, leading_space)
    settings = {
        "model": view.name,
        "class": type(model).__name__,
        "revision": view.revision,
        "weights": view.fingerprint(),
        "dtype": str(view.dtype).removeprefix("torch."),
        **settings_of(
            plan, k=k, query=query, convention=convention, leading_space=leading_space, prepend_bos=prepend_bos
        ),
    }
    folder = SweepFolder(out, settings, versions())
    wanted = Wanted(k, query, convention, prepend_bos, batch_size, memory_budget, mix_lengths)
    return _Run(folder, plan, PartRunner(view, vocabulary, wanted), progress).result()


class _Run:
    """One run of a sweep in one process."""

    def __init__(self, folder: SweepFolder, plan: Plan, runner: PartRunner, progress: bool) -> None:
        self._folder, self._plan, self._runner, self._progress = folder, plan, runner, progress
        self._workers = Workers()
        self._refused: list[tuple[int, str]] = []
        self._needs = 0
        self._n_failed = 0

    def result(self) -> SweepOutcome:
        start = time.perf_counter()
        missing = self._workers.from_main(self._begun)
        if not self._workers.is_main:
            self._folder.check()
        n_missing = sum(len(self._plan.part(part)) for part in missing)
        hidden = None if self._progress and self._workers.is_main else True  # None: hidden where it is no terminal
        with tqdm(total=n_missing, disable=hidden, desc="sweep", unit="prompt", smoothing=0.1) as bar:
            for part in self._workers.share(missing):
                self._do(part, bar)
        reasons = dict(self._workers.gather(self._refused))
        return self._workers.from_main(lambda: self._ended(missing, reasons, time.perf_counter() - start))

    def _begun(self) -> list[int]:
        self._folder.begin()
        return self._folder.missing(self._plan.n_parts)

    def _do(self, part: int, bar: Any) -> None:
        entries = self._plan.part(part)
        if self._refused and not self._folder.has_room(self._needs):
            self._refused.append((part, self._refused[-1][1]))
            return

        def done(count: int, failed: int) -> None:
            self._n_failed += failed
            ahead = count * self._workers.count  # the others are about as fast
            bar.update(ahead if bar.total is None else min(ahead, bar.total - bar.n))
            if failed:
                bar.set_postfix(errors=self._n_failed, refresh=False)

        tables = self._runner.part(entries, done)
        try:
            self._folder.write(part, tables)
        except OSError as error:
            self._needs = self._folder.size(tables)
            self._refused.append((part, f"the results cannot be written: {error.strerror or error}"))

    def _ended(self, missing: list[int], reasons: dict[int, str], seconds: float) -> SweepOutcome:
        plan, folder = self._plan, self._folder
        left = folder.missing(plan.n_parts)
        errors = [
            PromptError(row["prompt"], row["line"], row["error_kind"], row["error"], _short(row["text"]))
            for row in folder.errors(plan.n_parts)
        ]
        errors += [
            PromptError(
                entry.number, entry.line, "disk", reasons.get(part, "the part is missing"), _short(entry.text)
            )
            for part in left
            for entry in plan.part(part)
        ]
        errors.sort(key=lambda error: error.prompt)
        if not left:
            folder.tidy()
        try:
            errors_file = folder.write_errors(vars(error) for error in errors)
        except OSError:  # the errors are in the outcome
            errors_file = None
        n_new = sum(len(plan.part(part)) for part in missing if part not in left)
        return SweepOutcome(folder.folder, len(plan.entries), n_new, seconds, tuple(errors), errors_file)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 200 else text[:200] + " ..."
