"""The optimizer's state in safetensors: each rank writes its own rows, and reads the rows that it needs from whoever wrote them.

``optimizer/shard_00000_of_00002.safetensors`` holds, of every trained parameter, the rows of one rank: its master, where
the model is saved in less precision, and each of its states. The header says which rows those are. So any number of ranks
goes on from what any number has written. Ranks that hold the same write it once.

A state that is not made of floating-point tensors in the parameter's shape (8-bit codes with a scale for every block of a rank's
part, say) is stored as the parts that the ranks hold, and only as many ranks go on from it.
"""

import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from burnish.engine.checkpoint.saving import Saving
from burnish.engine.checkpoint.tensor_file import Spec
from burnish.engine.optimizer import MasterOptimizer
from burnish.utils import progress
from burnish.utils.errors import CheckpointError

OPTIMIZER_FOLDER = "optimizer"
OLD_FILE = "optimizer.pt"
"""What this folder was before: the whole state in one file."""
_FORMAT = "burnish optimizer 1"
_MASTER = "master weight"
# How an entry of the header begins that stands for a tensor of the file.
_ROWS, _TENSOR = "rows", "tensor"
# What trains where nothing is said; old files leave it out.
_DEFAULT_KIND = "torch.optim.adamw.AdamW"
_FRESH = "or take 'optimizer' out of checkpoint.load_contents to go on with fresh moments."


def save_optimizer(optimizer: MasterOptimizer, saving: Saving | None) -> None:
    """This rank's rows of masters and states; all ranks call it.

    Args:
        saving: None on a rank whose rows another one writes.
    """
    in_parts = optimizer.in_parts()
    if saving is None:
        return
    layout, tensors = optimizer.layout, {}
    said: dict[str, Any] = {}
    for name, state in optimizer.states().items():
        master = optimizer.master(name)
        of_parameter: dict[str, Any] = {"shape": list(layout.whole_shape(name)), "row_range": list(layout.rows(name))}
        if master.dtype != layout.dtype:
            of_parameter[_MASTER] = _ROWS
            tensors[f"{name}/{_MASTER}"] = master
        if in_parts[name]:
            of_parameter["parts"] = _pack(optimizer.parts(name), f"{name}/parts", tensors)
        else:
            of_parameter["state"] = {key: _describe(f"{name}/{key}", value, tensors) for key, value in state.items()}
        said[name] = of_parameter
    index, count = layout.shard_index, layout.num_shards
    metadata = {
        "format": "pt",
        "written_by": _FORMAT,
        "optimizer": optimizer.kind,
        "shard": str(index),
        "num_shards": str(count),
        "parameters": json.dumps(said),
    }
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    saving.tensors(f"{OPTIMIZER_FOLDER}/{shard_file(index, count)}", specs, tensors.items(), metadata)


def shard_file(index: int, count: int) -> str:
    """The name of one rank's file."""
    return f"shard_{index:05d}_of_{count:05d}.safetensors"


