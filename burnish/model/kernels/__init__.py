"""The elementwise operations of training, each once in Triton for a GPU, once in C++ for a CPU and once in plain torch.

Each is a pair of functions, forward and backward, that know nothing of autograd: whoever joins them to a differentiable
function decides what is kept in between and what is computed again. A function here looks where its tensors are. The Triton
kernels lie in ``gpu/``, which is imported with the first CUDA tensor; the C++ lies in ``cpu/`` and is compiled on the machine,
where that is possible and pays. The rollout norms and activates with the same kernels.
"""

from burnish.model.kernels.activation import silu_mul, silu_mul_backward
from burnish.model.kernels.norm import rms_norm, rms_norm_backward
from burnish.model.kernels.rotary import HeadNorms, rotate, rotate_backward

__all__ = [
    "HeadNorms",
    "rms_norm",
    "rms_norm_backward",
    "rotate",
    "rotate_backward",
    "silu_mul",
    "silu_mul_backward",
]
