"""A Hugging Face model in float64 throughout, although transformers computes parts of it in float32."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Only(TorchFunctionMode):
    """Turns the casts to float32 inside a model (softmax, RMSNorm, rotary angles) into casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(widen(a) for a in args)
        return func(*args, **{k: widen(v) for k, v in (kwargs or {}).items()})


def widen_rotary(model: Any) -> None:
    """Rotary frequencies are computed in float32 by transformers: again, in float64. So is what GPT-J keeps."""
    for module in model.modules():
        for name in [n for n in vars(module) | module._buffers if n.endswith("inv_freq") and "original" not in n]:
            if isinstance(getattr(module, name), torch.Tensor):
                _replace(module, name, _frequencies(module, model.config, name))
        table = getattr(module, "embed_positions", None)  # OPT has a learned embedding of that name
        if isinstance(table, torch.Tensor):
            positions, dim = table.shape
            angles = torch.arange(positions, dtype=torch.float64)[:, None] * _powers(10000.0, dim // 2)
            _replace(module, "embed_positions", torch.cat((angles.sin(), angles.cos()), dim=1))
        if isinstance(getattr(module, "scale_attn", None), torch.Tensor):  # GPT-J of transformers 4
            _replace(module, "scale_attn", torch.tensor(module.head_dim, dtype=torch.float64).sqrt())


def _frequencies(module: Any, config: Any, name: str) -> torch.Tensor:
    """Of one rotary module; it may have a configuration of its own, and one set for each type of layer."""
    config = getattr(module, "config", config)
    theta = getattr(config, "rope_theta", None)
    if theta is None:
        rope = config.rope_parameters
        theta = rope.get(name.removesuffix("_inv_freq"), rope)["rope_theta"]
    return _powers(float(theta), getattr(module, name).shape[0])


def _powers(theta: float, n: int) -> torch.Tensor:
    """[n]: theta^(-i / n)."""
    return theta ** (-torch.arange(n, dtype=torch.float64) / n)


def _replace(module: Any, name: str, wide: torch.Tensor) -> None:
    torch.testing.assert_close(getattr(module, name).double(), wide, atol=1e-5, rtol=1e-5)
    setattr(module, name, wide)
