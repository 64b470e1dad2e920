"""What holds of the compiled kernels alone: threads, rows, numbers that are not finite, and how they are built."""

import logging
import pwd
import shutil
from pathlib import Path

import pytest
import torch

from burnish.model.kernels.cpu import build
from burnish.rollout.native.kernels import cpu, decode_attention, rms_norm, rotate_and_store, silu_mul
from burnish.rollout.native.kernels.cpu.build import CannotBuild, load
from burnish.rollout.native.sampler import draw
from tests.rollout.draw_cases import sampling_rows
from tests.rollout.kernels.cases import (
    TOLERANCE,
    naive_attention,
    normal,
    random_cache,
    random_tables,
    rope_tables,
)

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 15, 16, 17, 255, 256, 257, 600]
"""Scores are made 16 at a time, and 256 of them are held at once."""


@pytest.fixture
def compiled(library, monkeypatch):
    """All tests here are of the compiled kernels."""
    monkeypatch.setattr(cpu, "_kernels", cpu.kernels_of(library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (4, 1), (5, 1), (9, 1), (14, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 128), (256, 80)])
@pytest.mark.parametrize("limits", [{}, {"sliding_window": 300, "softcap": 5.0}], ids=str)
def test_attention_is_the_formula(compiled, dtype, heads, dims, limits):
    cache = random_cache(
        heads[1], dims[0], value_dim=dims[1], block_size=50, num_blocks=40, dtype=dtype, heads_first=True
    )
    tables, lengths = random_tables(LENGTHS, 50, 40)
    query = normal(len(LENGTHS), heads[0] + 2, dims[0], dtype=dtype)[:, : heads[0]]
    out = decode_attention(query, cache, 1, tables, lengths, scaling=dims[0] ** -0.5, **limits)
    expected = naive_attention(query, cache, 1, tables, lengths, scaling=dims[0] ** -0.5, **limits)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 3)


