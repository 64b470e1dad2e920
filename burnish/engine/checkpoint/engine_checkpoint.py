"""The checkpoint of one engine: what is saved and loaded of what `checkpoint.save_contents` and `load_contents` name."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from burnish.engine import ranks
from burnish.engine.checkpoint.extra_files import EXTRA_FOLDER, ScheduleState, load_extra, save_extra, tell_other_rate
from burnish.engine.checkpoint.finite import non_finite
from burnish.engine.checkpoint.model_files import HF_FOLDER, save_merged, save_model, save_model_again
from burnish.engine.checkpoint.optimizer_files import OLD_FILE as OLD_OPTIMIZER_FILE
from burnish.engine.checkpoint.optimizer_files import load_optimizer, save_optimizer
from burnish.engine.checkpoint.read_model import load_adapters, load_model
from burnish.engine.checkpoint.saving import BackgroundWriter, HostMemory, Saving, write_error
from burnish.engine.checkpoint.verl import load_verl_optimizer
from burnish.engine.layout import Layout, Module
from burnish.engine.optimizer import MasterOptimizer
from burnish.engine.residence import Residence
from burnish.model import lora
from burnish.utils.errors import CheckpointError
from burnish.utils.model_folder import is_verl_folder

MODEL, OPTIMIZER, EXTRA, HF_MODEL = "model", "optimizer", "extra", "hf_model"


class EngineCheckpoint:
    """Saves and loads one engine's model, optimizer and generators; all ranks call every method together.

    Args:
        optimizer: None for a model that is only read.
        residence: brings to the device what lies elsewhere.
        build: the module at a path, whole on the CPU.
        device: where this rank computes.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: MasterOptimizer | None,
        residence: Residence,
        build: Callable[[str], Module],
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._residence = residence
        self._build = build
        self._device = device
        self._memory = HostMemory(device)
        self._writer = BackgroundWriter()

    def save(self, path: Path, contents: Sequence[str], *, blocking: bool) -> None:
        """Writes ``contents`` to the folder ``path``.

        Args:
            blocking: False returns when everything is copied to the CPU, and a thread writes it; `written` tells when it has.

        Raises:
            CheckpointError: something is not finite, or cannot be written; on every rank alike. Without ``blocking`` what cannot
                be written is raised by `written`. An error of the save before is raised here if nobody has asked for it.
        """
        ranks.raise_everywhere(_error_of(lambda: self._writer.written(wait=True)))
        broken = self.non_finite()
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise CheckpointError(
                f"{path} was not written: {broken[0]!r}{more} of the model or its optimizer holds NaN or infinity. "
                f"The checkpoint before is unharmed; resume from it with a lower learning rate."
            )
        saving = Saving(path, None if blocking else self._memory)
        with self._residence.everything():
            self._write(saving, contents)
            saving.end()
        ranks.raise_everywhere(None if saving.error is None else write_error(path, saving.error))
        if not blocking:
            self._writer.start(saving)

    def _write(self, saving: Saving, contents: Sequence[str]) -> None:
        layout, optimizer = self._layout, self._optimizer
        of_model = saving if ranks.rank() == 0 else None
        weights: list[str] = []
        if MODEL in contents:
            weights = save_model(layout, of_model)
        if HF_MODEL in contents:
            if lora.has_adapters(layout.module):
                save_merged(layout, of_model, HF_FOLDER, layout.dtype)
            elif MODEL in contents:
                save_model_again(layout, of_model, HF_FOLDER, weights)
            else:
                save_model(layout, of_model, HF_FOLDER)
        if OPTIMIZER in contents and optimizer is not None:
            # Copies of the model have the same state: one of them writes it.
            save_optimizer(optimizer, saving if layout.copy_index == 0 else None)
        if EXTRA in contents:
            schedule = None if optimizer is None else ScheduleState(optimizer.last_step, optimizer.last_rate)
            save_extra(saving, self._device, schedule)

    def written(self, *, wait: bool) -> bool:
        """Whether this rank has nothing left to write.

        Raises:
            CheckpointError: a file of the last save could not be written by this rank.
        """
        return self._writer.written(wait=wait)

    def export_merged(self, path: Path) -> None:
        """Writes base and adapters as one model in Hugging Face format, in at least float32.

        Raises:
            CheckpointError: it cannot be written.
        """
        saving = Saving(path, None)
        with self._residence.everything():
            dtype = torch.promote_types(self._layout.dtype, torch.float32)
            save_merged(self._layout, saving if ranks.rank() == 0 else None, "", dtype)
            saving.end()
        ranks.raise_everywhere(None if saving.error is None else write_error(path, saving.error))

    def non_finite(self) -> list[str]:
        """Names of what holds NaN or infinity on any rank, the same on every rank."""
        with self._residence.everything():
            return non_finite(self._layout, self._optimizer, self._device)

    def load(self, path: Path, contents: Sequence[str]) -> None:
        """Continues from ``contents`` of the folder ``path``, in place, whatever layout and ranks wrote it.

        Raises:
            CheckpointError: one of them is missing, unreadable or of another model; on every rank alike.
        """
        has_adapters = lora.has_adapters(self._layout.module)
        ranks.raise_everywhere(_error_of(lambda: check_folder(path, has_adapters, contents)))
        folder = path if MODEL in contents else path / HF_FOLDER if HF_MODEL in contents else None
        with self._residence.everything():
            if folder is not None and has_adapters:
                ranks.raise_everywhere(_error_of(lambda: load_adapters(self._layout, path)))
            elif folder is not None:
                load_model(self._layout, folder, self._build)
            ranks.raise_everywhere(_error_of(lambda: self._load_others(path, contents)))
            self._residence.note_change()

    def _load_others(self, path: Path, contents: Sequence[str]) -> None:
        """What each rank reads by itself."""
        if is_verl_folder(str(path)):
            if OPTIMIZER in contents and self._optimizer is not None:
                load_verl_optimizer(self._optimizer, path)
            return
        if OPTIMIZER in contents and self._optimizer is not None:
            load_optimizer(self._optimizer, path)
        # Before there was this folder the optimizer was in one file.
        if EXTRA in contents and ((path / EXTRA_FOLDER).is_dir() or not (path / OLD_OPTIMIZER_FILE).exists()):
            saved = load_extra(path, self._device)
            if saved is not None and self._optimizer is not None:
                tell_other_rate(saved, self._optimizer.rate_at(saved.step), path)
                self._optimizer.last_step, self._optimizer.last_rate = saved.step, saved.lr


