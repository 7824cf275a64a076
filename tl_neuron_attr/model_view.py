"""One view of every TransformerLens model; the only file that knows TransformerLens's model classes.

``HookedTransformer`` (TransformerLens 2 and 3) and ``TransformerBridge`` (3 and 4) name most things alike and
differ in the rest: where the norms keep their weights, whether ``W_V`` is repeated for grouped query heads,
what a folded model still holds. :class:`ModelView` answers those questions once, and refuses by name a model
for which the method has no meaning. Flags are only believed as far as :mod:`tl_neuron_attr.checks` confirms
them on numbers at every trace.
"""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_neuron_attr.block_view import BlockView, bias, read_norm, value_heads, weight
from tl_neuron_attr.errors import UnsupportedModelError
from tl_neuron_attr.logits import Cap, LogitMap
from tl_neuron_attr.norms import Norm
from tl_neuron_attr.refusals import mlp_refusal, reads_length, refuse
from tl_neuron_attr.tokens import Tokens
from tl_neuron_attr.unchanged import Weights

# Configuration fields that Hugging Face models read for dropout without a module of its own.
_FUNCTIONAL_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "dropout")
# Every token is a real one: a HookedTransformer whose tokenizer pads on the left would take leading tokens of the
# padding's id for padding and mask them.
_AS_TOKENS = {"return_type": "logits", "padding_side": "right"}


