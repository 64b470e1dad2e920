"""Roles on devices: thin classes that wire the engines to the controller's calls."""

from burnish.workers.actor_rollout_ref import ActorRolloutRefWorker
from burnish.workers.critic import CriticWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker"]
