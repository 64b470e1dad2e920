"""The passes over the logits in Triton and in C++ against those in plain torch, in float64."""

import ctypes
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.model.head import HEAD_OUTPUTS, fused_head
from burnish.model.kernels import cpu
from burnish.model.kernels.cpu import build
from burnish.model.kernels.cpu.build import CannotBuild, load
from burnish.model.kernels.head import (
    LogitTransform,
    OutputGrads,
    Softmax,
    Statistics,
    head_gradient_,
    head_statistics,
    kl_gradient_,
    kl_statistics,
)
from tests.rollout.kernels.cases import normal, on_every_backend

# Nothing in it, the factors of Granite, the soft-cap of Gemma with a bias.
SOFTMAXES = [(1.0, None, False), (0.4, None, True), (0.7, 3.0, True)]
FLOWS = [flow for flow in product((False, True), repeat=3) if any(flow)]


def softmaxes(scale: float, softcap: float | None, has_bias: bool, like: Tensor) -> tuple[Softmax, Softmax]:
    """For the kernel, and the same in float64 on the CPU."""
    bias = normal(like.shape[1], dtype=like.dtype, device=like.device, seed=7) if has_bias else None
    transform = LogitTransform(scale, softcap)
    return (
        Softmax(transform, 1 / 0.7, bias),
        Softmax(transform, 1 / 0.7, None if bias is None else bias.double().cpu()),
    )


def logits_and_labels(vocab: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Five tokens; the first one's label is the most likely token, and the second is nearly certain."""
    raw = 4 * normal(5, vocab, dtype=dtype, device=device)
    raw[1, vocab // 3] = 40.0
    labels = torch.arange(5) * 7 % vocab
    labels[0] = raw[0].argmax()
    return raw, labels.to(device)


def exact(raw: Tensor, labels: Tensor, softmax: Softmax) -> Statistics:
    return head_statistics(raw.double().cpu(), labels.cpu(), softmax, want_entropy=True, want_sum_squared=True)


def assert_near(ours: Tensor, expected: Tensor, near: float) -> None:
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=near, atol=near)


def grads_of(flows: tuple[bool, ...], device: str = "cpu") -> tuple[OutputGrads, OutputGrads]:
    grads = [normal(5, device=device, seed=number) if flows[number] else None for number in range(3)]
    return OutputGrads(*grads), OutputGrads(*(None if g is None else g.double().cpu() for g in grads))


GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@on_every_backend
@pytest.mark.parametrize("vocab", [3, 64, 257])
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_statistics_in_triton_equal_those_in_torch(device, dtype, vocab, scale, softcap, has_bias):
    from burnish.model.kernels.gpu.head import head_statistics as kernel

    raw, labels = logits_and_labels(vocab, torch.float32, device)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw)
    before, expected = raw.clone(), exact(raw, labels, exact_softmax)
    for entropy, squares in product((False, True), repeat=2):
        ours = kernel(raw, labels, softmax, want_entropy=entropy, want_sum_squared=squares, block=64)
        assert (ours.entropy is None) != entropy
        assert (ours.sum_pi_squared is None) != squares
        for mine, theirs in zip(ours, expected, strict=True):
            if mine is not None:
                assert_near(mine, theirs, 2e-5)
        assert has_bias or ours.log_probs[0] == ours.top1_log_probs[0]
    assert torch.equal(raw, before)


@on_every_backend
@pytest.mark.parametrize("vocab", [3, 64, 257])
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_the_gradient_in_triton_equals_that_in_torch(device, dtype, vocab, scale, softcap, has_bias):
    from burnish.model.kernels.gpu.head import head_gradient_ as kernel

    raw, labels = logits_and_labels(vocab, torch.float32, device)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw)
    statistics = exact(raw, labels, exact_softmax)
    narrow = Statistics(*(x.float().to(device) for x in statistics))
    for flows in FLOWS:
        grads, exact_grads = grads_of(flows, device)
        expected = head_gradient_(
            raw.double().cpu(), labels.cpu(), exact_softmax, statistics, exact_grads, torch.float64
        )
        # As the head has it: rows begin at whole tiles, and what lies between them is nobody's.
        memory = torch.full((5, vocab + 13), 7.0, device=device)
        memory[:, :vocab] = raw
        ours = kernel(memory[:, :vocab], labels, softmax, narrow, grads, dtype, block=64)
        assert bool((memory[:, vocab:] == 7.0).all())
        assert ours.dtype == dtype
        assert ours.data_ptr() == memory.data_ptr()
        assert_near(ours, expected, GRADIENT_TOLERANCE[dtype])


