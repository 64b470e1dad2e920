"""The learning rate is a pure function of the step, and the first step learns."""

import math

import pytest

from burnish.config import FSDPOptimizerConfig
from burnish.engine.schedule import lr_at


def rates(total: int, **config: object) -> list[float]:
    return [lr_at(step, FSDPOptimizerConfig(lr=1.0, **config), total) for step in range(1, total + 1)]  # type: ignore[arg-type]


def test_constant_without_warm_up_is_the_rate_from_the_first_step() -> None:
    assert rates(4) == [1.0] * 4


def test_warm_up_rises_linearly_and_does_not_start_at_zero() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(10, lr_warmup_steps_ratio=0.2)[:3] == [0.5, 1.0, 1.0]


def test_warm_up_steps_come_before_the_ratio() -> None:
    assert rates(10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1.0] * 10


def test_cosine_falls_from_the_full_rate_towards_the_least_one() -> None:
    cosine = rates(12, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    assert cosine[2] == 1.0
    assert cosine[2:] == sorted(cosine[2:], reverse=True)
    halfway = 0.1 + 0.9 * 0.5
    assert cosine[7] == pytest.approx(halfway)
    assert cosine[-1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.9)))
    assert lr_at(100, FSDPOptimizerConfig(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), 12) == pytest.approx(
        0.1
    )


def test_linear_falls_evenly_from_the_full_rate_and_the_last_step_still_learns() -> None:
    assert rates(6, lr_scheduler_type="linear", lr_warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    least = rates(6, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert least == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])
    assert lr_at(99, FSDPOptimizerConfig(lr=1.0, lr_scheduler_type="linear", min_lr_ratio=0.2), 6) == pytest.approx(0.2)


def test_wsd_warms_up_stays_and_decays_over_the_last_steps() -> None:
    shape = {"lr_scheduler_type": "wsd", "lr_warmup_steps": 2}
    assert rates(9, **shape, lr_decay_steps=4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert rates(9, **shape, lr_decay_steps=4, min_lr_ratio=0.5)[-1] == pytest.approx(0.625)
    assert rates(10, **shape, lr_decay_steps_ratio=0.4) == rates(10, **shape, lr_decay_steps=4)
    # A decay longer than what the warm-up leaves is the linear schedule, and none at all the constant one.
    assert rates(9, **shape, lr_decay_steps=100) == rates(9, lr_scheduler_type="linear", lr_warmup_steps=2)
    assert rates(9, **shape, lr_decay_steps=0) == rates(9, lr_warmup_steps=2)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 12])
@pytest.mark.parametrize("total", [1, 2, 5, 12])
def test_every_step_learns_and_no_rate_is_above_the_full_one(shape: str, warmup: int, total: int) -> None:
    found = rates(total, lr_scheduler_type=shape, lr_warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in found)


def test_own_length_of_the_schedule_comes_before_the_run() -> None:
    config = FSDPOptimizerConfig(lr=1.0, lr_scheduler_type="cosine", total_training_steps=4)
    assert lr_at(3, config, 1000) == pytest.approx(0.5)
