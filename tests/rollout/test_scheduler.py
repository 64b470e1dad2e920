"""The scheduler, driven by an engine without a model: its cache is a dictionary of tokens, checked at every step."""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rollout.native.scheduler import BlockCopy, Sequence
from burnish.utils.errors import RolloutError
from tests.rollout.simulated_engine import Engine, sequence, sequences

# How many samples of which prompt; equal prompts may come in several places.
PROMPTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=7)


def arrivals(prompts: list[tuple[int, int, int]]) -> list[list[Sequence]]:
    return [sequences(number, list(range(length)), max_new) for number, length, max_new in prompts]


@settings(max_examples=150, deadline=None)
@given(
    prompts=PROMPTS,
    block_size=st.integers(1, 6),
    spare=st.integers(0, 12),
    max_running=st.integers(1, 9),
    budget=st.integers(1, 30),
    chunked=st.booleans(),
    window=st.integers(1, 5),
    stop=st.sampled_from([0.0, 0.3]),
    abort=st.sampled_from([0.0, 0.1]),
    choices=st.randoms(use_true_random=False),
)
def test_any_schedule_answers_every_sequence_and_every_one_reads_its_own_context(
    prompts, block_size, spare, max_running, budget, chunked, window, stop, abort, choices
) -> None:
    later = deque(arrivals(prompts))
    everyone = [one for batch in later for one in batch]
    longest = -(-max(one.max_tokens for one in everyone) // block_size)
    engine = Engine(
        num_blocks=1 + longest + spare,
        block_size=block_size,
        max_running=max_running,
        budget=budget,
        chunked=chunked,
        window=window,
    )
    rounds = 0
    while later or not engine.scheduler.done:
        while later and (engine.scheduler.done or choices.random() < 0.5):
            engine.add(later.popleft())
        engine.round(choices, stop)
        if choices.random() < abort:
            engine.abort(choices.sample(everyone, 2) if len(everyone) > 1 else everyone)
        if choices.random() < 0.1:
            engine.scheduler.drop_prefixes()
            engine.check()
        rounds += 1
        assert rounds <= sum(one.sampling.max_new_tokens for one in everyone), "the oldest row moves on in every round"
    assert set(engine.finished) == set(everyone)
    assert len(engine.finished) == len(everyone)
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1
    if window <= block_size:
        assert all(one.num_preemptions <= engine.windows[one] for one in everyone), "each start gives a window at least"


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12),
    spare=st.integers(0, 12),
    max_running=st.integers(1, 9),
    choices=st.randoms(use_true_random=False),
)
def test_sequences_start_in_the_order_in_which_they_came(lengths, spare, max_running, choices) -> None:
    everyone = [sequence([100 + i] * length, max_new) for i, (length, max_new) in enumerate(lengths)]
    longest = -(-max(one.max_tokens for one in everyone) // 4)
    engine = Engine(num_blocks=1 + longest + spare, max_running=max_running, budget=8)
    engine.add(everyone[: len(everyone) // 2])
    later = deque(everyone[len(everyone) // 2 :])
    while later or not engine.scheduler.done:
        if later:
            engine.add([later.popleft()])
        engine.round(choices)
    assert list(dict.fromkeys(engine.started)) == everyone


@settings(max_examples=100, deadline=None)
@given(
    prompts=PROMPTS, max_running=st.integers(1, 9), budget=st.integers(1, 30), choices=st.randoms(use_true_random=False)
)
def test_with_memory_enough_each_prefix_is_prefilled_exactly_once(prompts, max_running, budget, choices) -> None:
    everyone = [one for batch in arrivals(prompts) for one in batch]
    engine = Engine(num_blocks=500, max_running=max_running, budget=budget)
    engine.add(everyone)
    while not engine.scheduler.done:
        engine.round(choices, stop=0.2)
    assert engine.num_prefilled == sum({len(one.prompt_ids) - 1 for one in everyone})
    assert not any(one.num_preemptions for one in everyone)
    in_groups = sorted(
        everyone, key=lambda one: [len(other.prompt_ids) for other in everyone].index(len(one.prompt_ids))
    )
    assert engine.started == in_groups, "equal contexts start together, where the first of them stood"


def test_samples_share_full_blocks_copy_the_partial_one_and_the_last_takes_it_over() -> None:
    engine = Engine(block_size=4)
    samples = sequences(3, list(range(11)))
    engine.add(samples)
    [chunk] = engine.prefill()
    assert (list(chunk.token_ids), chunk.start, chunk.blocks) == (list(range(10)), 0, [1, 2, 3])
    started, copies = engine.scheduler.start()
    assert started == samples
    assert [one.blocks for one in samples] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]
    assert copies == [BlockCopy(3, 4, 2), BlockCopy(3, 5, 2)]
    assert engine.blocks.num_free == 99 - 5


def test_a_prefix_of_full_blocks_is_only_shared_and_every_sample_gets_a_new_block() -> None:
    engine = Engine(block_size=4)
    samples = sequences(2, list(range(9)))
    engine.add(samples)
    engine.prefill()
    started, copies = engine.scheduler.start()
    assert [one.blocks for one in started] == [[1, 2, 3], [1, 2, 4]]
    assert copies == []


def test_a_prompt_of_one_token_starts_without_a_prefill() -> None:
    engine = Engine()
    samples = sequences(2, [7])
    engine.add(samples)
    assert engine.prefill() == []
    assert engine.start() == samples


def test_a_long_prefix_is_cut_into_chunks_or_goes_alone() -> None:
    long, short = list(range(11)), [50, 51]
    engine = Engine(budget=4)
    engine.add([sequence(short), sequence(long), sequence([60, 61])])
    assert [[list(c.token_ids) for c in engine.prefill()] for _ in range(5)] == [
        [[50]],
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
        [[8, 9], [60]],
        [],
    ]
    whole = Engine(budget=4, chunked=False)
    whole.add([sequence(short), sequence(long), sequence([60, 61])])
    assert [[len(c.token_ids) for c in whole.prefill()] for _ in range(4)] == [[1], [10], [1], []]


def test_a_preempted_sequence_takes_the_prompt_from_a_sample_that_still_runs() -> None:
    engine = Engine(num_blocks=1 + 8, block_size=4)
    samples = sequences(2, list(range(10)), max_new=8)
    engine.add(samples)
    engine.round(Random(0))
    engine.scheduler.requeue(samples[1:])
    engine.rows.remove(samples[1])
    prefilled = engine.num_prefilled
    engine.admit()
    assert engine.rows == samples
    assert samples[1].blocks[:2] == samples[0].blocks[:2]
    assert engine.num_prefilled - prefilled == 10 - 8


def test_a_group_that_waits_for_rows_keeps_its_prefix_and_is_not_prefilled_again() -> None:
    engine = Engine(max_running=2)
    engine.add(sequences(5, list(range(6))))
    engine.admit()
    assert len(engine.rows) == 2
    assert engine.scheduler.num_waiting == 3
    while not engine.scheduler.done:
        engine.round(Random(0))
    assert engine.num_prefilled == 5


def test_late_arrivals_join_a_group_only_until_its_prefill() -> None:
    engine = Engine(max_running=1)
    first, second, third = sequences(3, list(range(6)))
    other = sequence([9, 9])
    engine.add([first])
    engine.add([other])
    engine.add([second])
    engine.admit()
    engine.add([third])
    while not engine.scheduler.done:
        engine.round(Random(0))
    assert engine.started == [first, second, other, third]


def test_aborted_waiting_sequences_free_a_prefix_that_nobody_waits_for() -> None:
    engine = Engine(max_running=1)
    samples = sequences(3, list(range(6)))
    engine.add(samples)
    engine.admit()
    assert engine.scheduler.take_waiting({one.request.request_id for one in samples}) == samples[1:]
    engine.check()
    assert engine.blocks.num_free == 99 - len(samples[0].blocks)
    assert engine.scheduler.num_waiting == 0


def test_only_running_sequences_can_be_released() -> None:
    engine = Engine()
    waiting = sequence([1, 2])
    engine.add([waiting])
    with pytest.raises(RolloutError, match="does not run"):
        engine.scheduler.release([waiting])


def test_memory_for_one_still_serves_many_without_preempting_any() -> None:
    engine = Engine(num_blocks=1 + 4, block_size=4)
    samples = sequences(6, list(range(8)), max_new=8)
    engine.add(samples)
    while not engine.scheduler.done:
        engine.round(Random(0))
    assert not any(one.num_preemptions for one in samples)


@pytest.mark.parametrize("window", [1, 4])
def test_short_memory_costs_few_preemptions(window: int) -> None:
    """16 sequences that grow from 1 block to 16, in memory for two long ones."""
    engine = Engine(num_blocks=1 + 32, block_size=4, window=window)
    everyone = [sequence([100 + i] * 3, max_new=61) for i in range(16)]
    engine.add(everyone)
    while not engine.scheduler.done:
        engine.round(Random(0))
    # Each leaves once while the first ones grow and about once more while it grows itself.
    assert sum(one.num_preemptions for one in everyone) <= 3 * len(everyone)
    assert engine.num_prefilled <= sum(one.max_tokens for one in everyone)


@settings(max_examples=100, deadline=None)
@given(
    prompts=PROMPTS,
    max_running=st.integers(1, 6),
    spare=st.integers(2, 4),
    abort=st.sampled_from([0.0, 0.2]),
    choices=st.randoms(use_true_random=False),
)
def test_compact_makes_running_blocks_dense_where_a_block_holds_a_sequence(
    prompts, max_running, spare, abort, choices
) -> None:
    everyone = [one for batch in arrivals(prompts) for one in batch]
    block_size = max(one.max_tokens for one in everyone)
    engine = Engine(num_blocks=1 + max_running + spare, block_size=block_size, max_running=max_running, window=3)
    engine.add(everyone)
    while not engine.scheduler.done:
        engine.admit()
        assert len(engine.rows) == max_running or not engine.scheduler.num_waiting
        engine.compact()
        assert engine.is_dense
        engine.compact()
        engine.grow()
        engine.decode(choices, stop=0.2)
        if choices.random() < abort:
            engine.abort([choices.choice(everyone)])
    assert not any(one.num_preemptions for one in everyone)


@settings(max_examples=100, deadline=None)
@given(taken=st.lists(st.sampled_from(["free", "runs", "waits"]), min_size=1, max_size=12))
def test_compact_clears_waiting_prefixes_out_of_the_way_if_one_block_is_free(taken) -> None:
    engine = Engine(num_blocks=1 + len(taken), block_size=8)
    places = {kind: [i for i, other in enumerate(taken, 1) if other == kind] for kind in ("runs", "waits", "free")}
    engine.blocks.allocate(len(taken))
    for kind in ("runs", "waits"):
        for place in places[kind]:
            engine.blocks.release([place])  # The only free one, so it is this one that is taken.
            engine.scheduler.add([sequence([place] * 4)])
            [chunk] = engine.scheduler.next_prefill()
            assert chunk.blocks == [place]
            for i, token in enumerate(chunk.token_ids):
                engine.write(chunk.blocks, i, token)
            if kind == "runs":
                engine.rows += engine.scheduler.start()[0]
    engine.blocks.release(places["free"])
    engine.check()
    for _ in range(2 * len(taken)):
        engine.compact()
    assert engine.is_dense or not places["free"]
    assert engine.scheduler.compact() == []