@on_every_backend
@pytest.mark.parametrize("vocab", [3, 257])
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_kl_in_triton_equals_that_in_torch(device, dtype, vocab, scale, softcap, has_bias):
    from burnish.model.kernels.gpu.head import kl_gradient_ as gradient_kernel
    from burnish.model.kernels.gpu.head import kl_statistics as kernel

    raw, _ = logits_and_labels(vocab, torch.float32, device)
    other = raw + 0.3 * normal(5, vocab, device=device, seed=3)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw)
    other_softmax, exact_other_softmax = softmaxes(1.1, None, not has_bias, raw)
    expected = kl_statistics(raw.double().cpu(), exact_softmax, other.double().cpu(), exact_other_softmax)
    ours = kernel(raw, softmax, other, other_softmax, block=64)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_near(mine, theirs, 2e-5)
    grad = normal(5, device=device, seed=4)
    expected_grad = kl_gradient_(
        raw.double().cpu(),
        exact_softmax,
        other.double().cpu(),
        exact_other_softmax,
        expected,
        grad.double().cpu(),
        torch.float64,
    )
    ours_grad = gradient_kernel(raw.clone(), softmax, other, other_softmax, ours, grad, dtype, block=64)
    assert_near(ours_grad, expected_grad, GRADIENT_TOLERANCE[dtype])


HALF = {torch.float16, torch.bfloat16}


def operands(vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels of 130 tokens, more than one tile; the first ones' labels are the most likely tokens."""
    hidden, weight = normal(130, 64, dtype=dtype, device=device), 0.4 * normal(vocab, 64, seed=1)
    weight = weight.to(device, dtype)
    labels = torch.arange(130, device=device) * 7 % vocab
    labels[:9] = (hidden.double() @ weight.double().T).argmax(-1)[:9]
    return hidden, weight, labels


@on_every_backend
@pytest.mark.parametrize("vocab", [3, 256, 601])
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_the_product_joined_with_its_softmax_equals_the_two_apart(device, dtype, vocab, scale, softcap, has_bias):
    from burnish.model.kernels.gpu import head_products

    hidden, weight, labels = operands(vocab, dtype, device)
    assert head_products.serves(hidden, weight) == (dtype in HALF)
    if dtype not in HALF:
        return
    raw = hidden.double() @ weight.double().T
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw.to(dtype))
    expected = exact(raw.clone(), labels, exact_softmax)
    for entropy, squares in product((False, True), repeat=2):
        ours = head_products.product_statistics(
            hidden, weight, labels, softmax, want_entropy=entropy, want_sum_squared=squares
        )
        assert (ours.entropy is None) != entropy
        assert (ours.sum_pi_squared is None) != squares
        for mine, theirs in zip(ours, expected, strict=True):
            if mine is not None:
                assert_near(mine, theirs, 2e-5)
        assert has_bias or torch.equal(ours.log_probs[:9], ours.top1_log_probs[:9])
    flow = torch.arange(130, device=device) % 3 - 1.0
    for flows in FLOWS:
        grads = OutputGrads(*(flow * (n + 1) if flows[n] else None for n in range(3)))
        exact_grads = OutputGrads(*(None if g is None else g.double().cpu() for g in grads))
        expected_grad = head_gradient_(
            raw.cpu().clone(), labels.cpu(), exact_softmax, expected, exact_grads, torch.float64
        )
        memory = torch.full((130, vocab + 13), 7.0, dtype=dtype, device=device)
        statistics = Statistics(*(x.float().to(device) for x in expected))
        got = head_products.product_gradient(hidden, weight, labels, softmax, statistics, grads, memory[:, :vocab])
        assert_near(got, expected_grad, GRADIENT_TOLERANCE[dtype])
        assert bool((memory[:, vocab:] == 7.0).all())


