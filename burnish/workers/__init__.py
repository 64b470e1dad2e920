"""Roles on devices: thin classes that wire the engines to the controller's calls."""

from burnish.workers.actor_rollout_ref import ActorRolloutRefWorker
from burnish.workers.critic import CriticWorker
from burnish.workers.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
