"""The checkpoints in a run's folder: which there are, which is the newest and the best, and which may go.

Everything is read off the disk, so a resumed run, another process or a person that copied folders sees the same.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from burnish.trainer.ppo.checkpoints.manifest import MANIFEST, Manifest, problem_of, read_manifest, write_manifest
from burnish.utils import local_paths
from burnish.utils.durable import sync_folder, write_durably
from burnish.utils.errors import CheckpointError

logger = logging.getLogger("burnish.trainer")

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpoint.txt"
RUN_ID = "run_id"
_NAME = re.compile(r"global_step_(\d+)")
TEMPORARY = "tmp_global_step_"


class TrackerError(OSError):
    """A checkpoint is complete, but the file that names the newest one could not be written."""


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None where the name is another."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


class RunFolder:
    """The checkpoints below ``root``.

    Attributes:
        run: id of the run that writes here; checkpoints of another one are neither resumed from nor removed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = _read(root / RUN_ID) or None

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.root / f"global_step_{step}"

    def begin_run(self, run: str | None = None) -> None:
        """Writes down that the run ``run`` is in this folder from now on; None: a new one."""
        self.run = run or uuid.uuid4().hex[:12]
        self.root.mkdir(parents=True, exist_ok=True)
        if _read(self.root / RUN_ID) != self.run:
            write_durably(self.root / RUN_ID, self.run)

    def named(self) -> dict[int, Path]:
        """Every folder that is named as a checkpoint, by step, in the order of the steps."""
        found = {step: path for path in self.root.glob("global_step_*") if (step := step_of(path)) is not None}
        return dict(sorted(found.items()))

    def complete(self) -> tuple[dict[int, Path], dict[int, str]]:
        """Complete checkpoints of this run by step, and why the other folders are none of them."""
        complete, passed_over = {}, {}
        for step, path in self.named().items():
            try:
                problem = problem_of(path) or self._foreign(read_manifest(path))
            except CheckpointError as error:
                # Another process may ask while the run goes on, which has removed it just now.
                problem = str(error).rstrip(".")
            if problem is None:
                complete[step] = path
            else:
                passed_over[step] = problem
        return complete, passed_over

    def _foreign(self, manifest: Manifest) -> str | None:
        if None in (self.run, manifest.run) or manifest.run == self.run:
            return None
        return (
            "another run that was in this folder before wrote it: trainer.resume_mode=resume_path with "
            "trainer.resume_from_path goes on from it"
        )

    def newest_first(self) -> list[Path]:
        """Complete checkpoints of this run: the one written last, those before it from the highest step down, then the others.

        Steps beyond the last one are of a course that the run has left, when it went on from an earlier checkpoint.
        """
        complete, passed_over = self.complete()
        for step, problem in passed_over.items():
            logger.warning("Passing over %s: %s.", self.path(step), problem)
        last = _read(self.root / TRACKER)
        steps = sorted(complete, reverse=True)
        if last.isdigit():
            steps.sort(key=lambda step: step > int(last))
        return [complete[step] for step in steps]

    # ------------------------------------------------------------------------------------------- writing

    def temporary(self, step: int) -> Path:
        """A new, empty folder to write the checkpoint of ``step`` into; what runs that died left there is removed."""
        # With a dot in front what was being fetched.
        for left_over in [*self.root.glob(f"{TEMPORARY}*"), *self.root.glob(f".{TEMPORARY}*")]:
            # What cannot go yet, as over NFS what somebody reads, is no reason to save nothing.
            shutil.rmtree(left_over, ignore_errors=True)
        folder = self.root / f"{TEMPORARY}{step}"
        folder.mkdir(parents=True)
        return folder

    def give_name(self, temporary: Path, step: int) -> Path:
        """Makes the folder the checkpoint of ``step``, and the newest; all of it is on the disk when this returns."""
        final = self.path(step)
        old = self.root / f"{TEMPORARY}{step}_old"
        if final.exists():
            # Out of the way, not gone, until the new one has its name.
            final.rename(old)
        temporary.rename(final)
        sync_folder(self.root)
        shutil.rmtree(old, ignore_errors=True)
        try:
            write_durably(self.root / TRACKER, str(step))
        except OSError as error:
            raise TrackerError(
                error.errno,
                f"{final} is complete, but {TRACKER} could not be written ({error.strerror or error}), and it says "
                f"{_read(self.root / TRACKER) or 'nothing'}: a run that goes on would begin there",
            ) from error
        return final

    # -------------------------------------------------------------------------------------- keeping, removing

    def leave(self, after: int, but: int) -> None:
        """Writes into the checkpoints beyond step ``after``, but for that of step ``but``, that the run has left them: it went
        on from ``after``, which it may have left before, and its checkpoints from now on are of another course.

        Raises:
            OSError: the disk did not take it.
        """
        for step, path in self.complete()[0].items():
            manifest = read_manifest(path)
            is_left = False if step == after else manifest.is_left or (step > after and step != but)
            if is_left != manifest.is_left and (path / MANIFEST).exists():
                write_manifest(path, replace(manifest, is_left=is_left))

    def choose_best(self, metric: str, mode: str, upto: int | None = None) -> tuple[int, float] | None:
        """The checkpoint with the best ``metric``, the earliest of several, written to ``best_checkpoint.txt``; those of a
        course that the run has left do not count.

        Args:
            mode: "max" or "min".
            upto: the last step that counts; None: all do.

        Returns:
            its step and value; None where no checkpoint has a number.
        """
        scored = []
        for step, path in self.complete()[0].items():
            manifest = read_manifest(path)
            value = manifest.metrics.get(metric)
            counts = not manifest.is_left and (upto is None or step <= upto)
            if counts and value is not None and value == value:
                scored.append((step, float(value)))
        if not scored:
            return None
        sign = 1 if mode == "max" else -1
        best = max(scored, key=lambda one: (sign * one[1], -one[0]))
        if _read(self.root / BEST) != str(best[0]):
            write_durably(self.root / BEST, str(best[0]))
        return best

    def prune(self, keep: int | None, keep_critic: int | None, written: int, spare: Collection[int]) -> list[str]:
        """Removes what is beyond the newest ``keep`` checkpoints up to step ``written``, and the critics beyond the newest
        ``keep_critic``; None keeps all.

        Args:
            spare: steps that are left alone.

        Returns:
            what was removed.
        """
        steps = [step for step in self.complete()[0] if step <= written]
        removed = []
        old = steps[:-keep] if keep else []
        for step in (step for step in old if step not in spare):
            if _told(self._remove, step):
                removed.append(self.path(step).name)
        for step in steps[:-keep_critic] if keep_critic else []:
            if step not in spare and (self.path(step) / "critic").exists() and _told(self._remove_critic, step):
                removed.append(f"{self.path(step).name}/critic")
        return removed

    def _remove(self, step: int) -> None:
        # A folder that is half gone must not bear a checkpoint's name.
        doomed = self.root / f"{TEMPORARY}{step}_removed"
        os.rename(self.path(step), doomed)
        shutil.rmtree(doomed)

    def _remove_critic(self, step: int) -> None:
        folder = self.path(step)
        manifest = read_manifest(folder)
        # First said, then done: files that are not listed do no harm, and listed ones that are missing would.
        write_manifest(folder, replace(manifest, without=tuple({*manifest.without, "critic"})))
        doomed = self.root / f"{TEMPORARY}{step}_critic"
        (folder / "critic").rename(doomed)
        shutil.rmtree(doomed)


def _told(remove: Callable[[int], None], step: int) -> bool:
    try:
        remove(step)
    except OSError as error:
        # An old checkpoint too many is no reason to end a run.
        logger.warning("The checkpoint of step %d could not be removed: %s.", step, error)
        return False
    return True


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if local_paths.is_file(file) else ""


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    root = local_paths.expanded(run_dir).absolute()
    found = RunFolder(root).newest_first()
    if not found:
        raise CheckpointError(f"{root} holds no complete checkpoint.")
    return found[0]


def best_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that ``trainer.keep_best`` chose; None where there is none."""
    folder = RunFolder(local_paths.expanded(run_dir).absolute())
    step = _read(folder.root / BEST)
    path = folder.path(int(step)) if step.isdigit() else None
    return path if path is not None and problem_of(path) is None else None
