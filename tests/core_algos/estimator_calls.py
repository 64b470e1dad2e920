"""Calls any estimator with what it names, and reference answers as tensors."""

import inspect
from typing import Any

import torch

from burnish.config import AlgoConfig
from burnish.conformance.references import ESTIMATOR_REFERENCES, ESTIMATOR_SETTINGS
from burnish.core_algos.estimators import ADV_ESTIMATORS

NAMES = [name for name in ADV_ESTIMATORS if not name.endswith("_vectorized")]
OUTCOME = ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo"]
TOKEN_BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]
GROUPED = OUTCOME + TOKEN_BASELINES
PER_TOKEN = ["gae", "reinforce_plus_plus", "remax", *TOKEN_BASELINES]
WHITENED = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"]


def estimate(name: str, entries: dict[str, Any], **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of the estimator on the entries of a batch; settings that it does not name are its config's."""
    estimator = ADV_ESTIMATORS.get(name)
    parameters = inspect.signature(estimator).parameters
    of_config = ("allow_single_sample_groups", "gdpo_reward_weights")
    config = AlgoConfig(**{key: settings[key] for key in of_config if key in settings})
    given = {"gamma": 0.97, "lam": 0.9, **entries, **settings, "config": config}
    return estimator(**{key: value for key, value in given.items() if key in parameters})


def reference(name: str, entries: dict[str, Any], **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the naive loop, in float64."""
    answers = ESTIMATOR_REFERENCES[name](entries, {**ESTIMATOR_SETTINGS, "gamma": 0.97, "lam": 0.9, **settings})
    advantages, returns = (torch.tensor(answer, dtype=torch.float64) for answer in answers)
    return advantages, returns


def scored(
    scores: list[float], uids: list[str] | None = None, dtype: torch.dtype = torch.float32, width: int = 2
) -> dict[str, Any]:
    """Entries of rows of ``width`` tokens, the last one scored; the reward's one component is the score."""
    rewards = torch.zeros(len(scores), width, dtype=dtype)
    rewards[:, -1] = torch.tensor(scores, dtype=dtype)
    return {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(len(scores), width, dtype=torch.bool),
        "index": uids or ["a"] * len(scores),
        "values": torch.zeros_like(rewards),
        "old_log_probs": torch.full_like(rewards, -1.0),
        "sum_pi_squared": torch.full_like(rewards, 0.5),
        "reward_baselines": torch.zeros(len(scores), dtype=dtype),
        "reward_components": rewards[:, -1:].clone(),
    }