class ModelView:
    """Weights, norms and hook names of one model; tensors are the model's own, never copies unless it says so.

    Raises :class:`UnsupportedModelError` for a model whose residual stream, attention or MLP is not of the
    kind that the method is defined for.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cfg: Any = getattr(model, "cfg", None)
        if not isinstance(model, nn.Module) or self.cfg is None or not hasattr(model, "run_with_cache"):
            raise UnsupportedModelError(
                f"got a {type(model).__name__}: tl_neuron_attr attributes TransformerLens models, so load it as "
                f"a TransformerBridge (TransformerLens 3 and 4) or a HookedTransformer (2 and 3)"
            )
        self.name: str = str(getattr(self.cfg, "model_name", None) or type(model).__name__)
        refuse(model, self.cfg, self.name)
        self.n_layers: int = self.cfg.n_layers
        self._mlp_refusals = [mlp_refusal(model, self.cfg, self.name, layer) for layer in range(self.n_layers)]
        self.n_heads: int = self.cfg.n_heads
        self.n_kv_heads: int = value_heads(model, self.cfg)
        self.d_head: int = self.cfg.d_head
        self.d_model: int = self.cfg.d_model
        self.dtype: torch.dtype = self.W_U.dtype
        if self.W_U.shape[0] != self.d_model:
            raise UnsupportedModelError(
                f"{self.name} has a residual stream of width {self.d_model} and an unembedding that reads width "
                f"{self.W_U.shape[0]}: what projects one to the other is not known, so scores are not defined"
            )
        self.compute_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._hook_names = self._needed_hooks()
        hook_points = cast("Mapping[str, Any]", model.hook_dict)
        missing = [name for name in self._hook_names if name not in hook_points]
        if missing:
            raise UnsupportedModelError(
                f"{self.name} ({type(model).__name__}) has no hook point {missing[0]!r} "
                f"({len(missing)} of the needed ones missing): neuron scores need the standard attention and "
                f"MLP hooks in every attributed layer"
            )
        self._weights = Weights(model)

    def check_unchanged(self) -> None:
        """Raise :class:`ValueError` if the weights are others than when this view was made (see ``unchanged``)."""
        if not self._weights.are_still_of(self.model):
            raise ValueError(
                f"the weights of {self.name} changed since the trace was made (or were moved away and back), so its "
                f"activations are not known to be of this model: make the trace (and any InverseRanks) again"
            )

    @property
    def revision(self) -> str | None:
        """The commit of the model hub that the weights came from, where the model says it."""
        original = getattr(getattr(self.model, "original_model", None), "config", None)
        found = getattr(original, "_commit_hash", None) or getattr(self.cfg, "_commit_hash", None)
        return None if found is None else str(found)

    def fingerprint(self) -> str:
        """A hash of names, shapes, precisions and some entries of all weights: it tells models of one name apart."""
        seen = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // 64)].to("cpu", torch.float64)
            seen.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {some.tolist()}".encode())
        return f"sha256:{seen.hexdigest()}"

    # ---- refusals -------------------------------------------------------------------------------------

    def mlp_refusal(self, layer: int) -> str | None:
        """Why the MLP neurons of ``layer`` cannot be attributed, or ``None`` where they can."""
        return self._mlp_refusals[layer]

    def check_ready(self) -> None:
        """Raise :class:`ValueError` if a forward pass would be random (training mode with dropout)."""
        original = getattr(self.model, "original_model", None)
        rates = {
            name: module.p
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Dropout) and module.training and module.p > 0
        }
        for name in _FUNCTIONAL_DROPOUT:
            value = getattr(getattr(original, "config", None), name, None)
            if getattr(original, "training", False) and isinstance(value, float | int) and value > 0:
                rates[f"config.{name}"] = float(value)
        if rates:
            where, rate = next(iter(rates.items()))
            raise ValueError(
                f"{self.name} is in training mode with dropout ({where} = {rate}): its forward pass is random, so "
                f"scores would differ from call to call; call model.eval() first"
            )

    # ---- one forward pass -----------------------------------------------------------------------------

    def hook_names(self) -> list[str]:
        """The hook points that a trace reads, in order of the forward pass."""
        return list(self._hook_names)

    def _needed_hooks(self) -> list[str]:
        names = ["hook_embed"]
        for layer in range(self.n_layers):
            names += [f"blocks.{layer}.{part}" for part in ("hook_resid_pre", "attn.hook_v")]
            names += [f"blocks.{layer}.{part}" for part in ("attn.hook_pattern", "attn.hook_z")]
            names.append(f"blocks.{layer}.hook_attn_out")
            if not self.cfg.attn_only:
                if self.mlp_refusal(layer) is None:
                    names.append(f"blocks.{layer}.mlp.hook_post")
                names.append(f"blocks.{layer}.hook_mlp_out")
        return [*names, f"blocks.{self.n_layers - 1}.hook_resid_post"]

    def logits(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row pos d_vocab"]:
        """Logits of one forward pass; gradients as the caller has set them."""
        return self.model(tokens.to(self.device), **_AS_TOKENS)

    def run(self, tokens: Int[Tensor, "row pos"]) -> tuple[Float[Tensor, "row pos d_vocab"], dict[str, Tensor]]:
        """Logits and the needed activations (with a row axis) of one forward pass, without gradients."""
        names = self._hook_names
        with torch.no_grad():
            logits, cache = self.model.run_with_cache(tokens.to(self.device), names_filter=names, **_AS_TOKENS)
        held = set(cache.keys())
        silent = [name for name in names if name not in held]
        if silent:
            raise UnsupportedModelError(
                f"{self.name} recorded nothing at {silent[0]!r} ({len(silent)} of the needed hook points never "
                f"fired): its blocks are not the standard ones, so neuron scores are not known to "
                f"be right; use another model"
            )
        return logits, {name: cache[name].detach() for name in names}

    def own_logits(self, resid: Float[Tensor, " d_model"]) -> Float[Tensor, " d_vocab"]:
        """What the model's own final norm and unembedding make of a final residual (no hook of anyone fires)."""
        norm, W_U, b_U = _without_hooks(self._ln_final), self.W_U, self.b_U
        of_norm = next(norm.parameters(), W_U)
        with torch.no_grad():
            logits = norm(resid[None, None].to(of_norm.device, self.dtype))[0, 0].to(W_U.device) @ W_U
            logits = logits if b_U is None else logits + b_U.to(W_U.device)
        return self.logit_map(logits)

    def embeddings(self, tokens: Int[Tensor, " pos"]) -> list[Float[Tensor, "pos d_model"]]:
        """What ``hook_embed`` may hold for these tokens: rows of ``W_E``, or those normalised (Bloom)."""
        rows = self.W_E[tokens.to(self.device)].to(self.compute_dtype)
        norm = getattr(self.model, "embed_ln", None) or getattr(getattr(self.model, "embed", None), "ln", None)
        if norm is None:
            return [rows]
        read = read_norm(norm, self.cfg)
        normalised = read.linear(rows, read.scale(rows))
        return [rows, normalised if read.bias is None else normalised + read.bias.to(normalised)]

    @property
    def device(self) -> torch.device:
        """Where the embedding lives, so where tokens go in."""
        return self.W_E.device

    @property
    def reads_length(self) -> bool:
        """Whether activations depend on the length of the whole text: rotary angles that are scaled with it."""
        return reads_length(self.model)

    def vocabulary(self) -> Tokens:
        """The model's tokenizer, vocabulary widths and context length."""
        n_ctx = getattr(self.cfg, "n_ctx", None)
        return Tokens(self.model, self.W_E.shape[0], self.W_U.shape[1], n_ctx)

    # ---- weights --------------------------------------------------------------------------------------

    @property
    def W_E(self) -> Float[Tensor, "d_vocab_in d_model"]:
        """The token embedding."""
        return weight(self.model, "W_E", "embed")

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding matrix."""
        return weight(self.model, "W_U", "unembed")

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"] | None:
        """The unembedding bias, if there is one."""
        return bias(self.model, "b_U")

    @property
    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        return read_norm(self._ln_final, self.cfg)

    @property
    def logit_map(self) -> LogitMap:
        """What the model makes of the unembedding's output: a multiplier (Cohere, Granite) and a cap (Gemma-2)."""
        original = getattr(self.model, "original_model", None)
        multiplier = getattr(original, "logit_scale", None)  # what the wrapped model's forward pass multiplies by
        scaling = getattr(getattr(original, "config", None), "logits_scaling", None)  # what it divides by
        if not isinstance(multiplier, int | float):
            multiplier = 1.0 if scaling is None else 1 / float(scaling)
        cap = getattr(self.cfg, "output_logits_soft_cap", None)
        return LogitMap(float(multiplier), Cap(float(cap)) if cap is not None and cap > 0 else None)

    def clipped(self, value: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
        """Values as attention uses them: OLMo and MPT may clip what ``hook_v`` holds."""
        original = getattr(getattr(self.model, "original_model", None), "config", None)
        owners = (self.cfg, original, getattr(original, "attn_config", None))
        clip = next((c for c in (getattr(owner, "clip_qkv", None) for owner in owners) if c is not None), None)
        return value if clip is None else value.clamp(-clip, clip)

    @property
    def attention_window(self) -> int | None:
        """The window beyond which Hugging Face's key-value cache forgets positions, if there is one."""
        size = getattr(getattr(getattr(self.model, "original_model", None), "config", None), "sliding_window", None)
        return size if isinstance(size, int) and size > 0 else None

    @property
    def _ln_final(self) -> nn.Module:
        """The final norm's module; a HookedTransformer without norms has none."""
        return getattr(self.model, "ln_final", None) or nn.Identity()

    def block(self, layer: int) -> BlockView:
        """Weights and norms of one block."""
        return BlockView(self.model.blocks[layer], self.cfg, f"blocks.{layer}", self.n_kv_heads)

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """Output matrices of the query heads."""
        return self.block(layer).W_O

    def W_out(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """MLP output rows, one for each neuron; :class:`UnsupportedModelError` for a layer without neurons."""
        refusal = self.mlp_refusal(layer)
        if refusal is not None:
            raise UnsupportedModelError(refusal)
        return self.block(layer).W_out


def _without_hooks(module: nn.Module) -> nn.Module:
    """A copy of a small module that nobody's hooks are on; the hooks themselves are not copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks", "ctx"):
            held = getattr(part, name, None)
            if held is not None:
                memo[id(held)] = type(held)()
    return copy.deepcopy(module, memo)
