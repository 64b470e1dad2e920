"""The trained policy of a configuration, whichever trainer it is for."""

from dataclasses import dataclass

from burnish.config.actor_rollout_ref import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Its model and how it is trained."""

    model: HFModelConfig
    engine: FSDPEngineConfig
    optim: FSDPOptimizerConfig
    checkpoint: CheckpointConfig


def policy_of(config: PPOTrainerConfig | SFTTrainerConfig) -> Policy:
    """The policy that a run trains."""
    if isinstance(config, SFTTrainerConfig):
        return Policy(model=config.model, engine=config.engine, optim=config.optim, checkpoint=config.checkpoint)
    actor = config.actor_rollout_ref.actor
    return Policy(
        model=config.actor_rollout_ref.model, engine=actor.fsdp_config, optim=actor.optim, checkpoint=actor.checkpoint
    )
