"""The operations of a decode step, each once in Triton for a GPU, once in C++ for a CPU and once in plain torch.

A function here looks where its tensors are. The C++ lies in ``cpu/`` and is compiled on the machine, where that is possible
and pays; elsewhere plain torch does the same. The Triton kernels lie in ``gpu/``, which is imported with the first CUDA
tensor; norm and activation share theirs, and their plain torch, with training (`burnish.model.kernels`). They run inside
captured graphs: no host synchronisation, static shapes, and the cache's memory is found through ``cache.addresses``.
"""

from burnish.rollout.native.kernels.activation import silu_mul
from burnish.rollout.native.kernels.decode_attention import DecodeStep, decode_attention, num_splits_for
from burnish.rollout.native.kernels.norm import rms_norm
from burnish.rollout.native.kernels.rotary import rotate_and_store
from burnish.rollout.native.kernels.store import gather, store

__all__ = [
    "DecodeStep",
    "decode_attention",
    "gather",
    "num_splits_for",
    "rms_norm",
    "rotate_and_store",
    "silu_mul",
    "store",
]
