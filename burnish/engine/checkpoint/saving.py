"""The files of one save: written at once, or copied to CPU memory and written by a thread while training goes on."""

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from burnish.engine.checkpoint.tensor_file import Spec, write_tensors
from burnish.utils import progress
from burnish.utils.durable import sync_folder
from burnish.utils.errors import CheckpointError, DiskError

Job = Callable[[], None]


class HostMemory:
    """CPU memory for the copies of a save, kept from one save to the next: fresh memory costs more time than the copy."""

    def __init__(self, device: torch.device) -> None:
        # A device reaches pinned memory without a detour.
        self._is_pinned = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` under ``key``; it may still be on its way from the device."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Without the old one first: a shape changes only when another model is saved.
            self._buffers.pop(key, None)
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
            self._buffers[key] = buffer
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            # torch's own copy would let threads meet for every tensor, of which there are many small ones.
            ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            return buffer
        return buffer.copy_(tensor.detach(), non_blocking=self._is_pinned)

    @property
    def num_bytes(self) -> int:
        """Memory that is held between saves."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Saving:
    """What one save of this rank writes into a folder.

    A file that cannot be written is remembered and raises nothing here: what is saved may be gathered from other ranks, and all
    of them must go through it to the end. `error` tells.

    Args:
        root: the folder.
        memory: where copies lie until they are written; None writes at once.
    """

    def __init__(self, root: Path, memory: HostMemory | None) -> None:
        self.root = root
        self.jobs: list[Job] = []
        """What is left to write, in order."""
        self.error: Exception | None = None
        self._memory = memory
        self._folders: dict[Path, None] = {}

    def tensors(
        self, name: str, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
    ) -> None:
        """The safetensors file ``name`` of the folder; see `write_tensors`."""
        path = self.root / name
        if self._memory is not None:
            memory = self._memory
            copies = [(key, memory.copy(f"{name}/{key}", tensor)) for key, tensor in _with_progress(tensors)]
            self._do(path, partial(write_tensors, path, specs, copies, metadata))
            return
        rest = _with_progress(tensors)
        self._do(path, lambda: write_tensors(path, specs, rest, metadata))
        for _ in rest:
            # After an error the others still gather what is left.
            pass

    def text(self, name: str, text: str) -> None:
        """The text file ``name``."""
        path = self.root / name
        self._do(path, partial(_write_text, path, text))

    def small_files(self, name: str, write: Callable[[Path], object]) -> None:
        """Small files that ``write`` puts into the folder ``name`` of this one ("" is itself), at once in any case."""
        folder = self.root / name

        def write_now() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)

        self._now(write_now)
        self._do(folder / ".", partial(_sync_files, folder))

    def link(self, name: str, existing: str) -> None:
        """The file ``name`` with the content of ``existing``: the same file where the disk can do that, else a copy."""
        path, source = self.root / name, self.root / existing
        self._do(path, partial(_link, source, path))

    def end(self) -> None:
        """Waits until copies have arrived, and makes the folders' entries the last thing that is written."""
        if self._memory is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        for folder in sorted(self._folders, key=lambda each: -len(each.parts)):
            self._do(None, partial(sync_folder, folder))

    def _do(self, path: Path | None, job: Job) -> None:
        if path is not None:
            # A folder's own entry is in the one above.
            self._folders |= dict.fromkeys((path.parent, path.parent.parent))
            make = partial(path.parent.mkdir, parents=True, exist_ok=True)
            job = partial(_both, make, job)
        if self._memory is None:
            self._now(job)
        else:
            self.jobs.append(job)

    def _now(self, job: Job) -> None:
        if self.error is None:
            try:
                job()
            except OSError as error:
                self.error = error


class BackgroundWriter:
    """Writes the files of one save after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._root = Path()

    def start(self, saving: Saving) -> None:
        """Begins to write what ``saving`` has copied."""
        assert self._thread is None
        self._root = saving.root
        # A process that ends does not wait for it: without its last file the checkpoint is none.
        self._thread = threading.Thread(target=self._run, args=(saving.jobs,), name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self, jobs: list[Job]) -> None:
        try:
            for job in jobs:
                job()
        except Exception as error:  # noqa: BLE001  Whatever it is, `written` raises it in the thread that trains.
            self._error = error

    def written(self, *, wait: bool) -> bool:
        """Whether nothing is left to write.

        Raises:
            CheckpointError: a file could not be written. It is raised once.
        """
        if self._thread is None:
            return True
        if wait:
            self._thread.join()
        elif self._thread.is_alive():
            return False
        self._thread, error = None, self._error
        self._error = None
        if error is not None:
            raise write_error(self._root, error) from error
        return True


def write_error(root: Path, error: Exception) -> CheckpointError:
    """The sentence about a file that could not be written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free(root)
        left = "" if free is None else f" ({free / 2**20:,.0f} MiB are free)"
        return DiskError(
            f"{root} could not be written: the disk is full{left}. The checkpoints before are unharmed. Make room, or keep "
            f"fewer of them (trainer.max_actor_ckpt_to_keep), or save to another disk (trainer.default_local_dir)."
        )
    kind = DiskError if isinstance(error, OSError) else CheckpointError
    return kind(f"{root} could not be written: {type(error).__name__}: {error}. The checkpoints before are unharmed.")


def _free(root: Path) -> int | None:
    existing = next((folder for folder in (root, *root.parents) if folder.is_dir()), None)
    with suppress(OSError):
        return None if existing is None else shutil.disk_usage(existing).free
    return None


def _with_progress(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``tensors``, each of them a sign of life of a save that takes long."""
    for item in tensors:
        yield item
        progress.tick()


def _both(first: Job, second: Job) -> None:
    first()
    second()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_files(folder: Path) -> None:
    for file in _files_in(folder):
        _sync_file(file)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files_in(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.is_file() and file.suffix != ".safetensors")


def _link(source: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        # Not every file system has links.
        shutil.copyfile(source, path)
        _sync_file(path)
