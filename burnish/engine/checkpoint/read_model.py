"""A model's weights back from a checkpoint, into masters and compute weights in place."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from burnish.engine import ranks
from burnish.engine.checkpoint.model_files import VALUE_HEAD_FILE, WEIGHTS_FILE, FileFormat, specs_of
from burnish.engine.layout import Layout, Module, copy_into_parameters, local_part, persistent_buffers
from burnish.engine.loading import on_rank_zero
from burnish.model import lora
from burnish.model.policy import ValueModule
from burnish.model.verl_shards import VerlWeights, as_value_function
from burnish.utils import progress
from burnish.utils.errors import CheckpointError, ModelError
from burnish.utils.model_folder import is_verl_folder

_INDEX = "model.safetensors.index.json"


def load_model(layout: Layout, folder: Path, build: Callable[[str], Module]) -> None:
    """Reads the model in ``folder``: each rank its own rows, where the files name the weights as the modules do.

    Elsewhere (the experts of some mixtures, a folder in another format) rank 0 builds the model and sends it.

    Raises:
        CheckpointError: a file is unreadable, or of another model.
        ModelError: so says who builds it.
    """
    error, alike = None, True
    try:
        with ExitStack() as stack:
            weights = _verl_weights(layout, folder) if is_verl_folder(str(folder)) else _stored_weights(folder, stack)
            alike = weights is not None and _are_alike(layout, weights)
            if weights is not None and alike:
                _read_rows(layout, weights, folder)
    except CheckpointError as caught:
        error = caught
    ranks.raise_everywhere(error)
    if not alike:
        one_rank = ranks.world_size() == 1
        source = build(str(folder)) if one_rank else on_rank_zero(lambda: build(str(folder)))
        copy_into_parameters(layout, source)


class _Weight(Protocol):
    """A weight in a file, of which rows can be read."""

    def get_shape(self) -> list[int]:
        """The whole one's."""
        ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class _WholeWeight:
    """A weight that is put together from its parts whenever it is read."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        self._weights = weights
        self._name = name

    def get_shape(self) -> list[int]:
        return list(self._weights[self._name].shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._weights[self._name][rows]


def _verl_weights(layout: Layout, folder: Path) -> dict[str, _Weight]:
    weights: Mapping[str, Tensor] = VerlWeights(folder)
    if isinstance(layout.module, ValueModule):
        weights = as_value_function(weights)
        if "value_head.weight" not in weights:
            raise CheckpointError(f"{folder} holds no critic: it has no score.weight.")
    return {name: _WholeWeight(weights, name) for name in weights}


def _stored_weights(folder: Path, stack: ExitStack) -> dict[str, _Weight] | None:
    """Every weight in a folder of safetensors; None where it is no such folder.

    Args:
        stack: closes the files.
    """
    try:
        if (folder / _INDEX).is_file():
            names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        elif (folder / WEIGHTS_FILE).is_file():
            names = [WEIGHTS_FILE]
        else:
            return None
        if (folder / VALUE_HEAD_FILE).is_file():
            names.append(VALUE_HEAD_FILE)
        found: dict[str, _Weight] = {}
        for name in names:
            file = stack.enter_context(safe_open(folder / name, "pt"))
            # A slice knows the shape of a tensor before any of it is read.
            found |= {weight: file.get_slice(weight) for weight in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be read: {error}") from error
    return found


def _are_alike(layout: Layout, weights: Mapping[str, _Weight]) -> bool:
    """Whether the files hold the weights of the modules, under their names."""
    specs = specs_of(layout)
    backbone = {name: spec for name, spec in specs.items() if not name.startswith("value_head.")}
    # A tied head may be there beside the embedding.
    more = set(weights) - set(specs) - {"lm_head.weight"}
    return not set(specs) - set(weights) and not more and FileFormat.of(layout.module.model, backbone).specs == backbone


@torch.no_grad()
def _read_rows(layout: Layout, weights: Mapping[str, _Weight], folder: Path) -> None:
    masters = layout.masters()
    try:
        for name, parameter in layout.module.named_parameters():
            label = name.removeprefix("model.")
            part = masters[name] if name in masters else local_part(parameter.detach())
            part.copy_(_rows(weights[label], label, layout.whole_shape(name), layout.rows(name)))
            progress.tick()
        for name, buffer in persistent_buffers(layout.module):
            label, shape = name.removeprefix("model."), tuple(buffer.shape)
            buffer.copy_(_rows(weights[label], label, shape, (0, (shape or (1,))[0])))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be read: {error}") from error
    layout.publish_masters()


def _rows(weight: _Weight, name: str, shape: tuple[int, ...], rows: tuple[int, int]) -> Tensor:
    if tuple(weight.get_shape()) != shape:
        raise CheckpointError(
            f"The checkpoint is of another model: {name!r} has shape {list(weight.get_shape())} there and {list(shape)} here."
        )
    return weight[rows[0] : rows[1]] if shape else weight[:]


@torch.no_grad()
def load_adapters(layout: Layout, path: Path) -> None:
    """Copies the adapters and the value head in ``path`` into masters and compute weights.

    Raises:
        CheckpointError: they are unreadable, or of other layers or another rank.
    """
    try:
        lora.check_same_scaling(path, layout.module.model)
        whole = lora.read_adapters(path, layout.module.model)
        if (path / VALUE_HEAD_FILE).exists():
            whole |= load_file(path / VALUE_HEAD_FILE)
    except (ModelError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
    for name, master in layout.masters().items():
        master.copy_(layout.scatter(name, whole[lora.hf_name(name).removeprefix("model.")]))
    layout.publish_masters()
