"""Ranks get a like amount of work, and rows stay themselves."""

import random

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo.balance import RowWork, on_balanced_ranks, spread
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.utils.seqlen_balancing import sequence_cost


def make_work(num_prompts: int, n: int, prompt: int, seed: int = 0) -> RowWork:
    """Log-normal responses of up to 2,000 tokens."""
    source = random.Random(seed)
    groups = [number for number in range(num_prompts) for _ in range(n)]
    own = [min(2000, int(source.lognormvariate(5, 1)) + 1) for _ in groups]
    return RowWork([prompt + length for length in own], [prompt] * len(groups), groups)


def make_batch(num_prompts: int, n: int, prompt: int = 5, response: int = 9) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    rows = num_prompts * n
    mask = torch.arange(response)[None] < torch.randint(1, response + 1, (rows, 1), generator=generator)
    ids = torch.randint(1, 90, (rows, prompt + response), generator=generator)
    attention_mask = torch.cat([torch.ones(rows, prompt, dtype=torch.bool), mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention_mask,
            "position_ids": attention_mask.long().cumsum(1) - 1,
            "responses": ids[:, prompt:],
            "response_mask": mask,
            "loss_mask": mask.clone(),
        },
        non_tensors={"uid": np.array([f"u{i // n}" for i in range(rows)], dtype=object)},
    )


def worst(work: RowWork, parts: list[list[int]], share_prompts: bool) -> float:
    """The work of the busiest rank over the mean."""
    alone = [sequence_cost(length) for length in work.lengths]
    costs = [work.cost(part) if share_prompts else sum(alone[row] for row in part) for part in parts]
    return max(costs) / (sum(costs) / len(costs))


@pytest.mark.parametrize("dp_size", [2, 4, 8])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_every_rank_gets_equally_many_rows_and_nearly_the_same_work(dp_size: int, share_prompts: bool) -> None:
    work = make_work(num_prompts=32, n=8, prompt=200)
    in_order = spread(work, dp_size, balance=False, share_prompts=share_prompts)
    parts = spread(work, dp_size, balance=True, share_prompts=share_prompts)
    assert sorted(row for part in parts for row in part) == list(range(256))
    assert {len(part) for part in parts} == {256 // dp_size}
    even, uneven = (worst(work, each, share_prompts) for each in (parts, in_order))
    # Whole groups, 4 on each of 8 ranks, cannot be as even as single rows.
    assert even < (1.04 if share_prompts else 1.02)
    assert even < uneven


def test_long_rows_weigh_more_than_their_tokens() -> None:
    # As many tokens on both sides, but attention over one row of 60,000 is four times that over two of 30,000 each.
    lengths = [60_000, 20_000, 30_000, 30_000]
    work = RowWork(lengths, [0] * 4, list(range(4)))
    parts = spread(work, 2, balance=True, share_prompts=False)
    assert sorted(parts) == [[0, 1], [2, 3]]
    assert sequence_cost(60_000) > 2 * sequence_cost(30_000)
    assert sequence_cost(30_000) == sequence_cost(20_000) + sequence_cost(10_000, 20_000)


def test_groups_stay_on_one_rank_where_prompts_are_shared_and_worth_it() -> None:
    work = make_work(num_prompts=16, n=4, prompt=3000)
    for share_prompts in (True, None):
        parts = spread(work, 4, balance=True, share_prompts=share_prompts)
        for part in parts:
            assert len({work.groups[row] for row in part}) == 4
    apart = spread(work, 4, balance=True, share_prompts=False)
    assert max(map(work.cost, parts)) < 0.6 * max(map(work.cost, apart))


def test_groups_are_cut_apart_where_their_lengths_differ_too_much() -> None:
    # Four prompts of one token; all long responses belong to one of them.
    lengths = [1001] * 4 + [11] * 12
    work = RowWork(lengths, [1] * 16, [row // 4 for row in range(16)])
    parts = spread(work, 4, balance=True, share_prompts=True)
    assert [sum(lengths[row] for row in part) for part in parts] == [1034] * 4


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3, 3, 3], [8, 8, 8], [1, 5, 2, 4], [6, 6, 6, 2, 2, 1, 1]])
@pytest.mark.parametrize("dp_size", [2, 3])
def test_groups_of_any_sizes_give_equally_many_rows(sizes: list[int], dp_size: int) -> None:
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    num = len(groups) // dp_size * dp_size
    work = RowWork([500 + row for row in range(num)], [490] * num, groups[:num])
    parts = spread(work, dp_size, balance=True, share_prompts=True)
    assert sorted(row for part in parts for row in part) == list(range(num))
    assert {len(part) for part in parts} == {num // dp_size}


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_pass_gives_every_row_its_own_result(dp_size: int, share_prompts: bool) -> None:
    batch = make_batch(4, 4)
    seen: list[int] = []

    def forward(data: DataProto) -> DataProto:
        """What a worker group does: equal parts, one for each rank, joined again."""
        parts = data.chunk(dp_size)
        seen.extend(int(part.tensors["response_mask"].sum()) for part in parts)
        assert "loss_mask" not in data.tensors
        sums = [part.tensors["input_ids"].sum(1) * 1000 + part.tensors["response_mask"].sum(1) for part in parts]
        return DataProto.from_dict(tensors={"result": torch.cat(sums)})

    result = on_balanced_ranks(forward, batch, dp_size, balance=True, share_prompts=share_prompts)
    tensors = batch.tensors
    expected = tensors["input_ids"].sum(1) * 1000 + tensors["response_mask"].sum(1)
    assert torch.equal(result.tensors["result"], expected)
    # What fills up an uneven split has nothing to compute.
    assert sum(seen) == int(tensors["response_mask"].sum())
    assert len(seen) == dp_size


def test_a_pass_left_in_order_gets_the_rows_as_they_are() -> None:
    batch = make_batch(2, 2)

    def forward(data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"result": data.tensors["input_ids"]})

    result = on_balanced_ranks(forward, batch, 2, balance=False, share_prompts=None)
    assert torch.equal(result.tensors["result"], batch.tensors["input_ids"])


@pytest.mark.parametrize("share_prompts", [False, True, None])
def test_any_number_of_ranks_trains_on_the_same_rows_in_each_step(share_prompts: bool | None) -> None:
    batch = make_batch(6, 3, prompt=40)
    batch.tensors["row"] = torch.arange(18)
    steps = []
    for dp_size in (1, 2, 4):
        planned = plan_mini_batches(batch, num_prompts=4, dp_size=dp_size, share_prompts=share_prompts)
        rows, ids = planned.tensors["row"], planned.tensors["mini_batch_id"]
        counts = planned.tensors["loss_mask"].any(1)
        steps.append([set(rows[(ids == step) & counts].tolist()) for step in range(2)])
        for part in planned.chunk(dp_size):
            assert torch.bincount(part.tensors["mini_batch_id"]).tolist() == [-(-12 // dp_size), -(-6 // dp_size)]
    assert steps[0] == steps[1] == steps[2]
    assert set.union(*steps[0]) == set(range(18))
