"""The compiled operations against plain torch in float64, and what holds of them alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from burnish.model import kernels
from burnish.model.kernels import HeadNorms
from burnish.model.kernels.activation import silu_mul_backward_torch, silu_mul_torch
from burnish.model.kernels.cpu import build, layers
from burnish.model.kernels.norm import rms_norm_backward_torch, rms_norm_torch
from burnish.model.kernels.rotary import rotate_backward_torch, rotate_torch
from tests.rollout.kernels.cases import normal, rope_tables

DTYPES = [torch.float32, torch.bfloat16]
# Of the norm of a tensor; half precision is rounded once or twice.
NEAR = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
# Below, between and beyond the steps of a vector, and the blocks of 64 rows that are summed.
ROWS = [1, 64, 65, 130]

pytestmark = pytest.mark.usefixtures("compiled")


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def assert_near(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert (mine.double() - theirs).norm() <= NEAR[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [5, 32, 90, 576])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_norm_and_its_gradients_are_the_formulas(dtype, rows, hidden, has_residual):
    x, grad, other = (normal(rows, 2 * hidden, dtype=dtype, seed=seed)[:, :hidden] for seed in range(3))
    weight, residual = normal(hidden, dtype=dtype, seed=4), other if has_residual else None
    mine, exact = kernels.rms_norm(x, weight, 1e-5, residual), rms_norm_torch(x, weight, 1e-5, residual)
    assert torch.equal(mine.summed, exact.summed)
    assert_near(mine.out, exact.out.double(), dtype)
    assert_near(mine.rstd, exact.rstd.double(), torch.float32)
    given = grad, mine.summed, mine.rstd, weight, residual
    grad_x, grad_weight, again = kernels.rms_norm_backward(*given, again=True)  # type: ignore[arg-type]
    theirs = rms_norm_backward_torch(*map(wide, given))  # type: ignore[arg-type]
    assert_near(grad_x, theirs[0], dtype)
    assert_near(grad_weight, theirs[1], dtype)
    assert torch.equal(again, mine.out)
    assert kernels.rms_norm_backward(*given)[2] is None  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("intermediate", [3, 32, 129])
def test_the_gate_and_its_gradient_are_the_formulas(dtype, rows, intermediate):
    gate_up, grad = 3 * normal(rows, 2 * intermediate, dtype=dtype), normal(rows, intermediate, dtype=dtype, seed=1)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    product, theirs = kernels.silu_mul(gate_up), grad.double()
    assert_near(product, silu_mul_torch(gate_up.double()), dtype)
    mine = kernels.silu_mul_backward(grad, gate_up)
    assert mine.isfinite().all()
    assert_near(mine, silu_mul_backward_torch(theirs, gate_up.double()), dtype)
    assert torch.equal(grad, product)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 8), (9, 3, 64), (5, 5, 80), (2, 1, 128)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_the_rotation_and_its_gradients_are_the_formulas(dtype, rows, heads, kv_heads, dim, has_norms):
    qkv = normal(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = (table.to(dtype) for table in rope_tables(rows, dim))
    norms = HeadNorms(normal(dim, dtype=dtype, seed=5), normal(dim, dtype=dtype, seed=6), 1e-6) if has_norms else None
    exact = None if norms is None else HeadNorms(norms.query.double(), norms.key.double(), norms.eps)
    query, key, value = kernels.rotate(qkv.clone(), cos, sin, heads, kv_heads, norms)
    theirs = rotate_torch(qkv.double(), cos.double(), sin.double(), heads, kv_heads, exact)
    assert_near(torch.cat((query, key), 1), theirs, dtype)
    assert torch.equal(value.reshape(rows, -1), qkv[:, -kv_heads * dim :])
    grads = tuple(
        normal(number, rows, dim, dtype=dtype, seed=seed).transpose(0, 1)
        for seed, number in enumerate((heads, kv_heads, kv_heads))
    )
    mine, mine_weights = kernels.rotate_backward(grads, cos, sin, qkv if has_norms else None, norms)
    expected, weights = rotate_backward_torch(
        tuple(map(wide, grads)), cos.double(), sin.double(), qkv.double() if has_norms else None, exact
    )  # type: ignore[arg-type]
    assert_near(mine, expected, dtype)
    for x, y in zip(mine_weights or (), weights or (), strict=True):
        assert_near(x, y, dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype, threads):
    results = []
    for number in (1, 3):
        torch.set_num_threads(number)
        x, grad, weight = (normal(*shape, dtype=dtype, seed=len(shape)) for shape in ((700, 96), (700, 96), (96,)))
        normed = kernels.rms_norm(x, weight, 1e-5)
        results.append(kernels.rms_norm_backward(grad, x, normed.rstd, weight, grad, again=True))
    for one, many in zip(*results, strict=True):
        assert torch.equal(one, many)


def test_tensors_that_they_do_not_serve_take_plain_torch():
    x, weight = normal(6, 16, dtype=torch.float64), normal(16, dtype=torch.float64, seed=1)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5).out, rms_norm_torch(x, weight, 1e-5).out)
    strided = normal(16, 6).t()
    expected = rms_norm_torch(strided, weight.float(), 1e-5).out
    assert torch.equal(kernels.rms_norm(strided, weight.float(), 1e-5).out, expected)


def test_a_small_model_compiles_nothing_and_the_variable_keeps_to_torch(monkeypatch):
    def load(*_: object) -> None:
        raise AssertionError("it would have been compiled")

    monkeypatch.setattr(layers, "_kernels", {})
    monkeypatch.setattr(layers, "_tried", False)
    monkeypatch.setattr(build, "load", load)
    layers.prepare(layers.MIN_HIDDEN_SIZE - 1)
    monkeypatch.setenv("BURNISH_CPU_KERNELS", "0")
    layers.prepare(layers.MIN_HIDDEN_SIZE)
    assert not layers.has_kernels(torch.float32)
    monkeypatch.setattr(layers, "_tried", False)
    monkeypatch.delenv("BURNISH_CPU_KERNELS")
    with pytest.raises(AssertionError, match="it would have been compiled"):
        layers.prepare(layers.MIN_HIDDEN_SIZE)
