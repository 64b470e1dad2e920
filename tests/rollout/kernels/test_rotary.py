import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from burnish.rollout.native.kernels import rotate_and_store
from burnish.rollout.native.kernels.rotary import rotate_and_store_torch
from tests.rollout.kernels.cases import (
    TOLERANCE,
    assert_rounded_alike,
    normal,
    on_both_cpu_backends,
    on_every_backend,
    random_cache,
    rope_tables,
)

SHAPES = [(4, 4, 16), (9, 3, 64), (14, 2, 64), (8, 1, 80), (6, 2, 128)]
POSITIONS, PLACES = [0, 7, 7, 61, 30], [5, 90, 4, 33, 71]


def by_hugging_face(qkv, cos, sin, num_heads, num_kv_heads, norms):
    """query, key and value [tokens, heads, dim] by the model's own modules."""
    query, key, value = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).split(
        (num_heads, num_kv_heads, num_kv_heads), 1
    )
    if norms:
        query, key = norms[0](query), norms[1](key)
    query, key = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None].to(qkv.dtype), sin[None].to(qkv.dtype)
    )
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_it_rounds_as_hugging_faces_attention_does(cpu_backend, shape, dtype, normed):
    num_heads, num_kv_heads, dim = shape
    qkv = normal(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    norms = [Qwen3RMSNorm(dim, eps=1e-6), Qwen3RMSNorm(dim, eps=1e-6)] if normed else []
    for i, norm in enumerate(norms):
        norm.weight.data = normal(dim, dtype=dtype, seed=5 + i)
    cos, sin = rope_tables(64, dim)
    cache = random_cache(num_kv_heads, dim, dtype=dtype)
    positions, places = torch.tensor(POSITIONS), torch.tensor(PLACES)
    with torch.no_grad():
        expected = by_hugging_face(qkv.clone(), cos[positions], sin[positions], num_heads, num_kv_heads, norms)
        weights = [norm.weight for norm in norms]
        out = rotate_and_store(qkv, cos, sin, positions, cache, 1, places, num_heads, num_kv_heads, *weights, eps=1e-6)
    for mine, theirs in zip(out, expected, strict=True):
        assert_rounded_alike(mine, theirs, cpu_backend)
        assert mine.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert torch.equal(cache.key(1).flatten(0, 1)[places], out[1])
    assert torch.equal(cache.value(1).flatten(0, 1)[places], out[2])


@on_both_cpu_backends
def test_scores_depend_on_the_distance_alone():
    """q at m times k at n is q at m + s times k at n + s."""
    cos, sin = rope_tables(64, 16)
    cache, places = random_cache(1, 16), torch.tensor([4, 5])

    def score(m, n):
        qkv = normal(1, 3 * 16).expand(2, -1).clone()
        query, key, _ = rotate_and_store(qkv, cos, sin, torch.tensor([m, n]), cache, 0, places, 1, 1)
        return float(query[0, 0] @ key[1, 0])

    assert score(9, 4) == pytest.approx(score(41, 36), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 8), abs=1e-2)


@on_both_cpu_backends
def test_rows_of_the_tables_may_be_chosen_before():
    cos, sin = rope_tables(64, 16)
    positions, places = torch.tensor(POSITIONS), torch.tensor(PLACES)
    qkv = normal(5, 4 * 16)
    ahead = rotate_and_store(qkv.clone(), cos[positions], sin[positions], None, random_cache(1, 16), 0, places, 2, 1)
    inside = rotate_and_store(qkv.clone(), cos, sin, positions.int(), random_cache(1, 16), 0, places, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(ahead, inside, strict=True))


def test_one_norm_alone_is_refused():
    cos, sin = rope_tables(8, 16)
    with pytest.raises(ValueError, match="both or neither"):
        rotate_and_store(
            normal(1, 48), cos, sin, torch.tensor([0]), random_cache(1, 16), 0, torch.tensor([0]), 1, 1, torch.ones(16)
        )


@on_every_backend
@pytest.mark.parametrize("shape", [*SHAPES, (40, 8, 128)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("chosen_before", [False, True])
def test_the_kernel_equals_its_twin(device, dtype, shape, normed, chosen_before):
    from burnish.rollout.native.kernels.gpu.rotary import rotate_and_store as kernel

    num_heads, num_kv_heads, dim = shape
    cos, sin = rope_tables(64, dim, device)
    positions, places = torch.tensor(POSITIONS, device=device), torch.tensor(PLACES, device=device)
    if chosen_before:
        cos, sin, positions = cos[positions], sin[positions], None
    weights = [normal(dim, dtype=dtype, device=device, seed=5 + i) if normed else None for i in range(2)]
    results = []
    for operation in (kernel, rotate_and_store_torch):
        qkv = normal(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype, device=device)
        cache = random_cache(num_kv_heads, dim, dtype=dtype, device=device)
        operation(qkv, cos, sin, positions, cache, 1, places, num_heads, num_kv_heads, *weights, 1e-6)
        results.append((qkv, cache.key(0), cache.value(0), cache.key(1), cache.value(1)))
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for mine, twin in zip(*results, strict=True):
        torch.testing.assert_close(mine, twin, **near)
