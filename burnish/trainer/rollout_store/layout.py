"""The files of a folder of responses: their names, what a line has, and how they get out of the way of a run that goes on."""

import re
from pathlib import Path

from burnish.utils import local_paths

SAMPLES_FOLDER = "rollouts"
"""In the run's folder, for the samples of every step where ``trainer.rollout_data_dir`` is not set."""
FIELDS = (
    "step", "uid", "sample_index", "data_source", "prompt", "response", "score", "valid", "trained", "ground_truth",
    "extra_info", "finish_reason", "num_tokens",
)  # fmt: skip
"""What every line has; the reward function's extras follow under their own names."""
NOTES = b"burnish"
"""Under this name the token file has, in JSON, what belongs to the step and not to a row."""
_EXTRA_PREFIX = "reward_extra/"


def texts_path(folder: str | Path, step: int) -> Path:
    """The file of a step's texts."""
    return local_paths.expanded(folder) / f"{step}.jsonl"


def tokens_path(folder: str | Path, step: int) -> Path:
    """The file of a step's tokens."""
    return local_paths.expanded(folder) / f"{step}.tokens.parquet"


def extra_field(name: str) -> str:
    """The name of a reward function's extra in a line: its own, or prefixed where every line has a field of that name."""
    return f"{_EXTRA_PREFIX}{name}" if name in FIELDS else name


def steps(folder: str | Path) -> list[int]:
    """The steps that a folder has responses of, in order; none where there is no such folder."""
    folder = local_paths.expanded(folder)
    if not local_paths.is_dir(folder):
        return []
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())


def set_aside(folder: str | Path, resumed_step: int) -> Path | None:
    """Moves the files of steps that a run is going to write again to ``set_aside.N/`` inside ``folder``.

    Args:
        resumed_step: the step that the run goes on from; 0: it starts afresh, and whatever is there is of another run.

    Returns:
        where they are now; None where there were none.
    """
    folder = local_paths.expanded(folder)
    if not folder.is_dir():
        return None
    later = [
        path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"(\d+)\.(jsonl|tokens\.parquet)", path.name))
        and (resumed_step == 0 or int(match[1]) > resumed_step)
    ]
    if not later:
        return None
    number = next(n for n in range(1, 1_000_000) if not (folder / f"set_aside.{n}").exists())
    target = folder / f"set_aside.{number}"
    target.mkdir()
    for path in later:
        path.rename(target / path.name)
    return target
