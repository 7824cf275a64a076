"""What is written down of a forward pass, and the few linear maps that a reader of it needs.

Shapes: `pos` positions, `head` query heads, `kv` key-value heads, `dim` dimensions of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray


@dataclass(frozen=True)
class Norm:
    """N(x) = (x - mean(x)) gain / s + bias, or without the mean (RMSNorm); s^2 = mean square + eps."""

    centred: bool
    eps: float
    gain: Array  # [d_model]
    bias: Array  # [d_model]

    def centre(self, x: Array) -> Array:
        return x - x.mean(-1, keepdims=True) if self.centred else x

    def scale(self, x: Array) -> Array:
        return np.sqrt((self.centre(x) ** 2).mean(-1) + self.eps)

    def __call__(self, x: Array) -> Array:
        return self.centre(x) * self.gain / self.scale(x)[..., None] + self.bias


@dataclass(frozen=True)
class PostMap:
    """What a vector given by a sublayer becomes when it is added: linear, the norm's scale being that of the run."""

    gain: Array  # [d_model]
    scale: Array  # [pos]
    multiplier: float

    def __call__(self, vectors: Array, position: int | slice) -> Array:
        """[..., d_model] at one position, or [pos, d_model] at all of them."""
        scale = self.scale[position]
        return self.multiplier * vectors * self.gain / (scale[:, None] if scale.ndim else scale)


@dataclass(frozen=True)
class LayerRecord:
    """What one block read, computed and added, and the weights that say so."""

    resid_pre: Array  # [pos, d_model]
    attn_out: Array  # [pos, d_model], what attention adds, bias included, after `attn_post`
    mlp_out: Array  # [pos, d_model], what the MLP adds, bias included, after `mlp_post`
    mlp_act: Array  # [pos, d_mlp], what multiplies the rows of W_out
    pattern: Array  # [head, dest, source]
    value: Array  # [pos, kv, dim], value bias included
    value_constant: Array  # [kv, dim]: what the values hold whatever the stream is, b_V + W_V' (bias of the norm)
    W_V: Array  # [kv, d_model, dim]
    W_O: Array  # [head, dim, d_model]
    W_out: Array  # [d_mlp, d_model]
    W_in: Array  # [d_model, d_mlp]; "up" of a gated MLP
    W_gate: Array | None  # [d_model, d_mlp]
    in_pre: Array  # [pos, d_mlp]
    gate_pre: Array | None  # [pos, d_mlp]
    norm_attn: Norm | None  # before attention; None: attention reads the stream itself
    norm_mlp: Norm | None
    attn_post: PostMap | None  # from what attention gives (biases included) to what is added; None: the same
    mlp_post: PostMap | None
    b_O: Array  # [d_model], before `attn_post`
    b_out: Array  # [d_model], before `mlp_post`
    parallel: bool  # whether the MLP reads the stream before attention

    @property
    def gain_attn(self) -> Array:
        """[d_model], of the norm before attention."""
        return np.ones(self.resid_pre.shape[1]) if self.norm_attn is None else self.norm_attn.gain

    @property
    def gain_mlp(self) -> Array:
        """[d_model], of the norm before the MLP."""
        return np.ones(self.resid_pre.shape[1]) if self.norm_mlp is None else self.norm_mlp.gain

    @property
    def mlp_read(self) -> Array:
        """[pos, d_model], the stream that the MLP reads."""
        return self.resid_pre if self.parallel else self.resid_pre + self.attn_out

    # as added at a position; a bias belongs to no neuron

    def attn_rows(self, position: int) -> Array:
        """[head, dim, d_model]."""
        return self.W_O if self.attn_post is None else self.attn_post(self.W_O, position)

    def mlp_rows(self, position: int) -> Array:
        """[d_mlp, d_model]."""
        return self.W_out if self.mlp_post is None else self.mlp_post(self.W_out, position)

    def attn_bias(self, position: int) -> Array:
        """[d_model]."""
        return self.b_O if self.attn_post is None else self.attn_post(self.b_O, position)

    def mlp_bias(self, position: int) -> Array:
        """[d_model]."""
        return self.b_out if self.mlp_post is None else self.mlp_post(self.b_out, position)


@dataclass(frozen=True)
class Recording:
    """A forward pass over one prompt. Logits: cap(logit_scale (W_U' N(x) + b_U)), cap(z) = c tanh(z / c)."""

    tokens: tuple[int, ...]
    embed: Array  # [pos, d_model], the residual stream's start
    layers: tuple[LayerRecord, ...]
    final: Array  # [pos, d_model], the residual stream before the final norm
    norm: Norm
    W_U: Array  # [d_model, d_vocab]
    b_U: Array  # [d_vocab]
    logit_scale: float
    cap: float | None
    log_probs: Array  # [pos, d_vocab], the model's own
    act: Callable[[torch.Tensor], torch.Tensor]

    def capped(self, z: Array) -> Array:
        return z if self.cap is None else self.cap * np.tanh(z / self.cap)
