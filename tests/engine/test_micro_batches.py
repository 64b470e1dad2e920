"""Every row is in exactly one micro-batch, the token bound holds, and there are few micro-batches."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.engine import ranks
from burnish.engine.micro_batches import split_by_tokens, split_rows
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError
from burnish.utils.seqlen_balancing import sequence_cost
from tests.engine.engine_program import make_batch, make_engine, policy_loss, value_loss


def tokens_of(rows: list[int], lengths: list[int], prompts: list[int], prompt_lengths: list[int]) -> int:
    """Tokens of a micro-batch that computes each prompt once."""
    shared = {prompts[row]: prompt_lengths[row] for row in rows if lengths[row]}
    return sum(lengths[row] - prompt_lengths[row] for row in rows) + sum(shared.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 120))
def test_every_row_is_once_in_a_micro_batch_within_the_bound(lengths: list[int], bound: int) -> None:
    micro_batches = split_by_tokens(lengths, bound)
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= bound for rows in micro_batches)
    assert all(rows == sorted(rows) for rows in micro_batches)
    # Two micro-batches that would fit into one are a wasted pass.
    loads = sorted(sum(lengths[row] for row in rows) for rows in micro_batches)
    assert len(loads) < 2 or loads[0] + loads[1] > bound or loads[0] == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=8)), max_size=15),
    st.integers(50, 200),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_groups_are_packed_within_the_bound_of_the_tokens_that_are_computed(
    groups: list[tuple[int, list[int]]], bound: int, at_least: int, source: random.Random
) -> None:
    table = [(number, prompt, prompt + own) for number, (prompt, owns) in enumerate(groups) for own in owns]
    # Rows that compute nothing have no prompt.
    table += [(number, 0, 0) for number in range(0, len(groups), 3)]
    source.shuffle(table)
    prompts, prompt_lengths, lengths = ([row[i] for row in table] for i in range(3))
    for number in (None, at_least):
        micro_batches = split_rows(
            lengths, max_token_len=bound, prompts=prompts, prompt_lengths=prompt_lengths, num_micro_batches=number
        )
        assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
        assert all(tokens_of(rows, lengths, prompts, prompt_lengths) <= bound for rows in micro_batches)


def log_normal_batch(source: random.Random) -> tuple[list[int], int]:
    """Lengths of rows and a bound: 50 to 600 rows, median 50 to 400 tokens, a bound of 8 to 32 of the longest."""
    median, spread, num_rows = source.uniform(50, 400), source.uniform(0.3, 1.3), source.randint(50, 600)
    longest = source.choice([512, 1024, 2048])
    lengths = [min(longest, int(median * source.lognormvariate(0, spread)) + 1) for _ in range(num_rows)]
    return lengths, longest * source.choice([8, 16, 32])


def test_two_thousand_log_normal_batches_fill_the_bound_and_never_break_it() -> None:
    source = random.Random(0)
    num_micro_batches = fewest = 0
    for _ in range(2000):
        lengths, bound = log_normal_batch(source)
        micro_batches = split_by_tokens(lengths, bound)
        assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
        assert max(sum(lengths[row] for row in rows) for rows in micro_batches) <= bound
        # Of k micro-batches the last may be nearly empty; the k - 1 that there have to be are full to 95 %.
        assert sum(lengths) >= 0.95 * bound * (len(micro_batches) - 1)
        num_micro_batches += len(micro_batches)
        fewest += -(-sum(lengths) // bound)
    assert num_micro_batches <= 1.002 * fewest


def test_log_normal_lengths_fill_the_bound() -> None:
    source = random.Random(0)
    lengths = [min(2000, int(source.lognormvariate(5.5, 0.8)) + 1) for _ in range(2000)]
    micro_batches = split_by_tokens(lengths, 8192)
    assert sum(lengths) / (8192 * len(micro_batches)) > 0.95


def test_log_normal_groups_fill_the_bound_also_where_a_group_is_more_than_half_of_it() -> None:
    source = random.Random(0)
    for _ in range(20):
        prompt_lengths, prompts, lengths = [], [], []
        for number in range(100):
            prompt = min(512, int(source.lognormvariate(5, 0.5)) + 1)
            for _ in range(8):
                prompts.append(number)
                prompt_lengths.append(prompt)
                lengths.append(prompt + min(1024, int(source.lognormvariate(5.5, 0.7)) + 1))
        # A group is about 2,600 tokens.
        micro_batches = split_rows(lengths, max_token_len=4096, prompts=prompts, prompt_lengths=prompt_lengths)
        computed = [tokens_of(rows, lengths, prompts, prompt_lengths) for rows in micro_batches]
        assert max(computed) <= 4096
        assert sum(computed) >= 0.95 * 4096 * (len(computed) - 1)
        # The cut groups compute their prompt again, which is little of what sharing saves.
        saved = sum(lengths) - sum(computed)
        once = sum(lengths) - tokens_of(list(range(800)), lengths, prompts, prompt_lengths)
        assert saved > 0.85 * once


def test_the_work_of_micro_batches_is_levelled_and_the_heaviest_comes_first() -> None:
    source = random.Random(1)
    lengths = [min(2000, int(source.lognormvariate(5, 1.0)) + 1) for _ in range(500)]
    micro_batches = split_by_tokens(lengths, 16384)
    work = [sum(sequence_cost(lengths[row]) for row in rows) for rows in micro_batches]
    assert work == sorted(work, reverse=True)
    assert work[-1] > 0.98 * work[0]


def test_a_rank_takes_the_number_of_micro_batches_that_others_have() -> None:
    lengths = [10, 9, 8, 7, 6, 5, 4, 3]
    assert len(split_by_tokens(lengths, 100)) == 1
    four = split_rows(lengths, max_token_len=100, num_micro_batches=4)
    assert [sum(lengths[row] for row in rows) for rows in four] == [13, 13, 13, 13]
    shared = split_rows([20] * 8, max_token_len=100, prompts=[0] * 8, prompt_lengths=[15] * 8, num_micro_batches=3)
    assert sorted(map(len, shared)) == [2, 2, 4]
    assert len(split_rows(lengths, max_token_len=100, num_micro_batches=20)) == 8


def test_a_row_longer_than_the_bound_is_an_error_that_names_it_and_the_bound_that_works() -> None:
    with pytest.raises(ConfigError, match=r"max_token_len=10 tokens, but row 1 alone has 12.*to 12 at least"):
        split_by_tokens([3, 12, 5], 10)
    with pytest.raises(ConfigError, match=r"row 1 \(uid b\) alone has 13.*to 13 at least"):
        split_rows([3, 13, 5], max_token_len=10, names=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"tokens on each of 2 workers, but row 0 alone has 25.*to 13 at least"):
        split_rows([25, 20], max_token_len=10, num_sharing=2)
    assert split_by_tokens([3, 12, 5], 12) == [[1], [0, 2]]


def test_rows_are_counted_off_in_their_order() -> None:
    assert split_rows([1] * 5, micro_batch_size=2) == [[0, 1], [2, 3], [4]]
    assert split_rows([1] * 3) == [[0, 1, 2]]
    assert split_rows([], micro_batch_size=2) == []


def test_rows_are_counted_off_along_their_groups() -> None:
    prompts = [5, 7, 5, 7, 5, 9]
    assert split_rows([1] * 6, micro_batch_size=3, prompts=prompts) == [[0, 2, 4], [1, 3, 5]]
    assert split_rows([1] * 6, micro_batch_size=2, prompts=prompts) == [[0, 2], [1, 4], [3, 5]]


@pytest.mark.timeout(20)
def test_thousands_of_rows_of_one_prompt_are_cut_in_little_time() -> None:
    generator = random.Random(0)
    prompt, bound, num_rows = 500, 16_384, 16_384
    lengths = [prompt + generator.randrange(100, 8000) for _ in range(num_rows)]
    cut = split_rows(lengths, max_token_len=bound, prompts=[0] * num_rows, prompt_lengths=[prompt] * num_rows)
    assert sorted(row for rows in cut for row in rows) == list(range(num_rows))
    assert all(prompt + sum(lengths[row] - prompt for row in rows) <= bound for rows in cut)


def grouped_batch(num_prompts: int = 3, n: int = 3) -> DataProto:
    """Each prompt of a random batch with n responses."""
    batch = make_batch(num_prompts * n, dtype=torch.float64)
    width = batch.tensors["input_ids"].shape[1] - batch.tensors["responses"].shape[1]
    leaders = [row // n * n for row in range(num_prompts * n)]
    for key in ("input_ids", "attention_mask"):
        tensor = batch.tensors[key].clone()
        tensor[:, :width] = tensor[leaders, :width]
        batch.tensors[key] = tensor
    return batch


@pytest.mark.parametrize("split", [{"micro_batch_size": 9}, {"micro_batch_size": 2}, {"max_token_len": 17}])
@pytest.mark.parametrize("module", ["policy", "value"])
def test_an_engine_that_shares_prompts_computes_less_and_the_same(split: dict[str, int], module: str) -> None:
    batch = grouped_batch()
    outputs, gradients, flops = [], [], []
    for share in (False, True, None):
        engine = make_engine(dtype="float64", module=module, share_prompts=share)
        name = "log_probs" if module == "policy" else "values"
        outputs.append(engine.infer_batch(batch, outputs=(name,), **split)[name])
        engine.take_flops()
        wanted = ("log_probs", "entropy") if module == "policy" else ("values",)
        loss_fn = policy_loss() if module == "policy" else value_loss
        engine.train_batch(batch, loss_fn, outputs=wanted, **split)
        flops.append(engine.take_flops())
        gradients.append(torch.cat([grad.flatten() for grad in engine.full_gradients().values()]))
    assert flops[1] < 0.95 * flops[0]
    assert flops[2] == flops[1]
    for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(output, outputs[0], atol=1e-10, rtol=0)
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < 1e-10


def test_an_engine_left_to_itself_does_not_share_what_saves_little() -> None:
    batch = make_batch(9, dtype=torch.float64)
    flops = []
    for share in (False, None):
        engine = make_engine(dtype="float64", share_prompts=share)
        engine.infer_batch(batch)
        flops.append(engine.take_flops())
    assert flops[0] == flops[1]


def test_an_engine_cuts_its_rows_into_as_many_micro_batches_as_another_rank_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    alone = engine.infer_batch(make_batch(), max_token_len=1000)["log_probs"]
    sizes: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, args: sizes.append(args[0].num_tokens))
    monkeypatch.setattr(ranks, "all_reduce_numbers", lambda numbers, *how: [4.0, *numbers[1:]])
    among_others = engine.infer_batch(make_batch(), max_token_len=1000)["log_probs"]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)
    torch.testing.assert_close(among_others, alone, atol=1e-6, rtol=0)
