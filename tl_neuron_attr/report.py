"""One prediction as a page to read, keep and send: one HTML file that needs no network and no Python."""

from pathlib import Path

from tl_neuron_attr import serialise
from tl_neuron_attr.page.build import page
from tl_neuron_attr.page.story import Story, tell
from tl_neuron_attr.ranking import check_count
from tl_neuron_attr.readout import DEFAULT_MEMORY_BUDGET
from tl_neuron_attr.trace import Trace
from tl_neuron_attr.whole_file import write_text_whole


def report(
    trace: Trace,
    path: str | Path,
    *,
    k: int = 20,
    n_tokens: int = 5,
    controls: int = 10,
    seed: int = 0,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress: bool = False,
) -> Path:
    """Write a page about a trace to ``path`` (about 5 MB, nearly all of it plotly.js) and return the path.

    The page holds the prompt with what attention brings from each token (:func:`source_scores` summed over layers,
    nats), the prediction, layers, heads, value neurons of both kinds and query neurons with the tokens they promote
    as tables that sort, figures, and an ablation check. It loads nothing, works without a network, and says how every
    number is defined. An existing file is replaced, and only by a whole one.

    The ablations take ``1 + controls`` runs of the prompt for each of three rankings and each of 1, 2, 5, ... ``k``
    neurons, and of both parts of the query neurons where some, but not all, contribute most at the first token (187
    runs by default), in batches within ``memory_budget``.

    Args:
        trace: a trace of any target; its model is run again for the ablations.
        path: the file to write.
        k: how many heads and neurons of each kind the tables show; the best 1, 2, 5, ... up to ``k`` neurons are
            ablated. Figures of rankings show the top 300, or ``k`` if that is more.
        n_tokens: how many tokens are listed as predicted, and as promoted and demoted by each neuron.
        controls: how many draws of as many random neurons of the same layers each ablation is compared with; 0 for
            none.
        seed: of those draws.
        memory_budget: bytes for intermediate results.
        progress: whether to show progress bars of the ablations on stderr.

    Raises:
        OSError: the file cannot be written; its folder is not there, it is a folder itself, or permission is missing.
            Said before any work.
        ValueError: ``k`` or ``n_tokens`` below 1, ``controls`` below 0, layers with too few other neurons for the
            controls, a model that no longer predicts what was traced.
        UnsupportedModelError: a model with layers without MLP neurons.

    Example:
        >>> import tempfile
        >>> import tl_neuron_attr as na
        >>> trace = na.trace(na.load_demo_model(), "The capital of France is", " Paris")
        >>> na.report(trace, f"{tempfile.mkdtemp()}/paris.html", k=5, controls=2).name
        'paris.html'
    """
    path = serialise.writable(path)
    check_count("k", k)
    check_count("n_tokens", n_tokens)
    if controls < 0:
        raise ValueError(f"controls is {controls}: give the number of random draws, 0 or more")
    options = {"k": k, "n_tokens": n_tokens, "controls": controls, "seed": seed}
    write(tell(trace, **options, memory_budget=memory_budget, progress=progress), path)
    return path


def write(story: Story, path: str | Path) -> None:
    """The page of a story as a file, whole or not at all."""
    write_text_whole(Path(path), page(story))
