"""The configuration: dataclasses that hold every key with its default, and `load_config` that fills them.

Importing it loads neither torch nor Hydra; `load_config` loads Hydra's parser when it is called.
"""

from typing import TYPE_CHECKING, Any

from burnish.config.actor_rollout_ref import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    RefConfig,
)
from burnish.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from burnish.config.applied import needs_old_log_probs
from burnish.config.build import to_dict, to_shown_yaml, to_yaml
from burnish.config.critic import CriticModelConfig, FSDPCriticConfig
from burnish.config.data import CustomClassConfig, DataConfig, SamplerConfig
from burnish.config.origin import ORIGIN_FILE, origin_table, write_origins
from burnish.config.paths import check_hub_models, check_paths
from burnish.config.plan import BatchPlan, batch_plan
from burnish.config.policy import Policy, policy_of
from burnish.config.reward import (
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
)
from burnish.config.rollout import (
    CheckpointEngineConfig,
    EngineKwargsConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
)
from burnish.config.section import Section
from burnish.config.sft import SFTDataConfig, SFTRunConfig, SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig, RayKwargsConfig, TrainerConfig

if TYPE_CHECKING:
    from burnish.config.load import (
        LoadedConfig,
        load_config,
        load_sft_config,
        load_sft_with_notices,
        load_with_notices,
    )

__all__ = [
    "ORIGIN_FILE",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "BatchPlan",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "CriticModelConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "EngineKwargsConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FilterGroupsConfig",
    "HFModelConfig",
    "KLControlConfig",
    "LoadedConfig",
    "OverlongBufferConfig",
    "PFPPOConfig",
    "PPOTrainerConfig",
    "Policy",
    "PolicyLossConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RewardKwargsConfig",
    "RewardManagerConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SFTDataConfig",
    "SFTRunConfig",
    "SFTTrainerConfig",
    "SamplerConfig",
    "SamplingConfig",
    "Section",
    "ServerConfig",
    "TrainerConfig",
    "batch_plan",
    "check_hub_models",
    "check_paths",
    "load_config",
    "load_sft_config",
    "load_sft_with_notices",
    "load_with_notices",
    "needs_old_log_probs",
    "origin_table",
    "policy_of",
    "to_dict",
    "to_shown_yaml",
    "to_yaml",
    "write_origins",
]


def __getattr__(name: str) -> Any:
    # Hydra takes a fifth of a second to import and is needed only to load.
    if name in ("LoadedConfig", "load_config", "load_sft_config", "load_sft_with_notices", "load_with_notices"):
        import importlib

        return getattr(importlib.import_module("burnish.config.load"), name)
    raise AttributeError(f"module 'burnish.config' has no attribute {name!r}")
