"""What a reward function returns, and what a reward manager makes of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from burnish.protocol import BATCH_KEYS, DataProto
from burnish.utils.errors import RewardError

EXTRA_PREFIX = "reward_extra/"
"""Before the name of an extra that is taken otherwise."""
_LARGEST = torch.finfo(torch.float32).max
# Names under which the framework keeps numbers of its own.
_FRAMEWORK_NAMES = frozenset(BATCH_KEYS) | {"score", "reward", "rewards", "loss", "step", "epoch", "index"}


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of a batch.

    Attributes:
        token_level_scores: float32 [batch, response]; a row's score sits on its last token with ``response_mask``.
        valid: bool [batch]; False where the row has no score (abstained, failed, not finite): it is not trained on.
        extras: the other values that the function returned, object arrays [batch], None where a row has none. A name
            that the framework uses itself is prefixed: ``reward_extra/<name>``.
        metrics: ``reward/abstain_count``, ``reward/error_count``, ``reward/non_finite_count``.
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


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one row: a number that float32 holds, or None with the reason ("abstain", "error", "non_finite")."""

    value: float | None
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    error: Exception | None = None


def read_score(returned: Any) -> Score:
    """The score in what a reward function returned: a number, a bool, None (no score), or a dict with "score" and
    extras.

    Raises:
        RewardError: it is none of these; names what was returned and what is expected.
    """
    extras: dict[str, Any] = {}
    if isinstance(returned, dict):
        if "score" not in returned:
            raise RewardError(
                f"The reward function returned a dict with the keys {', '.join(map(str, returned)) or '(none)'}; the "
                f"score is expected under 'score'."
            )
        extras = {extra_name(str(name)): _plain(value) for name, value in returned.items() if name != "score"}
        returned = returned["score"]
    if returned is None:
        return Score(value=None, extras=extras, reason="abstain")
    returned = _plain(returned)
    if not isinstance(returned, (bool, int, float)):
        raise RewardError(
            f"The reward function returned {type(returned).__name__} ({returned!r:.80}); a number, a bool, None (no "
            f"score) or a dict with 'score' is expected."
        )
    # Compared before it becomes a float, which a large int cannot; a score that float32 cannot hold is infinite there.
    if not abs(returned) <= _LARGEST:
        return Score(value=None, extras=extras, reason="non_finite")
    return Score(value=float(returned), extras=extras)


def _plain(value: Any) -> Any:
    """A Python number or text for NumPy's and torch's, anything else as it is."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) and len(value.shape) == 0:
        return value.item()
    return value


def extra_name(name: str) -> str:
    """The name under which an extra is kept: its own, or prefixed where the framework uses that name."""
    return f"{EXTRA_PREFIX}{name}" if name in _FRAMEWORK_NAMES else name
