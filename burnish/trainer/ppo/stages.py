"""What a stage of the trainer is, and what callbacks are told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from burnish.utils.timing import marked_timer

PROMPT_TENSORS = ["input_ids", "attention_mask", "position_ids"]

FORWARD_KEYS: dict[str, Any] = {
    "batch_keys": [*PROMPT_TENSORS, "responses", "response_mask"],
    "non_tensor_batch_keys": ["uid"],
}
"""Arguments of `DataProto.select`: what a forward pass of the policy, the reference or the critic reads.
The uid names a row that is too long."""


@dataclass(kw_only=True)
class StepReport:
    """What a callback is told after a step (and after a validation before training, as step 0)."""

    step: int
    total_steps: int
    metrics: dict[str, float]
    sample: dict[str, Any] = field(default_factory=dict)


def stage(name: str, when: str | None = None) -> Callable:
    """Marks a method as a stage: its seconds go to ``timing_s/<name>``, and errors can say where they happened.

    Args:
        when: attribute of the trainer that says whether this run, or this step, has the stage; without it the batch passes by.
    """

    def decorator(method: Callable) -> Callable:
        @wraps(method)
        def timed(self: Any, batch: Any = None) -> Any:
            if when is not None and not getattr(self, when):
                return batch
            self.checkpoints.stop.enter(name)
            self.current_stage = name
            with marked_timer(name, self.timing_raw):
                return method(self) if batch is None else method(self, batch)

        return timed

    return decorator


@contextmanager
def timed_apart(trainer: Any) -> Iterator[None]:
    """Inside, the seconds of stages are no part of the step's: a reward model's passes in a validation are the validation's."""
    timing, trainer.timing_raw = trainer.timing_raw, {}
    try:
        yield
    finally:
        trainer.timing_raw = timing