def results(rows: slice, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every operation on some of 70 rows."""
    count = 70
    x, residual, gate_up = (
        normal(count, 576, dtype=dtype),
        normal(count, 576, dtype=dtype),
        normal(count, 3000, dtype=dtype),
    )
    qkv, (cos, sin) = normal(count, 15 * 64, dtype=dtype), rope_tables(count, 64)
    cache = random_cache(3, 64, block_size=40, num_blocks=count + 1, dtype=dtype)
    tables = 1 + torch.arange(count, dtype=torch.int32)[:, None]
    lengths = 1 + torch.arange(count, dtype=torch.int32) % 40
    positions, places = torch.arange(count)[rows], (40 * tables[:, 0] + lengths - 1).long()[rows]
    query, _, _ = rotate_and_store(qkv[rows].clone(), cos, sin, positions, cache, 0, places, 9, 3)
    attended = decode_attention(query, cache, 0, tables[rows], lengths[rows], scaling=0.125)
    drawn = draw(4 * normal(count, 5_000, dtype=dtype)[rows], sampling_slice(count, rows), truncates=False)
    norm = rms_norm(x[rows], normal(576, dtype=dtype, seed=1), 1e-5, residual[rows])
    return [*norm, silu_mul(gate_up[rows]), query, attended, drawn.tokens, drawn.log_probs]


def sampling_slice(count: int, rows: slice):
    whole = sampling_rows(count)
    return type(whole)(*(None if field is None else field[rows] for field in whole))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(compiled, dtype):
    before = torch.get_num_threads()
    try:
        of_threads = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            of_threads.append(results(slice(None), dtype))
    finally:
        torch.set_num_threads(before)
    for others in of_threads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_threads[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_alone(compiled, dtype):
    together = results(slice(None), dtype)
    for row in (0, 33, 69):
        alone = results(slice(row, row + 1), dtype)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_past_a_rows_end_is_not_read(compiled, dtype):
    cache = random_cache(2, 64, block_size=32, num_blocks=5, dtype=dtype, heads_first=True)
    tables, lengths = torch.arange(1, 4, dtype=torch.int32)[:, None], torch.tensor([3, 32, 17], dtype=torch.int32)
    query = normal(3, 4, 64, dtype=dtype)
    expected = decode_attention(query, cache, 0, tables, lengths, scaling=0.125)
    for row, length in enumerate(lengths.tolist()):
        cache.key(0)[row + 1, length:] = float("nan")
        cache.value(0)[row + 1, length:] = float("nan")
    assert torch.equal(decode_attention(query, cache, 0, tables, lengths, scaling=0.125), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(compiled, dtype, bad):
    x = normal(3, 80, dtype=dtype)
    x[1, 77] = bad
    finite = torch.tensor([True, False, True])
    assert torch.equal(rms_norm(x, torch.ones(80, dtype=dtype), 1e-5).isfinite().all(1), finite)
    assert torch.equal(silu_mul(x).isfinite().all(1), finite)
    drawn = draw(x, sampling_rows(3), truncates=False)
    assert torch.equal(drawn.log_probs.isfinite(), finite)
    cache = random_cache(1, 80, block_size=8, num_blocks=4, dtype=dtype)
    cache.key(0)[2, 1, 0, 79] = float("nan")
    tables = torch.arange(1, 4, dtype=torch.int32)[:, None]
    lengths = torch.full((3,), 5, dtype=torch.int32)
    attended = decode_attention(normal(3, 2, 80, dtype=dtype), cache, 0, tables, lengths, scaling=0.1)
    assert torch.equal(attended.isfinite().flatten(1).all(1), finite)


def test_exponentials_neither_overflow_nor_lose_their_ends(compiled):
    gates = torch.tensor([-float("inf"), -1e30, -200.0, -88.0, -87.2, -1e-30, 0.0, 1e-30, 87.2, 88.7, 1e30])[:, None]
    out = silu_mul(torch.cat((gates, torch.ones_like(gates)), 1))
    expected = (gates.double() / (1 + (-gates.double()).exp())).float()
    torch.testing.assert_close(out[1:], expected[1:], rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 5, 256, 300, 5_001])
def test_it_draws_what_plain_torch_draws(compiled, dtype, vocab, monkeypatch):
    logits = 3 * normal(200, vocab, dtype=dtype, seed=vocab)
    logits[::7, ::2] = float("-inf") if vocab > 1 else 0.0
    temperature = torch.tensor([0.0, 0.3, 1.0, 1.7, 1e-44]).repeat(40)
    rows = sampling_rows(200, temperature=temperature)
    mine = draw(logits, rows, truncates=False)
    monkeypatch.setattr(cpu, "_kernels", {})
    twin = draw(logits, rows, truncates=False)
    assert (mine.tokens != twin.tokens).sum() <= 1
    same = mine.tokens == twin.tokens
    torch.testing.assert_close(mine.log_probs[same], twin.log_probs[same], rtol=1e-5, atol=1e-5)


@pytest.fixture
def built(library, tmp_path) -> Path:
    """A library as it has been compiled, in a folder of its own."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    return Path(shutil.copy2(library._name, folder))


def test_it_is_compiled_once(built):
    before = built.stat().st_mtime_ns
    load(built.parent)
    assert [path.stat().st_mtime_ns for path in built.parent.iterdir()] == [before]
    assert built.stat().st_mode & 0o077 == 0


def test_a_library_that_others_may_write_is_not_loaded(built):
    built.chmod(0o777)
    with pytest.raises(CannotBuild, match="others may write"):
        load(built.parent)
    built.chmod(0o700)
    built.parent.chmod(0o777)
    with pytest.raises(CannotBuild, match="others may write"):
        load(built.parent)


def test_without_a_compiler_or_with_a_broken_one_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match="on the PATH"):
        load(tmp_path)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo no such flag >&2; exit 1; }\n')
    compiler.chmod(0o700)
    with pytest.raises(CannotBuild, match="no such flag"):
        load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_user_without_a_home_folder_computes_in_plain_torch(library, monkeypatch):
    """As in a container that runs under a number that its list of users lacks."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(CannotBuild, match="the user, who has none here"):
        load()


@pytest.mark.parametrize(
    ("hidden_size", "switch", "message"),
    [(64, None, None), (4096, "0", "BURNISH_CPU_KERNELS=0"), (4096, None, "no compiler here")],
)
def test_plain_torch_stays_where_it_pays_is_wanted_or_must(monkeypatch, caplog, hidden_size, switch, message):
    def fail(*_):
        raise CannotBuild("no compiler here")

    monkeypatch.setattr(build, "load", fail)
    monkeypatch.setattr(cpu, "_kernels", {})
    monkeypatch.setattr(cpu, "_tried", False)
    if switch is not None:
        monkeypatch.setenv("BURNISH_CPU_KERNELS", switch)
    with caplog.at_level(logging.INFO, "burnish.rollout"):
        cpu.prepare(hidden_size)
        cpu.prepare(hidden_size)
    assert cpu.compiled_for(torch.ones(1)) is None
    assert len(caplog.records) == (message is not None)
    assert message is None or message in caplog.text


def test_it_is_compiled_for_this_cpu(built, monkeypatch):
    """An image of a home folder may come to another machine."""
    flags = build._cpu_flags()
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags + " another")
    monkeypatch.setattr(build, "_compile", lambda command, path: shutil.copy2(built, path))
    load(built.parent)
    assert len(list(built.parent.iterdir())) == 2
