"""A gap that grows is told once; one that is large but stays, or one bad step, is not."""

import logging

import pytest

from burnish.trainer.ppo.rollout_gap import RolloutGapWatch


def warnings_of(gaps: list[float | None], caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = RolloutGapWatch()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "burnish.trainer"):
        for step, gap in enumerate(gaps, 1):
            watch.look({} if gap is None else {"training/rollout_probs_diff_mean": gap}, step)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "gaps",
    [
        [0.02] * 40,  # Large from the start: another kernel, another dtype.
        [1e-7] * 5 + [1e-5] * 20,  # Many times more, and still nothing.
        [0.004] * 5 + [0.5, 0.5, 0.004] * 5,  # Single steps.
        [None] * 30,
        [0.004] * 4,
    ],
)
def test_a_gap_that_stays_is_no_reason_to_warn(gaps: list[float | None], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(gaps, caplog) == []


def test_a_gap_that_grows_is_told_once_with_the_step(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warnings_of([0.004] * 5 + [0.004 + 0.004 * step for step in range(40)], caplog)
    # Above 0.016, four times the usual, from step 10 on.
    assert message.startswith("Step 12: training/rollout_probs_diff_mean is 0.028")
    assert "0.004 at the start" in message


def test_steps_without_the_metric_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    spread = [gap for value in [0.004] * 5 + [0.1] * 3 for gap in (value, None)]
    (message,) = warnings_of(spread, caplog)
    assert message.startswith("Step 15:")
