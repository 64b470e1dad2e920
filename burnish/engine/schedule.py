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


def num_decay_steps(config: FSDPOptimizerConfig, total_steps: int) -> int:
    """Steps over which `wsd` falls: ``lr_decay_steps``, or where that is negative the share ``lr_decay_steps_ratio``.

    They never reach into the warm-up.
    """
    steps = config.lr_decay_steps if config.lr_decay_steps >= 0 else round(config.lr_decay_steps_ratio * total_steps)
    return min(steps, max(0, total_steps - num_warmup_steps(config, total_steps)))


def lr_at(step: int, config: FSDPOptimizerConfig, total_steps: int) -> float:
    """The learning rate of trainer step ``step``, counted from 1.

    With W warm-up steps the rate is ``lr * step / W`` up to step W, so the first step already learns (a rate of 0 would
    throw a rollout away). After that it is ``lr * (min + (1 - min) * height)`` with ``min`` = ``min_lr_ratio`` and

        constant   height = 1 and min = 0
        linear     1 - progress
        cosine     (1 + cos(2 pi num_cycles progress)) / 2
        wsd        1 - progress     (arXiv:2404.06395)

    where progress goes from 0 at the first falling step towards 1 behind the last: over all steps after the warm-up, or with
    wsd over the last `num_decay_steps`, before which it stays 0. So the last step learns as well. Behind the schedule's end
    the rate stays at its lowest (cosine: at progress 1).

    Args:
        total_steps: steps of the run; ``config.total_training_steps`` comes first when it is positive.
    """
    total = config.total_training_steps if config.total_training_steps > 0 else total_steps
    warmup = num_warmup_steps(config, total)
    if step <= warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    falling = num_decay_steps(config, total) if config.lr_scheduler_type == "wsd" else total - warmup
    # Between whole steps there is nothing: a fall of no steps is one from the last step to what comes behind it.
    progress = min(1.0, max(0.0, (step - 1 - (total - falling)) / max(1, falling)))
    height = 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        height = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
