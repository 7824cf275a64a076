"""Plots of results as Plotly figures, made from results alone: no model is needed, and none is touched.

=========================  ==========================================================================
figure                     of what
=========================  ==========================================================================
:func:`layers`             ``layer_scores``, ``query_layers``: attention and MLP, layer by layer
:func:`heads`              ``head_scores``: layer by head
:func:`positions`          ``position_scores``: what one head brings from each source token
:func:`neurons_per_layer`  how many ranked neurons each layer has, value against query
:func:`ranks`              a ranking: score against rank, and the cumulative sum
:func:`flow`               ``links``: query neurons, the value neurons they feed, the target
:func:`ablation`           ``ablation_curve``: the best neurons against random ones
:func:`methods`            ``compare_methods``: each method's neurons, with intervals
:func:`overlap`            ``overlap``: what types have in common
=========================  ==========================================================================

A figure is returned and never shown, saved, or given a global template. Every title names the unit and the prompt;
prompts and tokens are quoted, shortened and escaped (``<b>`` and ``$`` are text). The look, and why it reads on
light and dark pages and without colour: :mod:`tl_neuron_attr.plots.style`.
"""

from tl_neuron_attr.plots.ablation_bands import ablation
from tl_neuron_attr.plots.flow_diagram import flow
from tl_neuron_attr.plots.head_map import heads
from tl_neuron_attr.plots.layer_bars import layers
from tl_neuron_attr.plots.layer_counts import neurons_per_layer
from tl_neuron_attr.plots.method_intervals import methods
from tl_neuron_attr.plots.overlap_matrix import overlap
from tl_neuron_attr.plots.rank_curve import ranks
from tl_neuron_attr.plots.source_bars import positions

__all__ = ["ablation", "flow", "heads", "layers", "methods", "neurons_per_layer", "overlap", "positions", "ranks"]
