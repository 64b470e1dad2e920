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
        """A folder to write checkpoint ``step`` into; it gets its final name when the block ends without an error."""
        final = self.root / f"global_step_{step}"
        temporary = self.root / f"tmp_global_step_{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield str(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        tracker = self.root / f"{TRACKER}.tmp"
        tracker.write_text(str(step))
        os.replace(tracker, self.root / TRACKER)
        self._prune()

    def write_state(self, folder: str, state: dict[str, Any]) -> None:
        """The trainer's own state: step, position in the data, KL coefficient."""
        (Path(folder) / STATE).write_text(json.dumps(state))

    def read_state(self, folder: str) -> dict[str, Any]:
        return json.loads((Path(folder) / STATE).read_text())

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
            logger.info("Resuming from %s.", complete[-1])
            return str(complete[-1])
        if mode == "must":
            raise CheckpointError(f"trainer.resume_mode=must, but {self.root} holds no complete checkpoint.")
        return None

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = {}
        for path in self.root.glob("global_step_*"):
            match = re.fullmatch(r"global_step_(\d+)", path.name)
            if match and (path / STATE).is_file():
                found[int(match.group(1))] = path
            elif match:
                logger.warning("Passing over %s: it is no complete checkpoint (%s is missing).", path, STATE)
        return [found[step] for step in sorted(found)]

    def _prune(self) -> None:
        keep = self.config.max_actor_ckpt_to_keep
        if keep:
            for path in self._complete()[:-keep]:
                shutil.rmtree(path)
