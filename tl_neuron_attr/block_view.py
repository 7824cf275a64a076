"""Weights and norms of one block, under TransformerLens's attribute names; a part of the model view.

Attribute names are common to ``HookedTransformer`` and ``TransformerBridge``; what differs is told apart by what
a module holds (a bridge component wraps an ``original_component``), never by its class.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tl_neuron_attr.activations import Activation, activations
from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.neurons import Kind
from tl_neuron_attr.norms import Norm
from tl_neuron_attr.post import Post


@dataclass(frozen=True, eq=False)
class MLPInputs:
    """How an MLP computes ``post = act(pre) * linear + after`` from its normalised input ``x``.

    ``pre = x W_pre + b_pre``; a gated MLP multiplies by ``linear = x W_linear + b_linear``, a plain one has
    ``W_linear`` ``None``. ``after`` is a bias added behind the product (HookedTransformer's gated MLPs). ``acts``
    are the functions that ``act`` may be, the declared one first (:mod:`tl_neuron_attr.activations`).
    """

    W_pre: Float[Tensor, "d_model d_mlp"]
    b_pre: Float[Tensor, " d_mlp"] | None
    W_linear: Float[Tensor, "d_model d_mlp"] | None
    b_linear: Float[Tensor, " d_mlp"] | None
    after: Float[Tensor, " d_mlp"] | None
    acts: tuple[Activation, ...]


class BlockView:
    """One block of a model; tensors are the model's own."""

    def __init__(self, block: Any, cfg: Any, where: str, n_kv_heads: int) -> None:
        self.block, self.cfg, self.where = block, cfg, where
        self.n_heads: int = cfg.n_heads
        self.n_kv_heads = n_kv_heads

    # ---- attention ------------------------------------------------------------------------------------

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output matrices of the query heads."""
        return weight(self.block.attn, "W_O", f"{self.where}.attn")

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """Value matrices, one for each key-value head (HookedTransformer repeats them for each query head)."""
        return self._per_kv_head(weight(self.block.attn, "W_V", f"{self.where}.attn"))

    @property
    def b_V(self) -> Float[Tensor, "kv_head d_head"] | None:
        """Value biases, one for each key-value head."""
        found = bias(self.block.attn, "b_V")
        return None if found is None else self._per_kv_head(found.reshape(-1, self.cfg.d_head))

    @property
    def b_O(self) -> Float[Tensor, " d_model"] | None:
        """The attention output bias, if there is one."""
        return bias(self.block.attn, "b_O")

    def _per_kv_head(self, tensor: Tensor) -> Tensor:
        if tensor.shape[0] not in (self.n_heads, self.n_kv_heads):
            raise UnsupportedModelError(
                f"{self.where}.attn has values of {tensor.shape[0]} heads; the configuration declares {self.n_heads} "
                f"query and {self.n_kv_heads} key-value heads, so which value belongs to which head is unknown"
            )
        return tensor[:: tensor.shape[0] // self.n_kv_heads]

    @property
    def attn_norm(self) -> Norm:
        """The norm before attention; OLMo-2 has none."""
        return read_norm(None if self._normed_after else getattr(self.block, "ln1", None), self.cfg)

    def post(self, kind: Kind) -> Post:
        """What becomes of a sublayer's output before it is added."""
        name = "ln1" if kind == "attn" else "ln2"
        module = getattr(self.block, name if self._normed_after else f"{name}_post", None)
        multiplier = float(getattr(self.block, "residual_contribution_scale", 1.0))
        return Post(None if module is None else read_norm(module, self.cfg), multiplier)

    @property
    def _normed_after(self) -> bool:
        """Whether ``ln1`` and ``ln2`` are behind the sublayers, as TransformerLens 3 names the norms of OLMo-2."""
        module = getattr(self.block, "ln1", None)
        if hasattr(module, "original_component"):
            return str(getattr(module, "name", None)).startswith("post_")
        return str(getattr(self.cfg, "original_architecture", None)).startswith(("Olmo2", "Olmo3"))

    # ---- MLP ------------------------------------------------------------------------------------------

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """MLP output rows, one for each neuron."""
        return weight(self.block.mlp, "W_out", f"{self.where}.mlp")

    @property
    def b_out(self) -> Float[Tensor, " d_model"] | None:
        """The MLP output bias, if there is one."""
        return bias(self.block.mlp, "b_out")

    @property
    def mlp_norm(self) -> Norm:
        """The norm before the MLP; some parallel blocks share the one before attention, OLMo-2 has none."""
        own = None if self._normed_after else getattr(self.block, "ln2", None)
        return self.attn_norm if own is None else read_norm(own, self.cfg)

    @property
    def mlp_inputs(self) -> MLPInputs:
        """Input matrices, biases and activation functions of the MLP."""
        mlp, where = self.block.mlp, f"{self.where}.mlp"
        W_in, b_in, acts = weight(mlp, "W_in", where), bias(mlp, "b_in"), activations(mlp, self.cfg)
        if getattr(mlp, "W_gate", None) is None:
            return MLPInputs(W_in, b_in, None, None, None, acts)
        W_gate, b_gate = weight(mlp, "W_gate", where), bias(mlp, "b_gate")
        if hasattr(mlp, "original_component"):
            return MLPInputs(W_gate, b_gate, W_in, b_in, None, acts)
        return MLPInputs(W_gate, b_gate, W_in, None, b_in, acts)


def value_heads(model: Any, cfg: Any) -> int:
    """How many heads ``hook_v`` holds: a HookedTransformer may repeat those of grouped attention before it."""
    ungrouped = getattr(cfg, "ungroup_grouped_query_attention", False) and not hasattr(model, "original_model")
    return int(cfg.n_heads if ungrouped else cfg.n_key_value_heads or cfg.n_heads)


def weight(owner: Any, name: str, where: str) -> Tensor:
    """A weight matrix, or :class:`UnsupportedModelError` where it is missing or packed."""
    try:
        tensor = getattr(owner, name, None)
    except (ValueError, RuntimeError) as error:  # heads of another width in this layer, say
        raise UnsupportedModelError(
            f"{where}.{name} of this model cannot be read ({error}), so neuron vectors are not known; use a model "
            f"whose layers are alike"
        ) from error
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UnsupportedModelError(
            f"{where}.{name} of this model is not a floating-point matrix (got {kind}): neuron vectors must "
            f"be readable; load the model unquantised, or dequantise it"
        )
    return tensor.detach()


def bias(owner: Any, name: str) -> Tensor | None:
    """A bias, or ``None`` where the model has none."""
    tensor = getattr(owner, name, None)
    return tensor.detach() if isinstance(tensor, Tensor) else None


def read_norm(module: Any, cfg: Any) -> Norm:
    """Read a norm by what it holds: gain and bias where there are any, LayerNorm or RMSNorm by configuration."""
    inner = getattr(module, "original_component", None)
    style = str(getattr(cfg, "normalization_type", None) or "")
    if module is None or isinstance(module, nn.Identity) or (not style and inner is None):
        return Norm(None, None, centred=False, eps=0.0, identity=True)
    owner = module if inner is None else inner
    gain = bias(owner, "w") if bias(owner, "w") is not None else bias(owner, "weight")
    offset = getattr(cfg, "rmsnorm_uses_offset", False) or type(inner).__name__.endswith("LayerNorm1P")  # Nemotron
    if gain is not None and offset and inner is not None:
        gain = 1 + gain
    return Norm(
        gain=gain,
        bias=bias(owner, "b") if bias(owner, "b") is not None else bias(owner, "bias"),
        centred=style.startswith("LN"),
        eps=_eps(owner, cfg),
    )


def _eps(owner: Any, cfg: Any) -> float:
    for name in ("eps", "variance_epsilon"):
        value = getattr(owner, name, None)
        if isinstance(value, float | Tensor):
            return float(value)
    return float(cfg.eps)
