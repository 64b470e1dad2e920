"""A model's products with its weights, from copies in oneDNN's own order while those pay.

On a CPU oneDNN computes with weights in blocks. Given a plain weight it puts it in order in each call, which takes 20 % of a
product of 64 rows, and half of one of 8. A decode step reads each weight once, so a copy in that order, made once for many
steps, saves that; prefill gains 5 %. Making the copies costs what about ten steps gain, and memory for the weights a
second time, and they are wrong as soon as the weights change: so they live inside one call of ``generate``.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.model.linear import can_prepack, inference_linear, prepack_weight, prepacked_bytes, prepacked_linear
from burnish.model.lora import base_layer, is_plain_adapter, low_rank
from burnish.model.projections import packed_weight

# Decode steps after which copies have paid for themselves, with a margin: the estimate of the steps is an upper bound.
PAYS_AFTER = 16


class JointLinear:
    """Several projections of one input as one product, with the parameters as they are at the call.

    Args:
        projections: modules with a ``weight`` [out_i, in] and all or none with a ``bias`` [out_i]; any of them may have a plain
            adapter (`burnish.model.lora.is_plain_adapter`), whose two thin products are added while it is on.
    """

    def __init__(self, projections: Sequence[Any]) -> None:
        self._projections = list(projections)
        self.out_features = sum(weight.shape[0] for weight in self._weights)
        """Width of the output."""
        ends = list(accumulate(weight.shape[0] for weight in self._weights))
        self._adapters = [
            (slice(end - layer.weight.shape[0], end), layer)
            for end, layer in zip(ends, self._projections, strict=True)
            if is_plain_adapter(layer)
        ]
        self.prepacked: Tensor | None = None
        """Their weights in oneDNN's order; None is none held."""
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of the projections of ``x`` [tokens, in] behind each other, [tokens, sum of out_i]."""
        output = self._product(x)
        adapters = [entry for entry in self._adapters if not entry[1].disable_adapters]
        return self._add_adapters(output, x, adapters) if adapters else output

    def _add_adapters(self, output: Tensor, x: Tensor, adapters: list[tuple[slice, Any]]) -> Tensor:
        downs, ups, scalings = zip(*(low_rank(layer) for _, layer in adapters), strict=True)
        down = packed_weight(downs)
        if down is None:
            parts = [F.linear(x, weight) for weight in downs]
        else:
            parts = list(F.linear(x, down).split([len(weight) for weight in downs], dim=-1))
        for (columns, _), part, up, scaling in zip(adapters, parts, ups, scalings, strict=True):
            # Rounded where the trained layers round: the product, and that times the scaling. A power of two rounds nothing.
            delta, is_exact = F.linear(part, up), math.frexp(scaling)[0] == 0.5
            output[:, columns].add_(delta if is_exact else delta.mul_(scaling), alpha=scaling if is_exact else 1)
        return output

    def _product(self, x: Tensor) -> Tensor:
        if self.prepacked is not None and x.shape[0] > 0:
            return prepacked_linear(x, self.prepacked, self._bias)
        weight = packed_weight(self._weights)
        biases = self._biases
        bias = packed_weight(biases) if biases else None
        if weight is None or (biases and bias is None):
            products = [base_layer(projection) for projection in self._projections]
            return torch.cat([inference_linear(x, p.weight, p.bias) for p in products], dim=-1)
        return inference_linear(x, weight, bias)

    @property
    def can_prepack(self) -> bool:
        """Whether its weights can be copied into oneDNN's order."""
        return all(can_prepack(weight) for weight in self._weights) and len({w.dtype for w in self._weights}) == 1

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self._weights[0].dtype

    @property
    def copy_bytes(self) -> int:
        """Memory of the copy that `prepack` makes, at most."""
        weight = self._weights[0]
        return prepacked_bytes(self.out_features, weight.shape[1], weight.dtype)

    def prepack(self) -> None:
        """Copies the weights as they are now; products are computed with the copy from now on."""
        weight, biases = packed_weight(self._weights), self._biases
        self.prepacked = prepack_weight(torch.cat([w.detach() for w in self._weights]) if weight is None else weight)
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    def drop(self) -> None:
        """Frees the copy."""
        self.prepacked = self._bias = None

    @property
    def _weights(self) -> list[Tensor]:
        return [projection.weight for projection in self._projections]

    @property
    def _biases(self) -> list[Tensor]:
        return [p.bias for p in self._projections if getattr(p, "bias", None) is not None]


class PrepackedLinears:
    """The copies of the weights of a model's products: when they are made, and when they are freed."""

    def __init__(self, products: Sequence[JointLinear]) -> None:
        self._products = list(products)
        self._after: int | None = None
        self._num_passes = 0
        self._held = False

    @property
    def copy_bytes(self) -> int:
        """Memory of all copies; 0 where there can be none, as on a GPU."""
        return sum(product.copy_bytes for product in self._products if product.can_prepack)

    @property
    def reserved_bytes(self) -> int:
        """Memory that the copies take, or will take inside `holding`."""
        return 0 if self._after is None else self.copy_bytes

    @property
    def held(self) -> bool:
        """Whether there are copies now."""
        return self._held

    def pays(self, num_rows: int, num_steps: int | None) -> bool:
        """Whether copies gain more than they cost.

        Args:
            num_rows: that decode at once.
            num_steps: that are expected with the weights as they are; None is not known.
        """
        if not self.copy_bytes:
            return False
        if num_steps is not None and num_steps < PAYS_AFTER:
            return False
        # One row of float32 is a product of a matrix and a vector, which reads a plain weight as fast.
        return num_rows > 1 or self._products[0].dtype != torch.float32

    @contextmanager
    def holding(self, after: int | None) -> Iterator[None]:
        """Inside, products are computed with copies, which are freed at the end.

        Args:
            after: the passes through the model with the same weights that go without; None is all of them.
        """
        self._after, self._num_passes = after, 0
        try:
            yield
        finally:
            self._after = None
            self.drop()

    def begin_pass(self) -> None:
        """Called before each pass through the model: makes the copies when it is time."""
        if self._held or self._after is None:
            return
        if self._num_passes >= self._after:
            for product in self._products:
                if product.can_prepack:
                    product.prepack()
            self._held = True
        self._num_passes += 1

    def drop(self) -> None:
        """Frees the copies, because the weights may have changed or the memory is wanted."""
        for product in self._products:
            product.drop()
        self._held, self._num_passes = False, 0
