"""The learning rate as a pure function of the trainer's step: nothing to save, nothing to drift.

A step whose updates were skipped (a gradient that is not finite, no token to train on) has its place in the schedule like any
other: the next step's rate is the same as if there had been an update.
"""

import math

from burnish.config import FSDPOptimizerConfig


def num_warmup_steps(config: FSDPOptimizerConfig, total_steps: int) -> int:
    """Steps of linear warm-up: ``lr_warmup_steps``, or where that is negative the share ``lr_warmup_steps_ratio``."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def lr_at(step: int, config: FSDPOptimizerConfig, total_steps: int) -> float:
    """The learning rate of trainer step ``step``, counted from 1.

    With W warm-up steps the rate is ``lr * step / W`` up to step W, so the first step already learns (a rate of 0 would
    throw a rollout away). After that it is constant, or follows the cosine
    ``min + (1 - min) (1 + cos(2 pi num_cycles progress)) / 2`` with progress from 0 at step W + 1 towards 1.

    Args:
        total_steps: steps of the run; ``config.total_training_steps`` comes first when it is positive.
    """
    total = config.total_training_steps if config.total_training_steps > 0 else total_steps
    warmup = num_warmup_steps(config, total)
    if step <= warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - 1 - warmup) / max(1, total - warmup))
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * wave)
