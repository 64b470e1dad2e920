"""``manifest.json``: what a checkpoint consists of. It is written last, so a folder whose files it lists is complete."""

import json
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from burnish.utils.durable import files_below, write_durably
from burnish.utils.errors import CheckpointError
from burnish.utils.model_folder import is_verl_folder

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without opening its files.

    Attributes:
        step: the trainer's step whose result it holds.
        world_size: workers of the policy that wrote it.
        run: the run that wrote it; None is not known.
        files: bytes of each file, by its name relative to the folder.
        metrics: numbers of the validation, to choose the best checkpoint by.
        without: parts that were removed later ("critic").
        is_left: the run went on from an earlier checkpoint, and got somewhere else since.
    """

    step: int
    world_size: int = 1
    run: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    is_left: bool = False

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes what ``manifest`` says; where that lists no files yet, with those below ``folder``. Durable when it returns.

    Parts that it is ``without`` are not listed, though they may still be there.

    Raises:
        OSError: the disk did not take it.
    """
    # Once and for all: what comes into the folder later, as half a manifest of a killed run, is no part of the checkpoint.
    files = manifest.files or _files_of(folder)
    listed = {name: size for name, size in files.items() if Path(name).parts[0] not in (MANIFEST, *manifest.without)}
    written = {
        "format": FORMAT,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "run": manifest.run,
        "burnish": _version(),
        "time": time.time(),
        "files": listed,
        "metrics": manifest.metrics,
        **({"without": list(manifest.without)} if manifest.without else {}),
        **({"left": True} if manifest.is_left else {}),
    }
    write_durably(folder / MANIFEST, json.dumps(written, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint says of itself; of one from before there were manifests, its files as they are.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = folder / MANIFEST
    if not file.exists():
        return Manifest(step=int(read_state_file(folder)["global_steps"]), files=_files_of(folder))
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        if read["format"] > FORMAT:
            raise CheckpointError(
                f"{file} has the format {read['format']}, of a newer burnish ({read.get('burnish')}). Install that."
            )
        return Manifest(
            step=int(read["step"]),
            world_size=int(read["world_size"]),
            run=read.get("run"),
            files={str(name): int(size) for name, size in read["files"].items()},
            metrics=dict(read.get("metrics") or {}),
            without=tuple(read.get("without", ())),
            is_left=bool(read.get("left")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}.") from error


def read_state_file(folder: Path) -> dict[str, Any]:
    """``trainer_state.json`` as it is written.

    Raises:
        CheckpointError: it is missing or no JSON.
    """
    file = folder / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. Remove {folder} to resume from the one before."
        ) from error
    if not isinstance(state, dict) or "global_steps" not in state:
        raise CheckpointError(f"{file} is no state of a trainer: it has no global_steps.")
    return state


def problem_of(folder: Path) -> str | None:
    """Why ``folder`` cannot be resumed from, as a clause; None where it is a complete checkpoint."""
    if not (folder / MANIFEST).exists():
        return _problem_without_manifest(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error).rstrip(".")
    for name, size in manifest.files.items():
        try:
            # Asked once: a run that goes on may remove the checkpoint meanwhile.
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name}, which its {MANIFEST} lists, is missing"
        if found != size:
            return f"{name} has {found:,} bytes, and its {MANIFEST} says {size:,}"
    return None


def is_verl_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` (a ``global_step_N``) was written by verl's FSDP workers."""
    return is_verl_folder(str(folder / "actor"))


def _files_of(folder: Path) -> dict[str, int]:
    """Bytes of each file below ``folder``, by its name relative to it."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in files_below(folder)}


def _problem_without_manifest(folder: Path) -> str | None:
    if not (folder / STATE).is_file():
        if is_verl_checkpoint(folder):
            return (
                "verl wrote it: trainer.resume_mode=resume_path with trainer.resume_from_path takes its weights, and "
                "resume_mode=auto leaves it alone"
            )
        return f"it is no complete checkpoint ({STATE} is missing)"
    try:
        state = read_state_file(folder)
    except CheckpointError as error:
        return str(error).rstrip(".")
    # States that are older than manifests have no format.
    return f"{MANIFEST} is missing: it was not written, or not copied, to its end" if "format" in state else None


def _version() -> str:
    try:
        return version("burnish")
    except PackageNotFoundError:
        return "unknown"
