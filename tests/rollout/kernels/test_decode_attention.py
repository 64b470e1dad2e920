import pytest
import torch

from burnish.rollout.native.kernels import DecodeStep, decode_attention, num_splits_for
from tests.rollout.kernels.cases import (
    TOLERANCE,
    naive_attention,
    normal,
    on_both_cpu_backends,
    on_every_backend,
    random_cache,
    random_tables,
)

HEADS = [(4, 4), (9, 3), (14, 2), (6, 1)]
LIMITS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 4},
    {"sliding_window": 7},
    {"softcap": 2.0},
    {"softcap": 2.0, "sliding_window": 5},
]
LENGTHS = [1, 3, 4, 5, 8, 9, 17]
"""Blocks hold 4 tokens: one token, just below, at and past a border."""


@on_both_cpu_backends
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_it_is_the_formula_over_random_blocks(heads, limits, heads_first):
    cache = random_cache(heads[1], 16, heads_first=heads_first)
    tables, lengths = random_tables(LENGTHS, 4, 24)
    query = normal(len(LENGTHS), heads[0], 16)
    out = decode_attention(query, cache, 1, tables, lengths, scaling=0.3, **limits)
    expected = naive_attention(query, cache, 1, tables, lengths, scaling=0.3, **limits)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@on_both_cpu_backends
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_blocks_that_follow_each_other_are_read_where_they_lie(dim, dtype, limits, heads_first):
    cache = random_cache(3, dim, block_size=20, num_blocks=12, dtype=dtype, heads_first=heads_first)
    tables = torch.arange(2, 2 + len(LENGTHS), dtype=torch.int32)[:, None]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    step = DecodeStep(tables, lengths, cache.block_size)
    assert step.first_block == 2
    assert step.cached(cache, 1)[0].untyped_storage().data_ptr() == cache.key(1).untyped_storage().data_ptr()
    query = normal(len(LENGTHS), 9, dim, dtype=dtype)
    out = decode_attention(query, cache, 1, tables, lengths, scaling=dim**-0.5, step=step, **limits)
    expected = naive_attention(query, cache, 1, tables, lengths, scaling=dim**-0.5, **limits)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@on_both_cpu_backends
@pytest.mark.parametrize("blocks", [[3, 4, 6], [4, 3, 5], [7, 7, 8]], ids=str)
def test_other_blocks_are_gathered(blocks):
    cache = random_cache(1, 16)
    tables, lengths = torch.tensor(blocks, dtype=torch.int32)[:, None], torch.tensor([2, 4, 1], dtype=torch.int32)
    assert DecodeStep(tables, lengths, 4).first_block is None
    query = normal(3, 2, 16)
    out = decode_attention(query, cache, 0, tables, lengths, scaling=0.25)
    expected = naive_attention(query, cache, 0, tables, lengths, scaling=0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@on_both_cpu_backends
def test_rows_do_not_see_each_other():
    cache = random_cache(2, 16)
    tables, lengths = random_tables(LENGTHS, 4, 24)
    query = normal(len(LENGTHS), 4, 16)
    together = decode_attention(query, cache, 0, tables, lengths, scaling=0.25)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        alone = decode_attention(query[one], cache, 0, tables[one], lengths[one], scaling=0.25)
        torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-6)


def test_another_dtype_than_the_caches_is_refused():
    cache = random_cache(2, 16)
    tables, lengths = random_tables([3], 4, 24)
    with pytest.raises(ValueError, match="bfloat16"):
        decode_attention(normal(1, 4, 16, dtype=torch.bfloat16), cache, 0, tables, lengths, scaling=0.25)


def test_few_rows_are_cut_into_parts_and_many_are_not():
    assert num_splits_for(1024, 2, 4096) == 1
    assert num_splits_for(64, 2, 4096) * 64 * 2 >= 4 * 132
    assert num_splits_for(64, 2, 128) == 1
    assert num_splits_for(1, 8, 100_000) == 16


def compare(device, dtype, *, heads=(14, 2), dim=64, value_dim=None, lengths=LENGTHS, block_size=4, **how):
    """The kernel against the formula; the query is a part of a wider tensor, as in the packed projection."""
    from burnish.rollout.native.kernels.gpu.decode_attention import decode_attention as kernel

    num_blocks = 2 + sum(-(-length // block_size) for length in lengths)
    cache = random_cache(
        heads[1], dim, value_dim=value_dim, block_size=block_size, num_blocks=num_blocks, dtype=dtype, device=device
    )
    tables, lengths = random_tables(lengths, block_size, num_blocks, device)
    query = normal(len(lengths), heads[0] + 3, dim, dtype=dtype, device=device)[:, : heads[0]]
    out = kernel(query, cache, 1, tables, lengths, scaling=dim**-0.5, **how)
    how = {key: how[key] for key in ("sliding_window", "softcap") if key in how}
    expected = naive_attention(query, cache, 1, tables, lengths, scaling=dim**-0.5, **how)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@on_every_backend
@pytest.mark.parametrize("heads", [*HEADS, (40, 2)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_the_kernel_is_the_formula(device, dtype, heads, dim):
    compare(device, dtype, heads=heads, dim=dim)


@on_every_backend
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_kernel_keeps_to_windows_and_soft_caps(device, dtype, limits, num_splits):
    compare(device, dtype, block_size=32, lengths=[1, 31, 32, 33, 64, 65, 150], num_splits=num_splits, **limits)


@on_every_backend
@pytest.mark.parametrize("num_splits", range(1, 9))
@pytest.mark.parametrize("block_size", [4, 32])
def test_the_kernel_may_cut_rows_into_any_number_of_parts(device, dtype, num_splits, block_size):
    compare(device, dtype, heads=(6, 2), block_size=block_size, lengths=[1, 63, 64, 300], num_splits=num_splits)


@on_every_backend
@pytest.mark.parametrize("tiling", [(16, 1, 1), (32, 2, 3), (64, 4, 2), (128, 4, 2)], ids=str)
def test_the_kernel_may_be_tiled_in_any_way(device, dtype, tiling):
    from burnish.rollout.native.kernels.gpu.decode_attention import Tiling

    compare(device, dtype, block_size=32, lengths=[1, 33, 140], tiling=Tiling(*tiling), sliding_window=50)


@on_every_backend
def test_the_kernel_takes_values_of_another_width(device, dtype):
    compare(device, dtype, dim=48, value_dim=32, num_splits=2)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths_and_tables():
    cache = random_cache(2, 64, block_size=32, num_blocks=40, dtype=torch.bfloat16, device="cuda")
    tables, lengths = random_tables([200, 70, 1], 32, 40, "cuda")
    query = normal(3, 14, 64, dtype=torch.bfloat16, device="cuda")
    for num_splits in (1, 4):
        decode_attention(query, cache, 0, tables, lengths, scaling=0.125, num_splits=num_splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decode_attention(query, cache, 0, tables, lengths, scaling=0.125, num_splits=num_splits)
        for change in ([200, 70, 1], [3, 64, 20]):
            lengths.copy_(torch.tensor(change))
            graph.replay()
            expected = naive_attention(query, cache, 0, tables, lengths, scaling=0.125)
            torch.testing.assert_close(out.double().cpu(), expected, rtol=3e-2, atol=3e-2)
        lengths.copy_(torch.tensor([200, 70, 1]))
