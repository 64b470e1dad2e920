"""The score of a reward model as the score of a response, alone or beside that of a reward function."""

from typing import Any

import numpy as np
import torch

from burnish.config.reward import RewardConfig
from burnish.protocol import DataProto
from burnish.reward import RewardManager, RewardResult
from burnish.reward.placement import last_tokens
from burnish.utils.errors import RewardError


class ModelRewards:
    """Scores a batch that has ``rm_scores`` [batch, response], which `RewardModelWorker` has computed.

    The score is the reward model's, on the response's last token; with a function that one plus
    ``reward.reward_model.function_weight`` times the function's, wherever in the response that sits. Both are kept as the
    extras ``rm_score`` and ``function_score``. A row that one of them gives no score has none; a score of the model that is
    not finite follows ``reward.on_error``.

    Args:
        function: the manager of the reward function; None where the reward model scores alone.
    """

    compute_score = None  # No function whose data sources could be checked, unless there is one.

    def __init__(self, config: RewardConfig, function: RewardManager | None = None) -> None:
        self.config, self.function = config, function
        if function is not None:
            self.compute_score = getattr(function, "compute_score", None)

    def __call__(self, data: DataProto) -> RewardResult:
        """Scores every row.

        Raises:
            RewardError: there are no ``rm_scores``, one is not finite under ``reward.on_error=raise``, or the function fails.
        """
        if "rm_scores" not in data.tensors:
            raise RewardError("The batch has no rm_scores: the reward model has not seen it.")
        rm_scores, last = data.tensors["rm_scores"].float(), last_tokens(data.tensors["response_mask"])
        has_place, row_scores = last >= 0, rm_scores.sum(-1)
        finite = row_scores.isfinite()
        if self.config.on_error == "raise" and not finite.all():
            row = int((~finite).nonzero()[0])
            raise RewardError(
                f"The reward model gives row {row} of the batch the score {float(row_scores[row])} (reward.on_error=raise)."
            )
        if len(finite) and not finite.any():
            raise RewardError(f"The reward model gives all {len(finite)} rows a score that is not finite.")
        valid = has_place & (finite if self.config.on_error != "zero" else torch.ones_like(finite))
        scores = torch.where(valid[:, None] & finite[:, None], rm_scores, 0.0)
        metrics = {"reward/non_finite_count": float((~finite).sum())}
        extras: dict[str, np.ndarray] = {"rm_score": _column(row_scores, has_place & finite)}
        if self.function is None:
            return RewardResult(token_level_scores=scores, valid=valid, extras=extras, metrics=metrics)
        theirs = self.function(data)
        extras["function_score"] = _column(theirs.token_level_scores.sum(-1), theirs.valid)
        return RewardResult(
            token_level_scores=torch.where(
                (valid & theirs.valid)[:, None],
                scores + self.config.reward_model.function_weight * theirs.token_level_scores,
                0.0,
            ),
            valid=valid & theirs.valid,
            extras=extras | {name: values for name, values in theirs.extras.items() if name not in extras},
            metrics=theirs.metrics | {key: value + theirs.metrics.get(key, 0.0) for key, value in metrics.items()},
        )

    def close(self) -> None:
        """Ends the function's processes, if there are any."""
        if close := getattr(self.function, "close", None):
            close()


def early_manager(reward_fn: Any, config: RewardConfig) -> Any:
    """The manager that can score single responses while others are sampled, None where there is none or it is not wanted."""
    manager = reward_fn.function if isinstance(reward_fn, ModelRewards) else reward_fn
    if not config.launch_reward_fn_async or config.num_workers == 0:
        return None
    return manager if hasattr(manager, "row_of") and hasattr(manager, "scorer") else None


def _column(values: torch.Tensor, there: torch.Tensor) -> np.ndarray:
    column = np.full(len(values), None, dtype=object)
    for row in there.nonzero().squeeze(-1).tolist():
        column[row] = float(values[row])
    return column
