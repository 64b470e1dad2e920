"""What else a rank goes on with: its random number generators, and its place in the learning-rate schedule.

``extra/rank_00000_of_00002.json`` holds the states of torch's generators (CPU, and the device's), numpy's and Python's. What
burnish itself draws is a function of names (a prompt, a position, a seed) and needs none of them; a reward function, a
model's own code or a plugin may draw from them.
"""

import base64
import json
import logging
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine import ranks
from burnish.engine.checkpoint.saving import Saving
from burnish.utils.errors import CheckpointError

logger = logging.getLogger("burnish.engine")

EXTRA_FOLDER = "extra"


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """Where an engine is in its schedule: the trainer's step of the last update, 0 before the first, and its rate."""

    step: int
    lr: float


def save_extra(saving: Saving, device: torch.device, schedule: ScheduleState | None) -> None:
    """This rank's generators, and the schedule where the model is trained."""
    said: dict[str, Any] = {"rng": rng_state(device)}
    if schedule is not None:
        said["schedule"] = {"step": schedule.step, "lr": schedule.lr}
    saving.text(f"{EXTRA_FOLDER}/{_file(ranks.rank(), ranks.world_size())}", json.dumps(said) + "\n")


def load_extra(folder: Path, device: torch.device) -> ScheduleState | None:
    """Puts this rank's generators where they were when the model's folder ``folder`` was saved, and gives its place then.

    Other numbers of ranks have no generators in common: theirs stay as they are, which is said.

    Raises:
        CheckpointError: there are no such files, or they are unreadable.
    """
    files = sorted((folder / EXTRA_FOLDER).glob("rank_*_of_*.json"))
    if not files:
        raise CheckpointError(
            f"{folder} has no folder {EXTRA_FOLDER} with the states of random number generators. Take 'extra' out of "
            f"checkpoint.load_contents to go on with those of this process."
        )
    mine = folder / EXTRA_FOLDER / _file(ranks.rank(), ranks.world_size())
    read = _read(mine if mine in files else files[0])
    if mine in files:
        try:
            set_rng_state(read["rng"], device)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{mine} cannot be read: {type(error).__name__}: {error}") from error
    elif ranks.rank() == 0:
        logger.warning(
            "%s was saved by another number of ranks (%s) than the %d of this run, so the states of the random number "
            "generators are not taken over. Nothing that burnish draws depends on them; your own code may.",
            *(folder, files[0].stem, ranks.world_size()),
        )
    schedule = read.get("schedule")
    return None if schedule is None else ScheduleState(int(schedule["step"]), float(schedule["lr"]))


def tell_other_rate(saved: ScheduleState | None, lr_now: float | None, where: Path) -> None:
    """Says that the schedule at the place that was saved is another one than when it was saved.

    Args:
        lr_now: the rate that this run's schedule has at the saved step.
    """
    if saved is None or lr_now is None or saved.step == 0 or ranks.rank() != 0:
        return
    if not math.isclose(saved.lr, lr_now, rel_tol=1e-9):
        logger.warning(
            "%s was saved with a learning rate of %.6g at step %d, and the schedule of this run has %.6g there: optim.lr, its "
            "schedule or the number of steps differ. The run goes on with its own.",
            *(where, saved.lr, saved.step, lr_now),
        )


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of all global generators of this process, and of ``device``, in JSON's types."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts the generators where `rng_state` found them; a device's only where this process has one."""
    torch.set_rng_state(_tensor(state["torch"]))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _file(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return read
