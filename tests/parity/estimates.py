"""One batch for an estimator of burnish and for verl's of the same name."""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from burnish.conformance.batches import RaggedBatch
from tests.core_algos.estimator_calls import estimate

GAMMA, LAM = 0.97, 0.9
NAMES = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)


def ours(name: str, batch: RaggedBatch, **settings: Any) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of burnish's estimator."""
    return estimate(name, batch.keyed(), **{"gamma": GAMMA, "lam": LAM, **settings})


def theirs(
    core_algos: ModuleType, name: str, batch: RaggedBatch, *, norm_adv_by_std_in_grpo: bool = True, **settings: Any
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of verl's, called as its trainer calls it. Its masks are numbers."""
    mask = batch.mask.to(batch.rewards.dtype)
    config = OmegaConf.create(
        {
            "gamma": GAMMA,
            "lam": LAM,
            "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
            "gdpo_reward_keys": [f"part_{k}" for k in range(batch.reward_components.shape[1])],
            **settings,
        }
    )
    arguments: dict[str, Any] = {"token_level_rewards": batch.rewards.clone(), "response_mask": mask, "config": config}
    if name == "gae":
        del arguments["config"]
        arguments |= {"values": batch.values, "gamma": GAMMA, "lam": LAM}
    elif name == "remax":
        arguments |= {"reward_baselines": batch.reward_baselines}
    elif name.endswith("optimal_token_baseline"):
        arguments |= {
            "index": batch.uids,
            "old_log_probs": batch.old_log_probs,
            "sum_pi_squared": batch.sum_pi_squared,
            "rollout_is_weights": batch.weights,
        }
    elif name != "reinforce_plus_plus":
        arguments |= {"index": batch.uids}
    if name in ("grpo", "grpo_vectorized", "gdpo"):
        arguments["norm_adv_by_std_in_grpo"] = norm_adv_by_std_in_grpo
    if name == "gdpo":
        arguments |= _gdpo(batch)
    return core_algos.get_adv_estimator_fn(name)(**arguments)


def _gdpo(batch: RaggedBatch) -> dict[str, Any]:
    """The parts of the reward lie beside the batch, and come to the last token that is there."""
    parts = {f"part_{k}": batch.reward_components[:, k].numpy() for k in range(batch.reward_components.shape[1])}
    prompts = torch.ones(len(batch.mask), 2)
    attention = torch.cat([prompts, torch.ones_like(batch.rewards)], dim=1)
    return {
        "non_tensor_batch": {name: np.asarray(values) for name, values in parts.items()},
        "batch": {"prompts": prompts, "attention_mask": attention.long()},
    }
