"""Prompts to responses: one interface, the native engine on the policy's own weights, and a plain reference."""

from burnish.rollout.base import (
    BaseRollout,
    RolloutRequest,
    RolloutResponse,
    SamplingParams,
    get_rollout_cls,
    register_rollout,
)
from burnish.rollout.build import build_rollout, sampling_of
from burnish.rollout.to_batch import requests_from_dataproto, responses_to_dataproto

__all__ = [
    "BaseRollout",
    "RolloutRequest",
    "RolloutResponse",
    "SamplingParams",
    "build_rollout",
    "get_rollout_cls",
    "register_rollout",
    "requests_from_dataproto",
    "responses_to_dataproto",
    "sampling_of",
]
