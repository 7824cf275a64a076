"""A model's undisturbed run, and its output with another residual stream at one position: interventions on the model.

Hooks set the stream behind the last block at one position, and keep the final norm's scale of the undisturbed run.
"""

from typing import Any

import torch
import zoo


class Run:
    """The undisturbed run of a model, and its output with another residual stream at one position."""

    def __init__(self, case: zoo.ZooCase, position: int) -> None:
        self.model, self.position = case.model, position % len(case.tokens)
        self.tokens = torch.tensor([case.tokens])
        with torch.no_grad():
            self.logits, cache = self.model.run_with_cache(self.tokens)
        self.cache = {key: value[0].detach().clone() for key, value in cache.items() if value.ndim > 2}
        self.scale = self.cache["ln_final.hook_scale"][self.position]
        self.last = self.model.cfg.n_layers - 1

    def at(self, layer: int, hook: str) -> torch.Tensor:
        return self.cache[f"blocks.{layer}.{hook}"]

    def with_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [d_vocab] of the model's own final norm and unembedding, with the scale frozen."""
        fired = []

        def set_stream(value: torch.Tensor, hook: Any) -> torch.Tensor:
            fired.append("stream")
            value = value.clone()
            value[:, self.position] = x
            return value

        def set_scale(value: torch.Tensor, hook: Any) -> torch.Tensor:
            fired.append("scale")
            value = value.clone()
            value[:, self.position] = self.scale
            return value

        def set_normalised(value: torch.Tensor, hook: Any) -> torch.Tensor:
            fired.append("scale")
            value = value.clone()
            value[:, self.position] = (x - x.mean()) / self.scale
            return value

        hooks: list[Any] = [(f"blocks.{self.last}.hook_resid_post", set_stream)]
        final = getattr(self.model.ln_final, "original_component", None)
        if type(final).__name__ == "OlmoLayerNorm":  # a bridge cannot edit the scale of a norm without weights
            hooks.append(("ln_final.hook_out", set_normalised))
        else:
            hooks.append(("ln_final.hook_scale", set_scale))
        with torch.no_grad():
            logits = self.model.run_with_hooks(self.tokens, fwd_hooks=hooks)
        assert fired == ["stream", "scale"]
        return logits[0, self.position].log_softmax(-1)

    def before_attn(self, layer: int) -> torch.Tensor:
        return self.at(layer, "hook_resid_pre")[self.position]

    def before_mlp(self, layer: int) -> torch.Tensor:
        return self.before_attn(layer) + self.at(layer, "hook_attn_out")[self.position]

    def mlp_vector(self, layer: int, neuron: int) -> torch.Tensor:
        return self.at(layer, "mlp.hook_post")[self.position, neuron] * self.model.W_out[layer, neuron].detach()

    def attn_vector(self, layer: int, head: int, dim: int, source: int) -> torch.Tensor:
        value = self.at(layer, "attn.hook_v")  # [pos, kv, dim]
        kv = head // (self.model.cfg.n_heads // value.shape[1])
        weight = self.at(layer, "attn.hook_pattern")[head, self.position, source]
        return weight * value[source, kv, dim] * self.model.W_O[layer, head, dim].detach()
