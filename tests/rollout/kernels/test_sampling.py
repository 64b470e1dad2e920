"""The kernels that draw on a GPU draw what plain torch draws."""

import math

import pytest
import torch

from burnish.rollout.native.kernels.advance import advance_torch
from burnish.rollout.native.sampler import Draw, SamplingRows, draw, uniforms
from tests.rollout.advance_cases import decode_state, drawn
from tests.rollout.draw_cases import mixed_rows, sampling_rows
from tests.rollout.kernels.cases import BACKENDS, normal

on_every_device = pytest.mark.parametrize(
    "device", [pytest.param(p.values[0], marks=p.marks, id=p.id) for p in BACKENDS if p.values[1] == torch.float32]
)


def to(rows: SamplingRows, device: str) -> SamplingRows:
    return SamplingRows(*(None if field is None else field.to(device) for field in rows))


def assert_equal(kernel: Draw, twin: Draw, *, may_differ: int = 0, near: float = 2e-5) -> None:
    """The same tokens, but for a few where rounding decides, and log-probs alike up to rounding."""
    same = kernel.tokens.cpu() == twin.tokens
    broken = twin.log_probs.isnan()  # Any token will do.
    assert (~same & ~broken).sum() <= may_differ
    assert torch.equal(kernel.log_probs.cpu().isnan(), broken)
    for a, b in zip(kernel[1:], twin[1:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.cpu()[same & ~broken], b[same & ~broken], rtol=1e-5, atol=near)


def check(logits, rows, device, *, truncates=True, may_differ=0, near=2e-5, **settings) -> None:
    from burnish.rollout.native.kernels.gpu.sampling import draw as kernel

    drawn_there = kernel(logits.to(device), to(rows, device), truncates=truncates, **settings)
    assert_equal(drawn_there, draw(logits, rows, truncates=truncates), may_differ=may_differ, near=near)


@on_every_device
def test_uniforms_are_those_of_torch(device):
    """Of two equal tokens the second is drawn where the uniform number is at least a half."""
    keys = torch.arange(-(2**63), 2**63 - 1, 2**63 // 8)
    rows = sampling_rows(len(keys), keys=keys, positions=torch.arange(len(keys)) * 7)
    from burnish.rollout.native.kernels.gpu.sampling import draw as kernel

    vocab = 4096
    tokens = kernel(torch.zeros(len(keys), vocab, device=device), to(rows, device), truncates=False).tokens
    assert tokens.tolist() == (uniforms(keys, rows.positions) * vocab).long().tolist()


@on_every_device
@pytest.mark.parametrize("vocab", [100, 256, 391])
def test_rows_that_nothing_truncates(device, vocab):
    rows = mixed_rows(16, vocab, seed=vocab)
    check(4 * normal(16, vocab, seed=vocab), rows, device, truncates=False, block=128)


@on_every_device
@pytest.mark.parametrize("capacity", [16, 512])
@pytest.mark.parametrize("scale", [0.05, 4.0])
def test_rows_of_all_kinds(device, capacity, scale):
    """A capacity of 16 makes some rows bisect over the whole vocabulary."""
    rows = mixed_rows(14, 391, seed=capacity)
    check(scale * normal(14, 391, seed=capacity), rows, device, block=256, capacity=capacity)


@on_every_device
@pytest.mark.parametrize("capacity", [16, 512])
def test_equal_logits_are_kept_by_the_lowest_ids(device, capacity):
    rows = mixed_rows(12, 391, seed=2)
    check((2 * normal(12, 391)).round() / 2, rows, device, block=256, capacity=capacity)
    rows = sampling_rows(4, top_p=torch.tensor([0.3, 0.7, 1.0, 0.5]), top_k=torch.tensor([0, 0, 70, 200]))
    check(torch.zeros(4, 391), rows, device, block=256, capacity=capacity)


@on_every_device
@pytest.mark.parametrize("truncates", [False, True])
def test_non_finite_rows_have_nan_log_probs_and_disturb_nobody(device, truncates):
    logits, rows = normal(10, 300), mixed_rows(10, 300, seed=9)
    logits[0, 5], logits[2, 299], logits[4], logits[5], logits[7, 20:] = (
        math.nan,
        math.inf,
        math.nan,
        -math.inf,
        -math.inf,
    )
    check(logits, rows, device, truncates=truncates, block=128, capacity=64)


@on_every_device
def test_a_row_from_which_nothing_can_be_drawn_has_nan_log_probs(device):
    logits = torch.tensor([[1.0, 2.0, -math.inf]])
    check(logits, sampling_rows(1, stop_ids=[[0, 1]], may_stop=False), device, block=16)


@on_every_device
def test_greedy_rows_take_the_lowest_id(device):
    logits = torch.zeros(4, 300)
    for row, best in enumerate([(3, 200), (127, 128), (299,), range(300)]):
        logits[row, list(best)] = 1.0
    for truncates in (False, True):
        check(logits, sampling_rows(4, temperature=0.0, top_k=2), device, truncates=truncates, block=128)


@on_every_device
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("has_seen", [False, True])
def test_advance_equals_its_twin(device, truncated, has_seen):
    from burnish.rollout.native.kernels.gpu.advance import advance as kernel

    state, expected = decode_state(3, device=device), decode_state(3)
    if not has_seen:
        state.seen = expected.seen = None
    for step in range(4):
        kernel(state, state.count, drawn(state, step, truncated=truncated))
        advance_torch(expected, expected.count, drawn(expected, step, truncated=truncated))
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(state, name).cpu(), value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49152, 151936, 128256])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_rows_of_all_kinds_over_a_large_vocabulary(vocab, scale):
    rows = mixed_rows(96, vocab, seed=vocab, max_top_k=3000)
    # Both sum 10^5 float32 probabilities, each in its own order.
    check(scale * normal(96, vocab), rows, "cuda", may_differ=2, near=5e-5)
    check(scale * normal(96, vocab), rows, "cuda", truncates=False, may_differ=1, near=5e-5)


@pytest.mark.gpu
def test_it_runs_inside_a_graph_on_what_the_tensors_hold_then():
    logits, rows = torch.zeros(32, 50_000, device="cuda"), mixed_rows(32, 50_000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for truncates in (False, True):
            draw(logits, rows, truncates=truncates)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draws = [draw(logits, rows, truncates=truncates) for truncates in (False, True)]
    logits.copy_(3 * normal(32, 50_000))
    rows.positions.add_(5)
    graph.replay()
    for captured, truncates in zip(draws, (False, True), strict=True):
        assert_equal(captured, draw(logits.cpu(), to(rows, "cpu"), truncates=truncates), may_differ=1)
