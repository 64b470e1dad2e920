"""The configuration: dataclasses that hold every key with its default, and `load_config` that fills them.

Importing it loads neither torch nor Hydra; `load_config` loads Hydra's parser when it is called.
"""

from burnish.config.actor_rollout_ref import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    RefConfig,
    RolloutConfig,
    SamplingConfig,
)
from burnish.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from burnish.config.critic import CriticModelConfig, FSDPCriticConfig
from burnish.config.data import CustomClassConfig, DataConfig, SamplerConfig
from burnish.config.reward import CustomRewardFunctionConfig, RewardConfig, RewardManagerConfig
from burnish.config.section import Section
from burnish.config.trainer import PPOTrainerConfig, RayKwargsConfig, TrainerConfig
