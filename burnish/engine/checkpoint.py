"""A model's folder: Hugging Face format, beside it the value head and the whole optimizer state.

Of a model with adapters (LoRA) the folder holds the adapters in peft's format instead, and where the base came from: the base is
not trained, so it is written nowhere. `export_merged` writes both as one model.

Everything is stored whole, so a folder written by two ranks is read by one and the other way round.
"""

import json
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.engine import ranks
from burnish.engine.layout import Layout, copy_into_parameters, local_parts
from burnish.engine.optimizer import MasterOptimizer
from burnish.engine.weights_out import named_weights
from burnish.model import lora
from burnish.model.policy import ValueModule
from burnish.utils.errors import CheckpointError, ModelError

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
        finite = torch.stack([value.double().to(device) for value in largest]).isfinite().tolist()
        broken |= {name: float(not is_finite) for name, is_finite in zip(held, finite, strict=True)}
    anywhere = ranks.all_reduce_numbers(list(broken.values()), "max", device)
    return [name for name, flag in zip(broken, anywhere, strict=True) if flag]


def save(layout: Layout, optimizer: MasterOptimizer | None, path: Path, contents: Sequence[str]) -> None:
    """Writes the parts named in ``contents`` to the folder ``path``; rank 0 writes, all ranks gather."""
    writes = ranks.rank() == 0
    if "model" in contents and lora.has_adapters(layout.module):
        masters = {}
        for name, tensor in _trained_masters(layout):
            if writes:
                masters[name] = tensor.cpu()
        if writes:
            _write_adapters(layout, masters, path)
    elif "model" in contents:
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


def _trained_masters(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and whole master of every trained parameter; all ranks go through it."""
    for name, master in layout.masters().items():
        yield lora.hf_name(name).removeprefix("model."), layout.gather(name, master)


def _write_adapters(layout: Layout, masters: dict[str, Tensor], path: Path) -> None:
    head = {name: tensor.contiguous() for name, tensor in masters.items() if name.startswith(_VALUE_HEAD)}
    adapters = {name: tensor for name, tensor in masters.items() if not name.startswith(_VALUE_HEAD)}
    lora.save_adapters(layout.module.model, adapters, path)
    if head:
        save_file(head, path / VALUE_HEAD_FILE)


def export_merged(layout: Layout, path: Path) -> None:
    """Writes base and adapters as one model in Hugging Face format, in at least float32; rank 0 writes, all ranks gather.

    The sum is made beside the model, whose own weights stay as they are. In the compute dtype an adapter's small numbers
    would be rounded away in it.
    """
    writes = ranks.rank() == 0
    dtype = torch.promote_types(layout.dtype, torch.float32)
    masters = {name: tensor.cpu() for name, tensor in _trained_masters(layout)}
    layers = {f"{name}.weight": layer for name, layer in lora.adapter_layers(layout.module.model)}
    weights = {}
    for name, tensor in named_weights(layout):
        if not writes or lora.is_adapter_name(name):
            continue
        base = tensor.cpu().to(dtype)
        if name in layers:
            stem = name.removesuffix(".weight")
            a, b = (masters[f"{stem}.{part}.weight"] for part in ("lora_A", "lora_B"))
            base = lora.merged_weight(layers[name], base, a, b)
        weights[name] = masters.get(name, base)
    if writes:
        path.mkdir(parents=True, exist_ok=True)
        _write_model(layout, weights, path, dtype)
    ranks.barrier()


def _write_model(layout: Layout, weights: dict[str, Tensor], path: Path, dtype: torch.dtype | None = None) -> None:
    head = {name: tensor.contiguous() for name, tensor in weights.items() if name.startswith(_VALUE_HEAD)}
    backbone = {name: tensor for name, tensor in weights.items() if not name.startswith(_VALUE_HEAD)}
    layout.module.model.save_pretrained(path, state_dict=backbone)
    if head:
        save_file(head, path / VALUE_HEAD_FILE)
    # transformers writes the dtype of the parameters it sees, which in the sharded layout are the masters.
    config_file = path / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = str(dtype or layout.dtype).removeprefix("torch.")
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
        source: the module at ``path``, whole on the CPU in the master dtype, on rank 0; None on the others, and when the
            model is not wanted or has adapters, which are read from ``path`` here.

    Raises:
        CheckpointError: the optimizer state is missing, unreadable or of another model.
    """
    if "model" in contents and lora.has_adapters(layout.module):
        _load_adapters(layout, path)
    elif "model" in contents:
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


def check_folder(path: Path, has_adapters: bool) -> None:
    """Makes sure that ``path`` holds what a run with or without adapters goes on from.

    Raises:
        CheckpointError: it is no checkpoint, or one of the other kind.
    """
    holds_adapters = (path / lora.CONFIG_FILE).exists()
    if not holds_adapters and not (path / "config.json").exists():
        raise CheckpointError(f"{path} is no checkpoint of a model: it has no config.json.")
    if holds_adapters and not has_adapters:
        raise CheckpointError(
            f"{path} holds an adapter ({lora.CONFIG_FILE}), but this run trains the whole model. Set model.lora_rank as in "
            f"the run that wrote it."
        )
    if has_adapters and not holds_adapters:
        raise CheckpointError(
            f"{path} holds a whole model, but this run trains an adapter (lora_rank, lora_adapter_path). To train one on top "
            f"of that model, start with model.path={path} instead of resuming."
        )


@torch.no_grad()
def _load_adapters(layout: Layout, path: Path) -> None:
    """Copies the adapters and the value head in ``path`` into masters and compute weights."""
    try:
        lora.check_same_scaling(path, layout.module.model)
        whole = lora.read_adapters(path, layout.module.model)
    except ModelError as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
    if (path / VALUE_HEAD_FILE).exists():
        whole |= load_file(path / VALUE_HEAD_FILE)
    for name, master in layout.masters().items():
        master.copy_(layout.scatter(name, whole[lora.hf_name(name).removeprefix("model.")]))
    layout.publish_masters()


def has_value_head(path: str) -> bool:
    """Whether the folder ``path`` holds a value head beside its model."""
    return (Path(path).expanduser() / VALUE_HEAD_FILE).exists()


def load_value_head(module: ValueModule, path: str) -> None:
    """Takes the value head from the folder ``path`` where it has one; else the head stays at zero."""
    file = Path(path) / VALUE_HEAD_FILE
    if file.exists():
        head = load_file(file)
        with torch.no_grad():
            for name, parameter in module.value_head.named_parameters():
                parameter.copy_(head[_VALUE_HEAD + name])
