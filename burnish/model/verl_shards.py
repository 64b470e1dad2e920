"""Weights in the folder of a role in a checkpoint of verl's FSDP workers: ``model_world_size_W_rank_r.pt`` and ``huggingface/``.

Each file is a pickled state dict whose tensors are the rank's parts (DTensors). They are read by torch's unpickler that makes
tensors alone, with the classes that a DTensor is made of, so that a file cannot run code. Files are mapped into memory and put
together weight by weight.
"""

import logging
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec

from burnish.utils import local_paths
from burnish.utils.errors import CheckpointError
from burnish.utils.model_folder import VERL_MODEL_FILES, is_verl_folder

# Wrappers that leave their name in those of the weights.
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_OLD_MODULE = "torch.distributed._tensor"


def _allowed() -> list[Any]:
    """What DTensors are made of, also under the names that they had in torch 2.4 and before."""
    classes: list[Any] = [DTensor, DeviceMesh, Shard, Replicate]
    # ShardOrderEntry is there since torch 2.10.
    inner = ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    classes += [getattr(dtensor_spec, name) for name in inner if hasattr(dtensor_spec, name)]
    old = [
        (DTensor, f"{_OLD_MODULE}.api.DTensor"),
        (dtensor_spec.DTensorSpec, f"{_OLD_MODULE}._dtensor_spec.DTensorSpec"),
        (dtensor_spec.TensorMeta, f"{_OLD_MODULE}._dtensor_spec.TensorMeta"),
        (Shard, f"{_OLD_MODULE}.placement_types.Shard"),
        (Replicate, f"{_OLD_MODULE}.placement_types.Replicate"),
        # torch 2.3 and before.
        (dtensor_spec.DTensorSpec, f"{_OLD_MODULE}.placement_types.DTensorSpec"),
        (dtensor_spec.TensorMeta, f"{_OLD_MODULE}.placement_types.TensorMeta"),
    ]
    return [*classes, *old]


class VerlWeights(Mapping[str, Tensor]):
    """The whole weights in the folder ``path`` by name; each is put together when it is asked for.

    Raises:
        CheckpointError: a file is missing or unreadable, is of FSDP1 (ShardedTensor), or holds adapters.
    """

    def __init__(self, path: Path) -> None:
        shards = []
        for read in read_verl_files(path, "model"):
            if not isinstance(read, dict) or not all(isinstance(value, Tensor) for value in read.values()):
                raise CheckpointError(f"{path}: its {VERL_MODEL_FILES} hold no weights by name.")
            shards.append({_plain_name(name): tensor for name, tensor in read.items()})
        self._shards = shards
        if any(".lora_A." in name for name in shards[0]):
            raise CheckpointError(
                f"{path} holds a model with adapters. Start from its base, with lora_adapter_path={path / 'lora_adapter'}."
            )

    def __getitem__(self, name: str) -> Tensor:
        return join_parts([shard[name] for shard in self._shards], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards[0])

    def __len__(self) -> int:
        return len(self._shards[0])


def load_verl_model(path: Path | str) -> dict[str, Tensor]:
    """All weights in verl's folder ``path`` (``.../global_step_N/actor``) by name, whole, in the dtype of the files.

    Raises:
        CheckpointError: see `VerlWeights`.
    """
    folder = local_paths.expanded(path)
    if not is_verl_folder(str(folder)):
        raise CheckpointError(f"{folder} holds no {VERL_MODEL_FILES}, as verl's FSDP workers write them.")
    return dict(VerlWeights(folder))


def as_value_function(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of verl's critic, a token classifier with one label, by the names of a backbone and its value head."""
    named = {}
    for name, tensor in weights.items():
        head = name.removeprefix("score.")
        named[name.removeprefix("model.") if head == name else f"value_head.{head}"] = tensor
    return named


def join_parts(parts: Sequence[Tensor], name: str) -> Tensor:
    """The whole of what each rank holds of ``name``, given rank by rank.

    Raises:
        CheckpointError: it is split in a way that is not known here, or a part is missing.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        # Whole on every rank, as buffers are.
        return first
    if any(type(placement) not in (Shard, Replicate) for placement in first.placements):
        raise CheckpointError(f"{name!r} is placed as {first.placements}, which burnish does not put together.")
    axes = [axis for axis, placement in enumerate(first.placements) if isinstance(placement, Shard)]
    if len(axes) > 1:
        raise CheckpointError(f"{name!r} is split along {len(axes)} axes, which burnish does not put together.")
    if not axes:
        return first.to_local()
    mesh, placement = first.device_mesh.mesh, first.placements[axes[0]]
    # Of ranks with the same part the first.
    holders: list[int] = mesh.movedim(axes[0], 0).reshape(mesh.shape[axes[0]], -1)[:, 0].tolist()
    whole = torch.cat([parts[rank].to_local() for rank in holders], placement.dim)  # type: ignore[attr-defined]
    if whole.shape != first.shape:
        raise CheckpointError(
            f"The parts of {name!r} make {list(whole.shape)}, and {list(first.shape)} is said of them."
        )
    return whole


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def read_verl_files(path: Path, kind: str) -> list[Any]:
    """What each rank has saved in the folder ``path`` as ``<kind>_world_size_W_rank_r.pt``, rank by rank; tensors are mapped.

    Raises:
        CheckpointError: a file is missing or unreadable, or would have to run code.
    """
    found: dict[int, Path] = {}
    world_sizes = set()
    for file in path.iterdir():
        if match := re.fullmatch(rf"{kind}_world_size_(\d+)_rank_(\d+)\.pt", file.name):
            world_sizes.add(int(match.group(1)))
            found[int(match.group(2))] = file
    if len(world_sizes) != 1:
        raise CheckpointError(
            f"{path} holds {kind}_world_size_*_rank_*.pt of {len(world_sizes)} numbers of ranks, and one is expected."
        )
    (world_size,) = world_sizes
    if missing := sorted(set(range(world_size)) - set(found)):
        raise CheckpointError(f"{path} is incomplete: {kind}_world_size_{world_size}_rank_{missing[0]}.pt is missing.")
    return [_read(found[rank]) for rank in range(world_size)]


def _read(file: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_allowed()), _quiet_meshes():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if "ShardedTensor" in str(error) or "_shard" in str(error):
            raise CheckpointError(
                f"{file} holds ShardedTensors, as FSDP1 wrote them in older releases: only the ranks of such a run can read "
                f"them. Convert the folder with verl's own tool (python -m verl.model_merger merge --backend fsdp), or save "
                f"again with actor.strategy=fsdp2."
            ) from error
        raise CheckpointError(f"{file} cannot be read without running code of its own: {error}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Meshes of ranks that are no more warn that they cannot be used, which nobody wants to."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
