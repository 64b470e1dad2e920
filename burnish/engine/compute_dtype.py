"""The dtype that a model computes in."""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from burnish.engine import ranks
from burnish.utils.errors import ConfigError, ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# Entries of a model's matrices below which a CPU step takes so little time that float32's digits are worth more than its half.
_LEAST_ENTRIES = 4_000_000


def resolve_dtype(name: str, device: torch.device, read_config: Callable[[], PreTrainedConfig]) -> torch.dtype:
    """The compute dtype that ``fsdp_config.dtype`` names, the same on every rank; all ranks call it.

    ``auto`` is bfloat16 on a GPU. On a CPU it is bfloat16 where that is faster and worth it: the processor multiplies bfloat16
    matrices (AVX-512 BF16, AMX), else they are converted first, and the model has some millions of parameters.

    Args:
        read_config: gives the model's configuration; called for ``auto`` on a CPU alone.

    Raises:
        ConfigError: an unknown name.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"fsdp_config.dtype={name}: known are auto, {', '.join(_DTYPES)}.")
        return _DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    wants = float(multiplies_bfloat16() and _is_large(read_config))
    # One that cannot read the model, or an older processor among newer ones: ranks whose dtypes differ cannot train together.
    (num_wants,) = ranks.all_reduce_numbers([wants], "sum", device)
    return torch.bfloat16 if num_wants == ranks.world_size() else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    # The public torch.cpu.get_capabilities is younger than the oldest torch that burnish runs with.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _is_large(read_config: Callable[[], PreTrainedConfig]) -> bool:
    try:
        return num_entries(read_config()) >= _LEAST_ENTRIES
    except ModelError:
        # Whoever loads the model says what is wrong with it.
        return False


def num_entries(config: PreTrainedConfig) -> int:
    """About how many entries the matrices of a transformer have: 12 hidden^2 a block, and the head."""
    config = config.get_text_config()
    return int(config.hidden_size * (12 * config.num_hidden_layers * config.hidden_size + config.vocab_size))
