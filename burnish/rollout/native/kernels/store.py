"""Keys and values of new tokens into the paged cache, and out of it."""

from torch import Tensor

from burnish.rollout.native.kernels.cpu import compiled_for
from burnish.rollout.native.paged_cache import PagedCache


def store(cache: PagedCache, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Writes each token's key and value to its place. Of tokens that share a place (idle rows) any one stays.

    Args:
        places: int64 [tokens], block * block_size + offset.
        key: [tokens, num_kv_heads, key_dim], of the cache's dtype, the last axis contiguous.
        value: [tokens, num_kv_heads, value_dim], likewise.
    """
    if places.is_cuda:
        from burnish.rollout.native.kernels.gpu import store as gpu

        gpu.store(cache, layer, places, key, value)
        return
    compiled = compiled_for(key)
    if compiled is None or not compiled.store(cache, layer, places, key, value):
        store_torch(cache, layer, places, key, value)


def gather(cache: PagedCache, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Reads what `store` wrote: keys [tokens, num_kv_heads, key_dim] and values [tokens, num_kv_heads, value_dim]."""
    if places.is_cuda:
        from burnish.rollout.native.kernels.gpu import store as gpu

        return gpu.gather(cache, layer, places)
    return gather_torch(cache, layer, places)


def store_torch(cache: PagedCache, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
    """`store` in plain torch."""
    block, offset = places // cache.block_size, places % cache.block_size
    cache.key(layer)[block, offset] = key
    cache.value(layer)[block, offset] = value


def gather_torch(cache: PagedCache, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """`gather` in plain torch."""
    block, offset = places // cache.block_size, places % cache.block_size
    return cache.key(layer)[block, offset], cache.value(layer)[block, offset]