@on_every_backend
def test_in_triton_what_is_not_finite_stays_so_and_in_its_row(device, dtype):
    from burnish.model.kernels.gpu import head as kernels

    raw = normal(4, 100, device=device)
    raw[1, 70], raw[2, 99] = float("nan"), float("inf")
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    softmax = Softmax(LogitTransform(), 1.0)
    statistics = kernels.head_statistics(raw, labels, softmax, want_entropy=True, want_sum_squared=True, block=64)
    finite = torch.tensor([True, False, False, True])
    for column in statistics:
        if column is not statistics.log_normalizer:
            assert torch.equal(column.isfinite().cpu(), finite)
    grads = OutputGrads(torch.ones(4, device=device), None, None)
    grad = kernels.head_gradient_(raw, labels, softmax, statistics, grads, dtype, block=64)
    assert torch.equal(grad.isfinite().all(1).cpu(), finite)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50_257, 151_936, 262_144])
def test_a_whole_head_on_the_gpu_equals_float64(vocab):
    hidden, weight = normal(300, 64).bfloat16(), (0.2 * normal(vocab, 64, seed=1)).bfloat16()
    labels = torch.arange(300) * 811 % vocab
    results: list[Any] = []
    for device, dtype, chunk_size in (("cpu", torch.float64, None), ("cuda", torch.bfloat16, 128)):
        h, w = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
        values = fused_head(h, w, labels.to(device), temperature=0.9, outputs=HEAD_OUTPUTS, chunk_size=chunk_size)
        (values["log_probs"].sum() + 0.1 * values["entropy"].sum() + values["sum_pi_squared"].sum()).backward()
        results.append((values, h.grad, w.grad))
    for name in HEAD_OUTPUTS:
        assert_near(results[1][0][name], results[0][0][name].detach(), 3e-5)
    for expected, ours in zip(results[0][1:], results[1][1:], strict=True):
        assert float((ours.double().cpu() - expected).norm() / expected.norm()) < 0.01


# ---- C++


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return load(cpu.SOURCE, tmp_path_factory.mktemp("kernels"))
    except CannotBuild as reason:
        pytest.skip(f"no compiled kernels: {reason}")


