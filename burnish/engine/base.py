"""What a worker needs of an engine: training and reading one model, whatever its layout."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from burnish.protocol import DataProto

# What a module gives for each row, zero where there is no sampled token.
Outputs = dict[str, Float[Tensor, "batch response"]]

# (outputs of the module, each [rows, response]; the rows; global_batch_info) -> (loss, metrics). Metrics are detached
# scalars that add up: each is its rows' share of the value over the whole optimizer step. Names that end in "_max" or
# "_min" are joined by maximum or minimum instead.
LossFn = Callable[[Outputs, DataProto, dict[str, Any]], tuple[Float[Tensor, ""], dict[str, Tensor]]]


class BaseEngine(Protocol):
    """One model on one or several ranks. All ranks call every method together."""

    def infer_batch(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        outputs: Sequence[str] = ("log_probs",),
        micro_batch_size: int | None = None,
        max_token_len: int | None = None,
    ) -> Outputs:
        """``outputs`` of the rows in their order, each [batch, response]."""
        ...

    def train_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        outputs: Sequence[str] = ("log_probs",),
        micro_batch_size: int | None = None,
        max_token_len: int | None = None,
        global_batch_info: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """Adds the gradient of the loss; returns the metrics over all ranks."""
        ...

    def optimizer_step(self, step: int) -> dict[str, float]:
        """Updates the weights with the gradient gathered so far and clears it."""
        ...

    def named_weights(
        self, *, bucket_bytes: int = 256 << 20, adapters_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor of every weight: the base, and after it the adapters where there are any."""
        ...

    def non_finite_weights(self) -> list[str]:
        """Names of weights and optimizer state that hold NaN or infinity on any rank, the same on every rank."""
        ...

    def save_checkpoint(
        self, path: str | Path, contents: Sequence[str] = ("model", "optimizer"), *, blocking: bool = True
    ) -> None:
        """Writes a folder that `load_checkpoint` and transformers read; refuses a model that is not finite."""
        ...

    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether nothing is left to write of what was saved without blocking; raises what could not be written."""
        ...

    def load_checkpoint(self, path: str | Path, contents: Sequence[str] = ("model", "optimizer")) -> None:
        """Continues from a folder written by `save_checkpoint`, on any number of ranks."""
        ...
