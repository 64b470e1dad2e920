"""A model's folder as transformers reads it, written from a stream of its weights: no rank ever holds the whole model for it.

Of a model with adapters (LoRA) the folder holds the adapters in peft's format instead, and where the base came from: the base is
not trained, so it is written nowhere. `save_merged` writes both as one model. Beside either lies the value head of a critic.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from burnish.engine.checkpoint.saving import Saving
from burnish.engine.checkpoint.tensor_file import Spec
from burnish.engine.layout import Layout
from burnish.engine.weights_out import named_weights, weight_shapes
from burnish.model import lora
from burnish.model.policy import ValueModule
from burnish.model.verl_shards import VerlWeights, as_value_function
from burnish.utils import local_paths
from burnish.utils.model_folder import is_verl_folder

VALUE_HEAD_FILE = "value_head.safetensors"
HF_FOLDER = "huggingface"
"""Of the contents `hf_model`, in a model's folder."""
MAX_SHARD_BYTES = 5_000_000_000
WEIGHTS_FILE = "model.safetensors"
_VALUE_HEAD = "value_head."
_OF_TORCH = {"format": "pt"}

Stream = Iterable[tuple[str, Tensor]]
Specs = dict[str, Spec]


def save_model(layout: Layout, saving: Saving | None, folder: str = "") -> list[str]:
    """The model in the compute dtype, or its adapters in their masters' dtype, in the folder ``folder`` of what is saved.

    Args:
        saving: None on a rank that only takes part in the gathering.

    Returns:
        the names of the files with a whole model's weights, on the rank that writes them.
    """
    if lora.has_adapters(layout.module):
        _save_adapters(layout, saving, folder)
        return []
    stream = named_weights(layout)
    if saving is None:
        _go_through(stream)
        return []
    return _save_with_head(layout, saving, folder, specs_of(layout), stream, layout.dtype)


def save_model_again(layout: Layout, saving: Saving | None, folder: str, weights: list[str]) -> None:
    """What `save_model` wrote in the folder ``folder`` too, where the same files ``weights`` take no further room."""
    if saving is None:
        return
    saving.small_files(folder, lambda path: _write_configs(layout.module.model, path, layout.dtype))
    for name in weights:
        saving.link(f"{folder}/{name}", name)


def save_merged(layout: Layout, saving: Saving | None, folder: str, dtype: torch.dtype) -> None:
    """Base and adapters as one model in ``dtype``; the model itself stays as it is.

    The sum is made in at least float32: in half precision an adapter's small numbers would be rounded away in it.
    """
    masters = dict(_trained_masters(layout))
    stream = named_weights(layout)
    if saving is None:
        _go_through(stream)
        return
    specs = {name: Spec(dtype, spec.shape) for name, spec in specs_of(layout).items() if not lora.is_adapter_name(name)}
    merged = ((name, tensor.to(dtype)) for name, tensor in _merged(layout, stream, masters))
    _save_with_head(layout, saving, folder, specs, merged, dtype)


def specs_of(layout: Layout) -> Specs:
    """Of every weight by its Hugging Face name, in the order of `named_weights`."""
    return {name: Spec.of(tensor) for name, tensor in weight_shapes(layout)}


def _merged(layout: Layout, stream: Stream, masters: Mapping[str, Tensor]) -> Stream:
    layers = {f"{name}.weight": layer for name, layer in lora.adapter_layers(layout.module.model)}
    for name, base in stream:
        if lora.is_adapter_name(name):
            continue
        if name in layers:
            stem = name.removesuffix(".weight")
            a, b = (masters[f"{stem}.{part}.weight"] for part in ("lora_A", "lora_B"))
            yield name, lora.merged_weight(layers[name], base, a, b)
        else:
            yield name, masters.get(name, base)


