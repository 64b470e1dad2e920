import pytest
import torch

from burnish.rollout.native.kernels import gather, store
from tests.rollout.kernels.cases import fill, normal, on_both_cpu_backends, on_every_backend, random_cache

PLACES = [3, 95, 0, 17, 16, 40, 41]


def check(store, gather, cache, places):
    """What is stored is read back, and lies in its block; nothing else changes."""
    device, shape = str(cache.device), cache.layers[1]
    before = [(cache.key(layer).clone(), cache.value(layer).clone()) for layer in range(2)]
    # Heads before tokens in memory, as Hugging Face's attention gives them.
    key = normal(shape.num_kv_heads, len(places), shape.key_dim, dtype=cache.dtype, device=device).transpose(0, 1)
    value = normal(len(places), shape.num_kv_heads, shape.value_dim, dtype=cache.dtype, device=device, seed=1)
    store(cache, 1, torch.tensor(places, device=device), key, value)
    read = gather(cache, 1, torch.tensor(places, device=device))
    assert torch.equal(read[0], key)
    assert torch.equal(read[1], value)
    for i, place in enumerate(places):
        block, offset = divmod(place, cache.block_size)
        assert torch.equal(cache.key(1)[block, offset], key[i])
        before[1][0][block, offset], before[1][1][block, offset] = key[i], value[i]
    for layer in range(2):
        assert torch.equal(cache.key(layer), before[layer][0])
        assert torch.equal(cache.value(layer), before[layer][1])


@on_both_cpu_backends
@pytest.mark.parametrize("dims", [(16, 16), (80, 48)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_what_is_stored_is_read_back(dims, heads_first):
    cache = random_cache(3, dims[0], value_dim=dims[1], dtype=torch.bfloat16, heads_first=heads_first)
    check(store, gather, cache, PLACES)


@on_every_backend
@pytest.mark.parametrize("dims", [(16, 16), (80, 48)])
def test_the_kernels_store_and_read_back(device, dtype, dims):
    from burnish.rollout.native.kernels.gpu import store as kernels

    cache = random_cache(3, dims[0], value_dim=dims[1], dtype=dtype, device=device)
    check(kernels.store, kernels.gather, cache, PLACES)
    nowhere = torch.zeros(0, dtype=torch.int64, device=device)
    assert kernels.gather(cache, 0, nowhere)[0].shape == (0, 3, dims[0])


@pytest.mark.gpu
def test_a_captured_graph_finds_memory_that_moved():
    cache = random_cache(2, 64, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor(PLACES, device="cuda")
    gather(cache, 1, places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        key, value = gather(cache, 1, places)
    in_the_way = torch.empty(2**26, device="cuda")
    cache.allocate(48)
    fill(cache, seed=9)
    graph.replay()
    assert torch.equal(key, cache.key(1).flatten(0, 1)[places])
    assert torch.equal(value, cache.value(1).flatten(0, 1)[places])
    del in_the_way