@pytest.fixture
def compiled(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any vocabulary go to C++."""
    monkeypatch.setattr(cpu, "_kernels", cpu.kernels_of(library))
    monkeypatch.setattr(cpu, "_tried", True)
    monkeypatch.setattr(cpu, "MIN_VOCAB", 1)


IN_C = [torch.float32, torch.bfloat16]
ON_THE_EDGE = [1, 31, 32, 33, 4096, 5003]
"""32 logits are read at once, and 4096 added up."""


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", IN_C)
@pytest.mark.parametrize("vocab", ON_THE_EDGE)
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_statistics_in_c_equal_those_in_torch(dtype, vocab, scale, softcap, has_bias):
    raw, labels = logits_and_labels(vocab, dtype)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw)
    before, expected = raw.clone(), exact(raw, labels, exact_softmax)
    for entropy, squares in product((False, True), repeat=2):
        ours = head_statistics(raw, labels, softmax, want_entropy=entropy, want_sum_squared=squares)
        assert (ours.entropy is None) != entropy
        assert (ours.sum_pi_squared is None) != squares
        for mine, theirs in zip(ours, expected, strict=True):
            if mine is not None:
                assert_near(mine, theirs, 1e-5)
        assert has_bias or ours.log_probs[0] == ours.top1_log_probs[0]
    # Plain torch would have written there.
    assert torch.equal(raw, before)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", IN_C)
@pytest.mark.parametrize("vocab", ON_THE_EDGE)
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_the_gradient_in_c_equals_that_in_torch(dtype, vocab, scale, softcap, has_bias):
    raw, labels = logits_and_labels(vocab, dtype)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, raw)
    statistics = exact(raw, labels, exact_softmax)
    narrow = Statistics(*(x.float() for x in statistics))
    for flows in FLOWS:
        grads, exact_grads = grads_of(flows)
        expected = head_gradient_(raw.double(), labels, exact_softmax, statistics, exact_grads, torch.float64)
        memory = raw.clone()
        ours = head_gradient_(memory, labels, softmax, narrow, grads, dtype)
        assert ours.data_ptr() == memory.data_ptr()
        assert_near(ours, expected, GRADIENT_TOLERANCE[dtype])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", IN_C)
def test_in_c_neither_threads_nor_other_rows_change_a_bit(dtype):
    raw, labels = 3 * normal(70, 5003, dtype=dtype), torch.arange(70) * 71
    softmax, grads = Softmax(LogitTransform(), 1.0), OutputGrads(normal(70), normal(70, seed=1), None)

    def results(rows: slice) -> list[Tensor]:
        statistics = head_statistics(raw[rows].clone(), labels[rows], softmax, want_entropy=True, want_sum_squared=True)
        part = OutputGrads(*(None if g is None else g[rows] for g in grads))
        return [*statistics, head_gradient_(raw[rows].clone(), labels[rows], softmax, statistics, part, dtype)]

    before, whole = torch.get_num_threads(), results(slice(None))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(whole, results(slice(None)), strict=True))
    finally:
        torch.set_num_threads(before)
    for row in (0, 33, 69):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(results(slice(row, row + 1)), whole, strict=True))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", IN_C)
def test_in_c_what_is_not_finite_stays_so_and_in_its_row(dtype):
    raw, labels = normal(4, 100, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    raw[1, 70], raw[2, 99] = float("nan"), float("inf")
    softmax, finite = Softmax(LogitTransform(), 1.0), torch.tensor([True, False, False, True])
    statistics = head_statistics(raw, labels, softmax, want_entropy=True, want_sum_squared=True)
    for column in statistics:
        assert torch.equal(column.isfinite(), finite)
    grad = head_gradient_(raw, labels, softmax, statistics, OutputGrads(torch.ones(4), None, None), dtype)
    assert torch.equal(grad.isfinite().all(1), finite)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", IN_C)
def test_in_c_a_whole_head_equals_torchs(dtype, monkeypatch):
    results: list[Any] = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(cpu, "_kernels", {})
        hidden, weight = (
            normal(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate([(70, 16), (300, 16)])
        )
        values = fused_head(hidden, weight, torch.arange(70), temperature=0.9, outputs=HEAD_OUTPUTS, chunk_size=32)
        (values["log_probs"].sum() + values["entropy"].sum()).backward()
        results.append((*values.values(), hidden.grad, weight.grad))
    for mine, theirs in zip(*results, strict=True):
        near = 1e-5 if mine.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


@pytest.mark.usefixtures("compiled")
def test_what_c_cannot_take_goes_to_torch():
    raw, labels = logits_and_labels(40, torch.bfloat16)
    wide_bias = normal(40, seed=7)
    softmax = Softmax(LogitTransform(), 1.0, wide_bias)
    ours = head_statistics(raw, labels, softmax, want_entropy=False, want_sum_squared=False)
    expected = exact(raw, labels, Softmax(LogitTransform(), 1.0, wide_bias.double()))
    assert_near(ours.log_probs, expected.log_probs, 1e-5)


def test_a_toy_needs_no_compiler(monkeypatch):
    monkeypatch.setattr(cpu, "_tried", False)
    monkeypatch.setattr(build, "load", lambda *_: pytest.fail("compiles for a toy"))
    assert cpu.compiled_for(torch.zeros(2, cpu.MIN_VOCAB - 1)) is None


@pytest.mark.parametrize(("switch", "message"), [("0", "BURNISH_CPU_KERNELS=0"), (None, "no compiler here")])
def test_plain_torch_stays_where_it_is_wanted_or_must(monkeypatch, caplog, switch, message):
    def fail(*_):
        raise CannotBuild("no compiler here")

    monkeypatch.setattr(build, "load", fail)
    monkeypatch.setattr(cpu, "_kernels", {})
    monkeypatch.setattr(cpu, "_tried", False)
    if switch is not None:
        monkeypatch.setenv("BURNISH_CPU_KERNELS", switch)
    with caplog.at_level("INFO", "burnish.model"):
        for _ in range(2):
            assert cpu.compiled_for(torch.zeros(2, cpu.MIN_VOCAB)) is None
    assert len(caplog.records) == 1
    assert message in caplog.text
