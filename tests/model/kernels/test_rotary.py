import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from burnish.model.kernels import HeadNorms, rotate, rotate_backward
from burnish.model.kernels.rotary import rotate_backward_torch, rotate_torch
from tests.rollout.kernels.cases import TOLERANCE, normal, on_every_backend, rope_tables

HEADS, KV_HEADS, DIM = 3, 1, 8


def angles(tokens: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    cos, sin = (table.to(dtype) for table in rope_tables(tokens, dim, device))
    # The halves differ, as no model's do, so that a kernel that takes the wrong half is seen.
    return cos, torch.cat((sin[:, : dim // 2], 0.5 * sin[:, dim // 2 :]), 1)


def head_norms(dim: int, dtype: torch.dtype, device: str = "cpu") -> HeadNorms:
    return HeadNorms(*(normal(dim, dtype=dtype, device=device, seed=seed) for seed in (5, 6)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_rounds_as_hugging_faces_modules_do(dtype, has_norms):
    qkv = normal(6, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    cos, sin = (table.to(dtype) for table in rope_tables(6, DIM))
    norms = head_norms(DIM, dtype) if has_norms else None
    heads = qkv.clone().view(6, -1, DIM)
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    if norms is not None:
        normed = []
        for x, weight in ((query, norms.query), (key, norms.key)):
            module = Qwen3RMSNorm(DIM, eps=norms.eps)
            module.weight.data = weight
            normed.append(module(x).detach())
        query, key = normed
    expected = *apply_rotary_pos_emb(query[None], key[None], cos[None], sin[None], unsqueeze_dim=2), value[None]
    for mine, theirs in zip(rotate(qkv.clone(), cos, sin, HEADS, KV_HEADS, norms), expected, strict=True):
        assert torch.equal(mine, theirs[0])


@pytest.mark.parametrize("has_norms", [False, True])
def test_its_gradient_is_that_of_the_formula(has_norms):
    qkv = normal(5, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    cos, sin = angles(5, DIM, torch.float64)
    norms = head_norms(DIM, torch.float64) if has_norms else None
    given = qkv.clone().requires_grad_()
    weights = [] if norms is None else [norms.query.clone().requires_grad_(), norms.key.clone().requires_grad_()]
    query, key, value = given.view(5, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    turned = []
    for number, x in enumerate((query, key)):
        if norms is not None:
            x = weights[number] * x / (x.square().mean(-1, keepdim=True) + norms.eps).sqrt()
        first, second = x.chunk(2, -1)
        turned.append(x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None])
    expected = (*turned, value)
    grads = tuple(normal(*x.shape, dtype=torch.float64, seed=7 + i) for i, x in enumerate(expected))
    sum((x * grad).sum() for x, grad in zip(expected, grads, strict=True)).backward()

    mine, mine_weights = rotate_backward(grads, cos, sin, qkv.clone() if has_norms else None, norms)
    for x, y in zip(rotate(qkv, cos, sin, HEADS, KV_HEADS, norms), expected, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine, given.grad, rtol=1e-12, atol=1e-12)
    for x, weight in zip(mine_weights or (), weights, strict=True):
        torch.testing.assert_close(x, weight.grad, rtol=1e-12, atol=1e-12)


def test_with_norms_the_projections_stay_for_the_backward():
    qkv = normal(4, (HEADS + 2 * KV_HEADS) * DIM)
    before = qkv.clone()
    rotate(qkv, *angles(4, DIM, torch.float32), HEADS, KV_HEADS, head_norms(DIM, torch.float32))
    assert torch.equal(qkv, before)


@on_every_backend
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 8), (14, 2, 64), (5, 5, 80)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_the_kernel_equals_its_twin(device, dtype, heads, kv_heads, dim, has_norms):
    from burnish.model.kernels.gpu.rotary import rotate as kernel

    qkv = normal(7, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    norms = head_norms(dim, dtype, device) if has_norms else None
    tables = angles(7, dim, dtype, device)
    mine, theirs = (
        turn(x, *tables, heads, kv_heads, norms) for turn, x in ((kernel, qkv.clone()), (rotate_torch, qkv.clone()))
    )
    torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    in_place = qkv.clone()
    kernel(in_place, *tables, heads, kv_heads, norms)
    assert torch.equal(in_place[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])
    assert kernel(qkv[:0], *(table[:0] for table in tables), heads, kv_heads, norms).shape[0] == 0


@on_every_backend
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 8), (14, 2, 64), (5, 5, 80)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_the_backward_kernel_equals_its_twin(device, dtype, heads, kv_heads, dim, has_norms):
    from burnish.model.kernels.gpu.rotary import rotate_backward as kernel

    qkv = normal(7, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    norms = head_norms(dim, dtype, device) if has_norms else None
    # The gradients of attention may lie heads first.
    grads = tuple(
        normal(number, 7, dim, dtype=dtype, device=device, seed=seed).transpose(0, 1)
        for seed, number in enumerate((heads, kv_heads, kv_heads))
    )
    given = (grads, *angles(7, dim, dtype, device), qkv if has_norms else None, norms)
    (mine, mine_weights), (theirs, their_weights) = kernel(*given), rotate_backward_torch(*given)
    near = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(mine, theirs, **near)
    assert torch.equal(mine[:, -kv_heads * dim :], grads[2].reshape(7, -1))
    if mine_weights is not None:
        for x, y in zip(mine_weights, their_weights, strict=True):
            torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
