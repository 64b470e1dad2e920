"""A model's folder: Hugging Face format, beside it the value head and the whole optimizer state.

Everything is stored whole, so a folder written by two ranks is read by one and the other way round.
"""

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.engine import ranks
from burnish.engine.layout import Layout, copy_into_parameters, local_parts, named_weights
from burnish.engine.optimizer import MasterOptimizer
from burnish.model.policy import ValueModule
from burnish.utils.errors import CheckpointError

OPTIMIZER_FILE = "optimizer.pt"
VALUE_HEAD_FILE = "value_head.safetensors"
_VALUE_HEAD = "value_head."


def non_finite(layout: Layout, optimizer: MasterOptimizer | None, device: torch.device) -> list[str]:
    """Names of the weights, masters and moments that hold NaN or infinity on any rank; all ranks call it and get the same."""
    parts = local_parts(layout) | ({} if optimizer is None else optimizer.moments())
    # By their largest entry: one pass over the memory, and one look at the device for all of them.
    held = [name for name, part in parts.items() if part.numel() and part.is_floating_point()]
    largest = torch._foreach_norm([parts[name] for name in held], math.inf) if held else ()
    broken = dict.fromkeys(parts, 0.0)
    if largest:
        finite = torch.stack([value.double() for value in largest]).isfinite().tolist()
        broken |= {name: float(not is_finite) for name, is_finite in zip(held, finite, strict=True)}
    anywhere = ranks.all_reduce_numbers(list(broken.values()), "max", device)
    return [name for name, flag in zip(broken, anywhere, strict=True) if flag]


def save(layout: Layout, optimizer: MasterOptimizer | None, path: Path, contents: Sequence[str]) -> None:
    """Writes the parts named in ``contents`` to the folder ``path``; rank 0 writes, all ranks gather."""
    writes = ranks.rank() == 0
    if "model" in contents:
        weights = {name: tensor.cpu() for name, tensor in _gathered(layout, writes)}
        if writes:
            path.mkdir(parents=True, exist_ok=True)
            _write_model(layout, weights, path)
    if "optimizer" in contents and optimizer is not None:
        state = optimizer.state_dict(keep=writes)
        if writes:
            path.mkdir(parents=True, exist_ok=True)
            torch.save(state, path / OPTIMIZER_FILE)
    ranks.barrier()


def _gathered(layout: Layout, keep: bool) -> list[tuple[str, Tensor]]:
    kept = []
    for name, tensor in named_weights(layout):
        if keep:
            # To the CPU at once: the whole model may not fit beside its shards.
            kept.append((name, tensor.cpu()))
    return kept


def _write_model(layout: Layout, weights: dict[str, Tensor], path: Path) -> None:
    head = {name: tensor.contiguous() for name, tensor in weights.items() if name.startswith(_VALUE_HEAD)}
    backbone = {name: tensor for name, tensor in weights.items() if not name.startswith(_VALUE_HEAD)}
    layout.module.model.save_pretrained(path, state_dict=backbone)
    if head:
        save_file(head, path / VALUE_HEAD_FILE)
    # transformers writes the dtype of the parameters it sees, which in the sharded layout are the masters.
    config_file = path / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = str(layout.dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def load(
    layout: Layout,
    optimizer: MasterOptimizer | None,
    path: Path,
    contents: Sequence[str],
    source: nn.Module | None,
) -> None:
    """Reads the parts named in ``contents`` from ``path`` into ``layout`` and ``optimizer``, in place.

    Args:
        source: the module at ``path``, whole on the CPU in the master dtype; None when the model is not wanted.

    Raises:
        CheckpointError: the optimizer state is missing, unreadable or of another model.
    """
    if source is not None:
        copy_into_parameters(layout, source)
    if "optimizer" in contents and optimizer is not None:
        file = path / OPTIMIZER_FILE
        if not file.exists():
            raise CheckpointError(
                f"{path} has no {OPTIMIZER_FILE}. Take 'optimizer' out of checkpoint.load_contents to go on with fresh moments."
            )
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        optimizer.load_state_dict(state)
    ranks.barrier()


def load_value_head(module: ValueModule, path: str) -> None:
    """Takes the value head from the folder ``path`` where it has one; else the head stays at zero."""
    file = Path(path) / VALUE_HEAD_FILE
    if file.exists():
        head = load_file(file)
        with torch.no_grad():
            for name, parameter in module.value_head.named_parameters():
                parameter.copy_(head[_VALUE_HEAD + name])