def _trained_masters(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and whole master of every trained parameter; all ranks go through it."""
    for name, master in layout.masters().items():
        yield lora.hf_name(name).removeprefix("model."), layout.gather(name, master)


def _save_adapters(layout: Layout, saving: Saving | None, folder: str) -> None:
    if saving is None:
        _go_through(_trained_masters(layout))
        return
    model = layout.module.model
    specs = {
        lora.hf_name(name).removeprefix("model."): Spec(master.dtype, layout.whole_shape(name))
        for name, master in layout.masters().items()
    }
    # The head's few numbers come behind the adapters.
    heads: dict[str, Tensor] = {}
    saving.small_files(folder, lambda path: lora.write_config(model, path))
    adapters = {lora.FILE_PREFIX + name: spec for name, spec in specs.items() if not name.startswith(_VALUE_HEAD)}
    stream = ((lora.FILE_PREFIX + name, tensor) for name, tensor in _without_head(_trained_masters(layout), heads))
    saving.tensors(_in(folder, lora.WEIGHTS_FILE), adapters, stream, _OF_TORCH)
    _save_head(saving, folder, heads)


def _save_with_head(
    layout: Layout, saving: Saving, folder: str, specs: Specs, stream: Stream, dtype: torch.dtype
) -> list[str]:
    heads: dict[str, Tensor] = {}
    backbone = {name: spec for name, spec in specs.items() if not name.startswith(_VALUE_HEAD)}
    names = write_model(
        saving,
        folder,
        layout.module.model,
        backbone,
        _without_head(stream, heads),
        dtype=dtype,
        max_shard_bytes=MAX_SHARD_BYTES,
    )
    return names + _save_head(saving, folder, heads)


def _without_head(stream: Stream, heads: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """``stream`` without the value head, which goes to ``heads``."""
    for name, tensor in stream:
        if name.startswith(_VALUE_HEAD):
            heads[name] = tensor
        else:
            yield name, tensor


def _save_head(saving: Saving, folder: str, heads: dict[str, Tensor]) -> list[str]:
    if not heads:
        return []
    specs = {name: Spec.of(tensor) for name, tensor in heads.items()}
    saving.tensors(_in(folder, VALUE_HEAD_FILE), specs, heads.items(), {})
    return [VALUE_HEAD_FILE]


def write_model(
    saving: Saving,
    folder: str,
    model: PreTrainedModel,
    specs: Specs,
    stream: Stream,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> list[str]:
    """A whole model in Hugging Face format.

    Args:
        model: gives the configuration, and how its weights are called and shaped in files, which may differ from its modules
            (the experts of a mixture).
        specs: of every weight by its name in ``model``, in the order of ``stream``.
        stream: name and whole tensor of every weight.
        dtype: what the configuration says the weights have.
        max_shard_bytes: of a file; one larger tensor is a file of its own.

    Returns:
        the names of all files in ``folder``.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    specs = {name: spec for name, spec in specs.items() if name not in ignored}
    file_format = FileFormat.of(model, specs)
    shards = _cut(file_format.specs, max_shard_bytes)
    saving.small_files(folder, lambda path: _write_configs(model, path, dtype))
    rest = iter(file_format.convert((name, tensor) for name, tensor in stream if name not in ignored))
    names = []
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        saving.tensors(_in(folder, name), shard, islice(rest, len(shard)), _OF_TORCH)
        names.append(name)
    _go_through(rest)
    if len(shards) > 1:
        weight_map = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        size = sum(spec.nbytes for shard in shards for spec in shard.values())
        numbers = sum(torch.Size(spec.shape).numel() for shard in shards for spec in shard.values())
        index = {"metadata": {"total_parameters": numbers, "total_size": size}, "weight_map": weight_map}
        names.append(f"{WEIGHTS_FILE}.index.json")
        saving.text(_in(folder, names[-1]), json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


@dataclass(frozen=True)
class FileFormat:
    """How the weights of a model are called and shaped in its files.

    Attributes:
        specs: of what the files hold, in the order in which `convert` gives it.
        convert: makes a stream of the model's own weights one of what the files hold.
    """

    specs: Specs
    convert: Callable[[Stream], Stream]

    @classmethod
    def of(cls, model: PreTrainedModel, specs: Specs) -> "FileFormat":
        """That of ``model``, whose own weights are ``specs``, as transformers would save it."""

        def revert(weights: Stream) -> dict[str, Tensor]:
            return revert_weight_conversion(model, dict(weights))

        empty = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        whole = {name: Spec.of(tensor) for name, tensor in revert(empty.items()).items()}
        if whole == specs:
            return cls(specs, lambda stream: stream)

        def block_by_block(stream: Stream) -> Iterator[tuple[str, Tensor]]:
            for _, group in groupby(stream, key=lambda item: _block(item[0])):
                yield from revert(group).items()

        by_block = {name: Spec.of(tensor) for name, tensor in block_by_block(empty.items())}
        if by_block == whole:
            return cls(by_block, block_by_block)
        # A weight in the files needs weights of several blocks: all must be there at once.
        return cls(whole, lambda stream: revert((name, tensor.cpu()) for name, tensor in stream).items())


def _block(name: str) -> str:
    """The block that a weight is in, by the first number in its name; a weight outside of all is alone."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


def _cut(specs: Specs, max_shard_bytes: int) -> list[Specs]:
    shards: list[Specs] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    return shards


def _write_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """What transformers writes beside the weights: configuration, generation configuration, and code of the model's own."""
    for old in folder.glob("model*.safetensors*"):
        # Of a save into the same folder, perhaps in other shards.
        old.unlink()
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, str(folder), config=model.config)  # type: ignore[arg-type]
    model.config.save_pretrained(str(folder))
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))
    # transformers writes the dtype of the parameters it sees, which in the sharded layout are the masters.
    config_file = folder / "config.json"
    config: dict[str, Any] = json.loads(config_file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _go_through(stream: Iterable[Any]) -> None:
    for _ in stream:
        pass


def has_value_head(path: str) -> bool:
    """Whether the folder ``path`` holds a value head beside its model."""
    return (local_paths.expanded(path) / VALUE_HEAD_FILE).exists()


def load_value_head(module: ValueModule, path: str) -> None:
    """Takes the value head from the folder ``path`` where it has one; else the head stays at zero."""
    file = local_paths.expanded(path) / VALUE_HEAD_FILE
    head: dict[str, Tensor] = {}
    if is_verl_folder(path):
        head = as_value_function(VerlWeights(local_paths.expanded(path)))
    if file.exists():
        head = load_file(file)
    if _VALUE_HEAD + "weight" in head:
        with torch.no_grad():
            for name, parameter in module.value_head.named_parameters():
                parameter.copy_(head[_VALUE_HEAD + name])
