"""The engine of a run that samples nothing: it holds no weights, and takes no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from burnish.config import ActorRolloutRefConfig
from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse, SamplingParams, WeightStream
from burnish.utils.errors import RolloutError


class IdleRollout:
    """Stands where an engine would; to ask it for a response is an error."""

    # It has no copy of the weights that would have to be kept up to date.
    shares_storage = True

    @classmethod
    def for_policy(
        cls, policy: Any, config: ActorRolloutRefConfig, device: torch.device | str, tokenizer: Any = None
    ) -> IdleRollout:
        """Needs nothing of all that."""
        return cls()

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """Raises:
        RolloutError: always.
        """
        raise RolloutError(
            f"{len(requests)} responses were asked for in a run without a rollout engine: trainer.replay_rollouts takes the "
            f"responses of another run, and no validation was configured when the workers started."
        )

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """Nothing reads the weights."""

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Nothing runs."""

    def sleep(self, level: int = 1) -> None:
        """It always does."""

    def wake_up(self) -> None:
        """Nothing to wake."""
