"""Checkpoints of a run: ``<default_local_dir>/global_step_N/{actor,critic,trainer_state.json}``.

A checkpoint is written under a temporary name and renamed when complete, the tracker file last, so that a run that dies while
saving leaves the previous checkpoint as it was.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.config import TrainerConfig
from burnish.utils.errors import CheckpointError

logger = logging.getLogger("burnish.trainer")

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "trainer_state.json"


class CheckpointManager:
    """Finds, writes and prunes the checkpoints of one run."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.root = Path(config.default_local_dir).expanduser().absolute()

    @contextmanager
    def writing(self, step: int) -> Iterator[str]:
        """A folder to write checkpoint ``step`` into; it gets its final name when the block ends without an error.

        An error in the block removes the folder and leaves every other checkpoint, and which is the last, as they were.
        """
        final = self.root / f"global_step_{step}"
        temporary = self.root / f"tmp_global_step_{step}"
        # Also what a run that died while saving has left.
        for left_over in self.root.glob("tmp_global_step_*"):
            shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
        try:
            yield str(temporary)
        except BaseException:
            # Other ranks may still be writing; what they leave is removed before the next checkpoint.
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if final.exists():
            # Out of the way, not gone, until the new one has its name.
            final.rename(self.root / f"tmp_global_step_{step}_old")
        temporary.rename(final)
        shutil.rmtree(self.root / f"tmp_global_step_{step}_old", ignore_errors=True)
        tracker = self.root / f"{TRACKER}.tmp"
        tracker.write_text(str(step))
        os.replace(tracker, self.root / TRACKER)
        self._prune(step)

    def write_state(self, folder: str, state: dict[str, Any]) -> None:
        """The trainer's own state: step, position in the data, KL coefficient."""
        (Path(folder) / STATE).write_text(json.dumps(state))

    def read_state(self, folder: str) -> dict[str, Any]:
        file = Path(folder) / STATE
        try:
            state = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(
                f"{file} cannot be read: {error}. Remove {folder} to resume from the one before."
            ) from error
        return state

    def find(self) -> str | None:
        """The checkpoint to resume from by ``trainer.resume_mode``, or None to start afresh.

        Raises:
            CheckpointError: ``resume_path`` or ``must`` without a complete checkpoint there.
        """
        mode = self.config.resume_mode
        if mode == "disable":
            return None
        if mode == "resume_path":
            path = Path(str(self.config.resume_from_path)).expanduser().absolute()
            if not (path / STATE).is_file():
                raise CheckpointError(
                    f"trainer.resume_from_path={path}: no complete checkpoint there ({STATE} is missing). "
                    "Name a folder global_step_N that a run has written."
                )
            return str(path)
        complete = self._complete()
        if complete:
            # The one written last, which is not the highest number where the folder holds those of an older run too.
            step = self._last_written()
            newest = complete[step] if step in complete else complete[max(complete)]
            logger.info("Resuming from %s.", newest)
            return str(newest)
        if mode == "must":
            raise CheckpointError(f"trainer.resume_mode=must, but {self.root} holds no complete checkpoint.")
        return None

    def _last_written(self) -> int | None:
        tracker = self.root / TRACKER
        text = tracker.read_text().strip() if tracker.is_file() else ""
        return int(text) if text.isdigit() else None

    def _complete(self) -> dict[int, Path]:
        """Complete checkpoints by step."""
        found = {}
        for path in self.root.glob("global_step_*"):
            match = re.fullmatch(r"global_step_(\d+)", path.name)
            if match and (path / STATE).is_file():
                found[int(match.group(1))] = path
            elif match:
                logger.warning("Passing over %s: it is no complete checkpoint (%s is missing).", path, STATE)
        return found

    def _prune(self, written: int) -> None:
        """Keeps the newest up to step ``written``; higher numbers are of another run in this folder and not ours to delete."""
        keep = self.config.max_actor_ckpt_to_keep
        if keep:
            complete = self._complete()
            for step in sorted(step for step in complete if step <= written)[:-keep]:
                shutil.rmtree(complete[step])
