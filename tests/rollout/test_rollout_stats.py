"""Statistics of a rollout add up: calls one after the other, ranks side by side."""

from burnish.rollout.stats import RolloutStats

ONE = RolloutStats(
    num_prompt_tokens=40,
    num_prefilled_tokens=10,
    num_response_tokens=60,
    num_steps=20,
    num_preemptions=1,
    seconds=2.0,
    prefill_seconds=0.5,
    decode_seconds=1.5,
    max_running=4,
    cache_bytes=2**30,
)
OTHER = RolloutStats(num_response_tokens=40, num_steps=30, seconds=3.0, max_running=2, cache_bytes=2**29)
COPY = RolloutStats(weight_copy_seconds=0.25, weight_copy_bytes=2**31, weight_check_seconds=0.125)


def test_calls_one_after_the_other_add_their_work_and_time_and_keep_the_peaks() -> None:
    both = ONE + OTHER + COPY
    assert (both.num_response_tokens, both.num_steps, both.seconds) == (100, 50, 5.0)
    assert (both.max_running, both.cache_bytes) == (4, 2**30)
    assert (both.weight_copy_seconds, both.weight_copy_bytes) == (0.25, 2**31)
    assert ONE + RolloutStats() == ONE


def test_ranks_side_by_side_add_their_work_and_memory_and_the_slowest_sets_the_time() -> None:
    both = RolloutStats.of_ranks([ONE, OTHER])
    assert (both.num_response_tokens, both.num_steps, both.seconds) == (100, 30, 3.0)
    assert (both.max_running, both.cache_bytes) == (6, 2**30 + 2**29)
    assert RolloutStats.of_ranks([ONE]) == ONE
    assert RolloutStats.of_ranks([]) == RolloutStats()


def test_metrics_tell_the_pace_and_nothing_of_what_did_not_happen() -> None:
    metrics = ONE.metrics()
    assert metrics["perf/rollout/response_tokens_per_s"] == 30
    assert metrics["perf/rollout/rows_per_step"] == 3
    assert metrics["perf/rollout/cache_gib"] == 1
    assert (metrics["perf/rollout/prompt_tokens"], metrics["perf/rollout/prefilled_tokens"]) == (40, 10)
    assert all(isinstance(value, float) for value in metrics.values())
    assert not any("weight_copy" in name for name in metrics)
    assert COPY.metrics() == {
        "perf/rollout/weight_copy_seconds": 0.25,
        "perf/rollout/weight_copy_gib": 2.0,
        "perf/rollout/weight_check_seconds": 0.125,
    }
    assert RolloutStats().metrics() == {}
