"""Proof that a folder holds a model: what another library loads from it has the same weights and computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from burnish.utils.errors import ModelError
from burnish.utils.fingerprint import Fingerprints

_PROBE_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of a model without keeping it.

    Attributes:
        weights: fingerprint of each tensor of its state, by name; None where the names need not be those of the copy.
        outputs: logits (of a backbone the last hidden states) of a few tokens, [tokens, ...].
    """

    weights: dict[str, int] | None
    outputs: Tensor

    @classmethod
    def of(cls, model: nn.Module, *, with_weights: bool = True) -> Proof:
        """That of ``model``, which attends by transformers' own code."""
        return cls(weights=_fingerprints(model) if with_weights else None, outputs=outputs_of(model))

    def check(self, copy: nn.Module, what: str) -> None:
        """Compares with a model that was loaded.

        Args:
            what: names the copy in messages.

        Raises:
            ModelError: they differ, in a weight or in what they compute.
        """
        if self.weights is not None:
            held = _fingerprints(copy)
            if wrong := sorted(name for name in {*self.weights, *held} if self.weights.get(name) != held.get(name)):
                raise ModelError(
                    f"{what} is not the model that was exported: {len(wrong)} weights differ, {wrong[0]!r} first. It was removed."
                )
        outputs = outputs_of(copy)
        if outputs.shape != self.outputs.shape or not torch.equal(outputs, self.outputs):
            largest = (
                float((outputs.double() - self.outputs.double()).abs().max())
                if outputs.shape == self.outputs.shape
                else 0
            )
            raise ModelError(
                f"{what} has the weights of the model that was exported and computes something else (logits differ by up to "
                f"{largest:.3g}). It was removed."
            )


@torch.no_grad()
def outputs_of(model: Any) -> Tensor:
    """Logits, or the last hidden states of a model without a head, of a few tokens, [tokens, ...] on the CPU."""
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(1, _PROBE_LENGTH + 1) * 7919) % vocab
    output = model.eval()(input_ids=ids[None].to(model.device), use_cache=False)
    return output[0][0].cpu()


def not_finite(model: nn.Module) -> list[str]:
    """Names of the weights that hold NaN or infinity."""
    return [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and tensor.numel() and not bool(tensor.isfinite().all())
    ]


def _fingerprints(model: nn.Module) -> dict[str, int]:
    found = Fingerprints()
    for name, tensor in model.state_dict().items():
        found.add(name, tensor.cpu())
    return found.read()
