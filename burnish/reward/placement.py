"""Scores as tensors: where in a response a number sits."""

from collections.abc import Sequence

import numpy as np
import torch

from burnish.reward.result import RewardResult, extra_name
from burnish.reward.score import Score

REASONS = ("abstain", "error", "timeout", "non_finite")


def last_tokens(response_mask: torch.Tensor) -> torch.Tensor:
    """Index of the last token that the policy sampled [batch], -1 where there is none; tool output lies before it."""
    numbered = response_mask.bool().cpu() * torch.arange(1, response_mask.shape[1] + 1)
    # The column of zeros in front keeps the maximum defined for responses of width 0.
    return torch.nn.functional.pad(numbered, (1, 0)).amax(-1) - 1


def turn_ends(response_mask: torch.Tensor) -> torch.Tensor:
    """Where a turn of the policy ends, a run of tokens that it sampled one after the other; bool [batch, response]."""
    mask = response_mask.bool().cpu()
    follows = torch.nn.functional.pad(mask, (0, 1))[:, 1:]
    return mask & ~follows


def to_result(scores: Sequence[Score], response_mask: torch.Tensor) -> RewardResult:
    """Scores as tensors. A row without a token of the policy has no place for a score: it is not valid."""
    mask, last_token = response_mask.bool().cpu(), last_tokens(response_mask)
    valid = torch.tensor([score.value is not None for score in scores], dtype=torch.bool) & (last_token >= 0)
    values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
    token_level_scores = torch.zeros(mask.shape, dtype=torch.float32)
    rows = valid.nonzero().squeeze(-1)
    token_level_scores[rows, last_token[rows]] = values[rows]
    ends = turn_ends(response_mask)
    for i in rows.tolist():
        if scores[i].parts:
            token_level_scores[i] = 0.0
            places = mask[i] if scores[i].per == "token" else ends[i]
            token_level_scores[i, places] = torch.tensor(scores[i].parts, dtype=torch.float32)
    extras: dict[str, np.ndarray] = {}
    for i, score in enumerate(scores):
        for name, value in score.extras.items():
            name = extra_name(name)
            if name not in extras:
                extras[name] = np.full(len(scores), None, dtype=object)
            extras[name][i] = value
    metrics = {f"reward/{reason}_count": float(sum(score.reason == reason for score in scores)) for reason in REASONS}
    return RewardResult(token_level_scores=token_level_scores, valid=valid, extras=extras, metrics=metrics)
