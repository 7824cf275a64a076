"""Neuron-level attribution for TransformerLens models.

    import tl_neuron_attr as na

    model = na.load_demo_model()
    trace = na.trace(model, "The capital of France is", target=" Paris")
    na.value_neurons(trace, "mlp", k=300)

Public names load their module on first use, so importing the package costs next to nothing beside importing
TransformerLens, and `tl-neuron-attr --version` imports neither it nor PyTorch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tl_neuron_attr import plots as plots
    from tl_neuron_attr.ablation import ablating as ablating
    from tl_neuron_attr.ablation import ablation_hooks as ablation_hooks
    from tl_neuron_attr.ablation_table import AblationTable as AblationTable
    from tl_neuron_attr.analysis import layer_histogram as layer_histogram
    from tl_neuron_attr.analysis import layer_means as layer_means
    from tl_neuron_attr.analysis import layer_sums as layer_sums
    from tl_neuron_attr.analysis import neuron_sums as neuron_sums
    from tl_neuron_attr.answers import AnswerCheck as AnswerCheck
    from tl_neuron_attr.answers import answerable as answerable
    from tl_neuron_attr.answers import check_answers as check_answers
    from tl_neuron_attr.batching import trace_batch as trace_batch
    from tl_neuron_attr.causal import Causal as Causal
    from tl_neuron_attr.compare import compare as compare
    from tl_neuron_attr.comparison import MethodComparison as MethodComparison
    from tl_neuron_attr.curves import AblationCurve as AblationCurve
    from tl_neuron_attr.curves import ablation_curve as ablation_curve
    from tl_neuron_attr.differences import method_differences as method_differences
    from tl_neuron_attr.effects import AblationEffect as AblationEffect
    from tl_neuron_attr.effects import ablation_effect as ablation_effect
    from tl_neuron_attr.errors import UnsupportedModelError as UnsupportedModelError
    from tl_neuron_attr.evaluation import compare_methods as compare_methods
    from tl_neuron_attr.gradients import AttributionPatching as AttributionPatching
    from tl_neuron_attr.gradients import GradientTimesActivation as GradientTimesActivation
    from tl_neuron_attr.integrated import IntegratedGradients as IntegratedGradients
    from tl_neuron_attr.knockouts import ablate_query_neurons as ablate_query_neurons
    from tl_neuron_attr.knockouts import ablate_type_heads as ablate_type_heads
    from tl_neuron_attr.knockouts import ablate_value_neurons as ablate_value_neurons
    from tl_neuron_attr.knowledge import load_knowledge as load_knowledge
    from tl_neuron_attr.links import links as links
    from tl_neuron_attr.methods import METHODS as METHODS
    from tl_neuron_attr.methods import STATIC_METHODS as STATIC_METHODS
    from tl_neuron_attr.methods import methods_table as methods_table
    from tl_neuron_attr.models import load_demo_model as load_demo_model
    from tl_neuron_attr.models import load_model as load_model
    from tl_neuron_attr.modes import MeanActivations as MeanActivations
    from tl_neuron_attr.modes import ResampledActivations as ResampledActivations
    from tl_neuron_attr.modes import Scale as Scale
    from tl_neuron_attr.modes import SetTo as SetTo
    from tl_neuron_attr.modes import Zero as Zero
    from tl_neuron_attr.neurons import (
        AttnNeuron as AttnNeuron,
    )
    from tl_neuron_attr.neurons import (
        Head as Head,
    )
    from tl_neuron_attr.neurons import (
        Layer as Layer,
    )
    from tl_neuron_attr.neurons import (
        MLPNeuron as MLPNeuron,
    )
    from tl_neuron_attr.positions import position_scores as position_scores
    from tl_neuron_attr.positions import source_scores as source_scores
    from tl_neuron_attr.prompt_files import BadLine as BadLine
    from tl_neuron_attr.prompt_files import KnowledgePrompt as KnowledgePrompt
    from tl_neuron_attr.prompt_files import read_prompts as read_prompts
    from tl_neuron_attr.query import TinyDenominatorWarning as TinyDenominatorWarning
    from tl_neuron_attr.query import query_layers as query_layers
    from tl_neuron_attr.query import query_neurons as query_neurons
    from tl_neuron_attr.ranks import CoefficientInverseRank as CoefficientInverseRank
    from tl_neuron_attr.ranks import InverseRank as InverseRank
    from tl_neuron_attr.ranks import InverseRanks as InverseRanks
    from tl_neuron_attr.recording import mean_activations as mean_activations
    from tl_neuron_attr.recording import resample as resample
    from tl_neuron_attr.report import report as report
    from tl_neuron_attr.results import (
        HeadScores as HeadScores,
    )
    from tl_neuron_attr.results import (
        LayerScores as LayerScores,
    )
    from tl_neuron_attr.results import (
        NeuronScores as NeuronScores,
    )
    from tl_neuron_attr.results import (
        RankedNeurons as RankedNeurons,
    )
    from tl_neuron_attr.rows import BatchingWarning as BatchingWarning
    from tl_neuron_attr.shared import shared_neurons as shared_neurons
    from tl_neuron_attr.shared import top_heads as top_heads
    from tl_neuron_attr.sharing import SharedNeurons as SharedNeurons
    from tl_neuron_attr.sharing import overlap as overlap
    from tl_neuron_attr.sweep import PromptError as PromptError
    from tl_neuron_attr.sweep import SweepOutcome as SweepOutcome
    from tl_neuron_attr.sweep import sweep as sweep
    from tl_neuron_attr.sweep_read import SweepFiles as SweepFiles
    from tl_neuron_attr.sweep_read import load_sweep as load_sweep
    from tl_neuron_attr.sweep_store import SweepError as SweepError
    from tl_neuron_attr.targets import AnyOf as AnyOf
    from tl_neuron_attr.targets import Contrast as Contrast
    from tl_neuron_attr.targets import TargetError as TargetError
    from tl_neuron_attr.trace import Trace as Trace
    from tl_neuron_attr.trace import required_hooks as required_hooks
    from tl_neuron_attr.trace import trace as trace
    from tl_neuron_attr.trace import trace_continuation as trace_continuation
    from tl_neuron_attr.value import (
        head_scores as head_scores,
    )
    from tl_neuron_attr.value import (
        layer_scores as layer_scores,
    )
    from tl_neuron_attr.value import (
        value_neurons as value_neurons,
    )
    from tl_neuron_attr.value import (
        value_scores as value_scores,
    )
    from tl_neuron_attr.vocab import promoted_tokens as promoted_tokens
    from tl_neuron_attr.vocab import through_head as through_head

# Public name -> the submodule that defines it.
_HOME = {
    "AblationCurve": "curves",
    "AblationEffect": "effects",
    "AblationTable": "ablation_table",
    "AnswerCheck": "answers",
    "AnyOf": "targets",
    "AttnNeuron": "neurons",
    "AttributionPatching": "gradients",
    "BadLine": "prompt_files",
    "BatchingWarning": "rows",
    "Causal": "causal",
    "CoefficientInverseRank": "ranks",
    "Contrast": "targets",
    "GradientTimesActivation": "gradients",
    "Head": "neurons",
    "HeadScores": "results",
    "IntegratedGradients": "integrated",
    "InverseRank": "ranks",
    "InverseRanks": "ranks",
    "KnowledgePrompt": "prompt_files",
    "Layer": "neurons",
    "LayerScores": "results",
    "METHODS": "methods",
    "MLPNeuron": "neurons",
    "MeanActivations": "modes",
    "MethodComparison": "comparison",
    "NeuronScores": "results",
    "PromptError": "sweep",
    "RankedNeurons": "results",
    "ResampledActivations": "modes",
    "STATIC_METHODS": "methods",
    "Scale": "modes",
    "SetTo": "modes",
    "SharedNeurons": "sharing",
    "SweepError": "sweep_store",
    "SweepFiles": "sweep_read",
    "SweepOutcome": "sweep",
    "TargetError": "targets",
    "TinyDenominatorWarning": "query",
    "Trace": "trace",
    "UnsupportedModelError": "errors",
    "Zero": "modes",
    "ablate_query_neurons": "knockouts",
    "ablate_type_heads": "knockouts",
    "ablate_value_neurons": "knockouts",
    "ablating": "ablation",
    "ablation_curve": "curves",
    "ablation_effect": "effects",
    "ablation_hooks": "ablation",
    "answerable": "answers",
    "check_answers": "answers",
    "compare": "compare",
    "compare_methods": "evaluation",
    "head_scores": "value",
    "layer_histogram": "analysis",
    "layer_means": "analysis",
    "layer_scores": "value",
    "layer_sums": "analysis",
    "links": "links",
    "load_demo_model": "models",
    "load_knowledge": "knowledge",
    "load_model": "models",
    "load_sweep": "sweep_read",
    "mean_activations": "recording",
    "method_differences": "differences",
    "methods_table": "methods",
    "neuron_sums": "analysis",
    "overlap": "sharing",
    "position_scores": "positions",
    "promoted_tokens": "vocab",
    "query_layers": "query",
    "query_neurons": "query",
    "read_prompts": "prompt_files",
    "report": "report",
    "required_hooks": "trace",
    "resample": "recording",
    "shared_neurons": "shared",
    "source_scores": "positions",
    "sweep": "sweep",
    "through_head": "vocab",
    "top_heads": "shared",
    "trace": "trace",
    "trace_batch": "batching",
    "trace_continuation": "trace",
    "value_neurons": "value",
    "value_scores": "value",
}

# Submodules that are used by their own name, `na.plots.methods(...)`, without an import of their own.
_SUBMODULES = ("plots",)

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


class _Package(ModuleType):
    """Keeps a public name public where a submodule shares it.

    Importing the submodule `tl_neuron_attr.trace` makes the import system set it as the attribute `trace` of
    the package, which would hide the function `trace`. The submodule stays reachable in `sys.modules` and by
    `from tl_neuron_attr.trace import ...`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