def check_folder(path: Path, has_adapters: bool, contents: Sequence[str] = (MODEL,)) -> None:
    """Makes sure that ``path`` holds the model of ``contents``, for a run with or without adapters.

    Raises:
        CheckpointError: it is no checkpoint, or one of the other kind.
    """
    if MODEL not in contents:
        if HF_MODEL in contents and not (path / HF_FOLDER / "config.json").exists():
            raise CheckpointError(
                f"{path} has no folder {HF_FOLDER} with a model: it was saved without 'hf_model' in checkpoint.save_contents. "
                f"Load 'model' instead (checkpoint.load_contents)."
            )
        if HF_MODEL in contents and has_adapters:
            raise CheckpointError(
                f"{path / HF_FOLDER} holds base and adapters as one model, from which no adapter can be trained on. Load 'model' "
                f"instead (checkpoint.load_contents)."
            )
        return
    if is_verl_folder(str(path)) and not has_adapters:
        return
    holds_adapters = (path / lora.CONFIG_FILE).exists()
    if not holds_adapters and not (path / "config.json").exists():
        hint = ""
        if (path / HF_FOLDER / "config.json").exists():
            hint = f" Its folder {HF_FOLDER} holds one: load 'hf_model' instead of 'model' (checkpoint.load_contents)."
        raise CheckpointError(f"{path} is no checkpoint of a model: it has no config.json.{hint}")
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


def _error_of(do: Callable[[], object]) -> CheckpointError | None:
    try:
        do()
    except CheckpointError as error:
        return error
    return None
