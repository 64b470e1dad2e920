"""What a reward function returns, and what a reward manager makes of it."""

from dataclasses import dataclass, field

import numpy as np
import torch

from burnish.protocol import BATCH_KEYS, DataProto

EXTRA_PREFIX = "reward_extra/"
"""Before the name of an extra that is taken otherwise."""
# Names under which the framework keeps numbers of its own.
_FRAMEWORK_NAMES = frozenset(BATCH_KEYS) | {
    "score",
    "reward",
    "rewards",
    "loss",
    "step",
    "epoch",
    "index",
    "reward_outcome",
}


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of a batch.

    Attributes:
        token_level_scores: float32 [batch, response]; a row's score sits on its last token with ``response_mask``, or its
            parts on each of these, or on the last of each turn.
        valid: bool [batch]; False where the row has no score (abstained, failed, not finite): it is not trained on.
        extras: the other values that the function returned, object arrays [batch], None where a row has none. A name
            that the framework uses itself is prefixed: ``reward_extra/<name>``.
        metrics: ``reward/abstain_count``, ``reward/error_count``, ``reward/timeout_count``, ``reward/non_finite_count``.
    """

    token_level_scores: torch.Tensor
    valid: torch.Tensor
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def add_to(self, batch: DataProto) -> DataProto:
        """Adds ``token_level_scores``, ``valid`` and the extras to ``batch``, in place, and returns it.

        An extra that is named like a column of the batch is prefixed too.
        """
        taken = batch.non_tensor_batch
        extras = {f"{EXTRA_PREFIX}{name}" if name in taken else name: values for name, values in self.extras.items()}
        tensors = {"token_level_scores": self.token_level_scores, "valid": self.valid}
        return batch.union(DataProto.from_dict(tensors=tensors, non_tensors=extras))


def extra_name(name: str) -> str:
    """The name under which an extra is kept: its own, or prefixed where the framework uses that name."""
    return f"{EXTRA_PREFIX}{name}" if name in _FRAMEWORK_NAMES else name