def _describe(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return {"value": value}
    tensors[name] = value
    return _ROWS if value.ndim else _TENSOR


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON: its tensors go to ``tensors``, and stand in it under their names."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {"dict": {key: _pack(part, f"{name}/{key}", tensors) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_pack(part, f"{name}/{index}", tensors) for index, part in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"value": value}


def load_optimizer(optimizer: MasterOptimizer, folder: Path) -> None:
    """Continues from what `save_optimizer` wrote to the model's folder ``folder``, or an older burnish.

    One parameter after the other is read, this rank's rows alone, and replaces what the optimizer has: beside the optimizer
    there is never more than one parameter's state.

    Raises:
        CheckpointError: it is missing, incomplete or unreadable, of another model or optimizer, or in parts of another layout.
    """
    if not (folder / OPTIMIZER_FOLDER).is_dir():
        _load_old(optimizer, folder)
        return
    with OptimizerFiles(folder / OPTIMIZER_FOLDER) as files:
        _check_names(set(files.parameters), optimizer)
        if files.kind != _DEFAULT_KIND or any(files.has_state(name) for name in files.parameters):
            # An AdamW that has not stepped says nothing.
            _check_kind(files.kind, optimizer)
        for name in files.parameters:
            progress.tick()
            start, stop = optimizer.layout.rows(name)
            if files.shape(name) != optimizer.layout.whole_shape(name):
                raise CheckpointError(
                    f"The optimizer state in {folder} is of another model: {name!r} has shape {list(files.shape(name))} there "
                    f"and {list(optimizer.layout.whole_shape(name))} here."
                )
            if (master := files.master(name, start, stop)) is not None:
                optimizer.set_master(name, master)
            optimizer.restore(name, _my_state(files, name, optimizer, start, stop))
            progress.tick()
    optimizer.layout.publish_masters()


def _my_state(files: "OptimizerFiles", name: str, optimizer: MasterOptimizer, start: int, stop: int) -> dict[str, Any]:
    if not files.is_in_parts(name):
        return files.state(name, start, stop)
    count = optimizer.layout.num_shards
    if files.num_shards != count:
        raise _other_parts(optimizer.kind, files.num_shards, count)
    return files.part(name, optimizer.layout.shard_index)


def _check_names(names: set[str], optimizer: MasterOptimizer) -> None:
    differing = sorted(names ^ set(optimizer.states()))
    if differing:
        raise CheckpointError(f"The optimizer state is of another model: parameter {differing[0]!r} is in one only.")


def _check_kind(kind: str, optimizer: MasterOptimizer) -> None:
    if kind != optimizer.kind:
        raise CheckpointError(
            f"The optimizer state is of {kind}, and this run trains with {optimizer.kind}. Set optim.optimizer and "
            f"optim.optimizer_impl as they were, {_FRESH}"
        )


def _other_parts(kind: str, theirs: int, ours: int) -> CheckpointError:
    return CheckpointError(
        f"The state of {kind} was saved in {theirs} parts, one for each rank that shared the model, and here {ours} share it: "
        f"it is quantised in blocks of a rank's part and cannot be cut anew. Resume on as many ranks (with the same "
        f"fsdp_size), {_FRESH}"
    )


class OptimizerFiles:
    """The files that `save_optimizer` wrote, of all ranks together; tensors are read when they are asked for.

    Raises:
        CheckpointError: a file is missing, cut short, or no such file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = ExitStack()
        self._files: list[Any] = []
        self._said: list[dict[str, Any]] = []
        paths = sorted(folder.glob("shard_*_of_*.safetensors"))
        try:
            for path in paths:
                self._read_header(path)
        except BaseException:
            self._open.close()
            raise
        self.num_shards = len(self._files)
        if not paths:
            raise CheckpointError(f"{folder} holds no shard_*.safetensors: the optimizer's state is missing.")
        self.parameters = list(self._said[0])

    def _read_header(self, path: Path) -> None:
        try:
            file = self._open.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        said = file.metadata() or {}
        if said.get("written_by") != _FORMAT:
            raise CheckpointError(
                f"{path} cannot be read: it was written by {said.get('written_by', 'something else')!r}, and this burnish reads "
                f"{_FORMAT!r}."
            )
        expected = shard_file(len(self._files), int(said["num_shards"]))
        if path.name != expected:
            raise CheckpointError(f"{self.folder} is incomplete or mixed: {path.name} is there and {expected} is not.")
        self.kind = said["optimizer"]
        self._files.append(file)
        self._said.append(json.loads(said["parameters"]))
        if len(self._files) == 1:
            others = {shard_file(index, int(said["num_shards"])) for index in range(int(said["num_shards"]))}
            if missing := sorted(name for name in others if not (self.folder / name).is_file()):
                raise CheckpointError(f"{self.folder} is incomplete: {missing[0]} is missing.")

    def __enter__(self) -> "OptimizerFiles":
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.clear()
        self._open.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole parameter's."""
        return tuple(self._said[0][name]["shape"])

    def is_in_parts(self, name: str) -> bool:
        """Whether a parameter's state cannot be cut anew."""
        return "parts" in self._said[0][name]

    def has_state(self, name: str) -> bool:
        """Whether the optimizer had stepped."""
        return self.is_in_parts(name) or bool(self._said[0][name]["state"])

    def master(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows of a parameter's master; None where the model's own weights are that."""
        return self._rows(name, _MASTER, start, stop) if _MASTER in self._said[0][name] else None

    def state(self, name: str, start: int, stop: int) -> dict[str, Any]:
        """Rows of each state of a parameter, and numbers as they are."""
        found: dict[str, Any] = {}
        for key, what in self._said[0][name]["state"].items():
            if what == _ROWS:
                found[key] = self._rows(name, key, start, stop)
            else:
                found[key] = self._files[0].get_tensor(f"{name}/{key}") if what == _TENSOR else what["value"]
        return found

    def part(self, name: str, shard: int) -> dict[str, Any]:
        """What one rank held of a parameter's state."""
        found: dict[str, Any] = self._unpack(self._said[shard][name]["parts"], self._files[shard])
        return found

    def whole(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name of every parameter and its whole state with its master, or a list of its parts."""
        for name in self.parameters:
            stop = (self.shape(name) or (1,))[0]
            entry: dict[str, Any] = {}
            if (master := self.master(name, 0, stop)) is not None:
                entry[_MASTER] = master
            if self.is_in_parts(name):
                entry["parts"] = [self.part(name, shard) for shard in range(self.num_shards)]
            else:
                entry |= self.state(name, 0, stop)
            yield name, entry

    def _rows(self, name: str, key: str, start: int, stop: int) -> Tensor:
        pieces: list[Tensor] = []
        for file, said in zip(self._files, self._said, strict=True):
            first, end = said[name]["row_range"]
            begin, behind = max(start, first), min(stop, end)
            # Nobody's rows are somebody's: what they have of the shape and the dtype is needed.
            if begin < behind or (start == stop and not pieces):
                slices = file.get_slice(f"{name}/{key}")
                pieces.append(slices[max(0, begin - first) : max(0, behind - first)] if self.shape(name) else slices[:])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _unpack(self, packed: dict[str, Any], file: Any) -> Any:
        if _TENSOR in packed:
            return file.get_tensor(packed[_TENSOR])
        if "dict" in packed:
            return {key: self._unpack(part, file) for key, part in packed["dict"].items()}
        if "list" in packed:
            return [self._unpack(part, file) for part in packed["list"]]
        return getattr(torch, packed["dtype"]) if "dtype" in packed else packed["value"]


def read_optimizer(folder: Path | str) -> dict[str, dict[str, Any]]:
    """The whole state in the model's folder ``folder`` by parameter, whoever wrote it; for looking at it."""
    with OptimizerFiles(Path(folder) / OPTIMIZER_FOLDER) as files:
        return dict(files.whole())


def _load_old(optimizer: MasterOptimizer, folder: Path) -> None:
    """From the one file with the whole state that an older burnish wrote; it is mapped, not read as a whole."""
    file = folder / OLD_FILE
    if not file.exists():
        raise CheckpointError(
            f"{folder} has no folder {OPTIMIZER_FOLDER} with the optimizer's state. Take 'optimizer' out of "
            f"checkpoint.load_contents to go on with fresh moments."
        )
    try:
        state: dict[str, dict[str, Any]] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    layout = optimizer.layout
    _check_names(set(state), optimizer)
    for name in list(state):
        entry = state.pop(name)
        if "master" in entry:
            optimizer.set_master(name, layout.scatter(name, entry.pop("master")))
        kind = entry.pop("optimizer", _DEFAULT_KIND)
        # An AdamW that has not stepped says nothing.
        if entry or kind != _DEFAULT_KIND:
            _check_kind(kind, optimizer)
        if "parts" in entry:
            parts = entry["parts"]
            if len(parts) != layout.num_shards:
                raise _other_parts(optimizer.kind, len(parts), layout.num_shards)
            optimizer.restore(name, parts[layout.shard_index])
        else:
            shares = {k: layout.scatter(name, v) if isinstance(v, Tensor) and v.ndim else v for k, v in entry.items()}
            optimizer.restore(name, shares)
    layout.publish_masters()
