"""Mini-batches are formed over the whole batch: any number of ranks takes the same optimizer steps."""

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo.mini_batches import plan_mini_batches


def make_batch(num_prompts: int, n: int, num_response: int = 6, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    rows = num_prompts * n
    lengths = torch.randint(1, num_response + 1, (rows,), generator=generator)
    mask = torch.arange(num_response)[None] < lengths[:, None]
    return DataProto.from_dict(
        tensors={
            "attention_mask": torch.cat([torch.ones(rows, 4, dtype=torch.bool), mask], dim=1),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "row": torch.arange(rows),
        },
        non_tensors={"uid": np.array([f"u{i // n}" for i in range(rows)], dtype=object)},
    )


def steps_of(planned: DataProto, dp_size: int) -> list[set[int]]:
    """The rows that count in each step, put together from the ranks' slices."""
    steps: dict[int, set[int]] = {}
    for part in planned.chunk(dp_size):
        for row, step, mask in zip(
            part.batch["row"], part.batch["mini_batch_id"], part.batch["loss_mask"], strict=True
        ):
            if mask.any():
                steps.setdefault(int(step), set()).add(int(row))
    return [steps[i] for i in sorted(steps)]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("balance", [True, False])
def test_any_number_of_ranks_takes_the_same_steps(shuffle_seed, balance):
    batch = make_batch(num_prompts=7, n=3)
    plans = {
        dp_size: plan_mini_batches(batch, num_prompts=2, dp_size=dp_size, shuffle_seed=shuffle_seed, balance=balance)
        for dp_size in (1, 2, 4)
    }
    expected = steps_of(plans[1], 1)
    assert len(expected) == 4
    assert set.union(*expected) == set(range(21))
    for dp_size, planned in plans.items():
        assert steps_of(planned, dp_size) == expected
        assert planned.meta_info["mini_batches"] == plans[1].meta_info["mini_batches"]


def test_groups_stay_whole():
    planned = plan_mini_batches(make_batch(6, 4), num_prompts=2, dp_size=1, shuffle_seed=5)
    for uid in set(planned.non_tensor_batch["uid"]):
        assert (
            len(set(planned.batch["mini_batch_id"][[u == uid for u in planned.non_tensor_batch["uid"]]].tolist())) == 1
        )


def test_the_denominators_count_tokens_and_rows_of_the_loss_only():
    batch = make_batch(2, 2)
    batch.batch["loss_mask"][0] = False
    planned = plan_mini_batches(batch, num_prompts=2, dp_size=2)
    (info,) = planned.meta_info["mini_batches"]
    assert info == {"batch_num_tokens": int(batch.batch["loss_mask"].sum()), "global_batch_size": 3}


def test_rows_that_fill_up_an_uneven_split_carry_no_loss():
    batch = make_batch(1, 3)
    planned = plan_mini_batches(batch, num_prompts=1, dp_size=2)
    assert len(planned) == 4
    assert int(planned.batch["loss_mask"].sum()) == int(batch.batch["loss_mask"].sum())


def test_the_given_batch_is_left_as_it_was():
    batch = make_batch(1, 3)
    before = batch.batch["loss_mask"].clone()
    plan_mini_batches(batch, num_prompts=1, dp_size=2)
    assert torch.equal(batch.batch["loss_mask"], before)
    assert "mini_batch_id" not in batch.batch


def test_balancing_evens_out_the_tokens_per_rank():
    batch = make_batch(16, 4, num_response=50, seed=1)

    def spread(balance: bool) -> int:
        planned = plan_mini_batches(batch, num_prompts=16, dp_size=4, balance=balance)
        tokens = [int(part.batch["attention_mask"].sum()) for part in planned.chunk(4)]
        return max(tokens) - min(tokens)

    assert spread(True) < spread(False)
    assert spread(True) <= 50


@pytest.mark.parametrize(("num_prompts", "dp_size"), [(16, 4), (3, 2)])
def test_tokens_of_the_ranks_are_those_of_the_rows_in_order_and_as_they_are_spread(num_prompts, dp_size):
    batch = make_batch(num_prompts, 3, num_response=50, seed=1)
    lengths = batch.batch["attention_mask"].sum(-1)
    metrics = plan_mini_batches(batch, num_prompts=4, dp_size=dp_size).meta_info["seqlen_metrics"]
    in_order = [int(part.sum()) for part in lengths.split(-(-len(lengths) // dp_size))]
    assert (metrics["global_seqlen/min"], metrics["global_seqlen/max"]) == (min(in_order), max(in_order))
    assert metrics["global_seqlen/minmax_diff"] == max(in_order) - min(in_order)
    assert metrics["global_seqlen/mean"] == int(lengths.sum()) / dp_size
    planned = plan_mini_batches(batch, num_prompts=4, dp_size=dp_size)
    # Copies that fill up have no token of a response.
    counted = [
        int(part.batch["attention_mask"][part.batch["response_mask"].any(-1)].sum()) for part in planned.chunk(dp_size)
    ]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (
        min(counted),
        max(counted),
    )
    assert metrics["global_seqlen/balanced_max"] - metrics["global_seqlen/balanced_min"] < max(in_order) - min(in_order)


def test_a_mini_batch_without_a_token_keeps_its_place():
    batch = make_batch(4, 2)
    batch.batch["loss_mask"][:4] = False
    planned = plan_mini_batches(batch, num_prompts=2, dp_size=2)
    counts = [info["batch_num_tokens"] for info in planned.meta_info["mini_batches"]]
    assert counts == [0, int(batch.batch["loss_mask"].sum())]
    assert planned.batch["mini_batch_id"].tolist() == [0, 0, 1, 1] * 2
