"""From which checkpoint a run goes on, and the going on: ``trainer.resume_mode``.

============= ==========================================================================================================
auto          the newest complete one of this run, else the one before, ...; none: the run starts afresh
must          the same, and none is an error
resume_path   the one that ``trainer.resume_from_path`` names, of whatever run; verl's too
disable       none
============= ==========================================================================================================
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.trainer.ppo.checkpoints import remote
from burnish.trainer.ppo.checkpoints.folders import TEMPORARY, RunFolder, step_of
from burnish.trainer.ppo.checkpoints.manager import CheckpointManager
from burnish.trainer.ppo.checkpoints.manifest import is_verl_checkpoint, problem_of, read_manifest
from burnish.trainer.ppo.checkpoints.state import (
    check_data,
    differences,
    other_model,
    other_trainer,
    read_state,
    restore,
    restore_generators,
)
from burnish.utils import local_paths, storage
from burnish.utils.errors import CheckpointError
from burnish.workers.handed_back import checked

if TYPE_CHECKING:
    from burnish.trainer.ppo.checkpoints.run import RunCheckpoints

logger = logging.getLogger("burnish.trainer")

_SHOWN = 12


def find(manager: CheckpointManager, own: dict[str, Any] | None = None, *, needs_critic: bool = False) -> list[Path]:
    """The checkpoints to try, the best first; none: the run starts afresh. What a URL names has been fetched.

    Args:
        own: trainer, model and data of the run (`burnish.trainer.ppo.checkpoints.state.belongings`); None does not compare them.
        needs_critic: whether the run has a critic.

    Raises:
        CheckpointError: ``resume_path`` or ``must`` without a checkpoint that can be used.
        DataError: the newest is of data with another number of rows.
        StorageError: ``trainer.default_hdfs_dir`` cannot be reached.
    """
    config = manager.config
    if config.default_hdfs_dir is not None:
        # That it cannot be reached shall not be found out by the first checkpoint.
        storage.exists(config.default_hdfs_dir)
    if config.resume_mode == "disable":
        return []
    if config.resume_mode == "resume_path":
        return [_named(manager, str(config.resume_from_path), own, needs_critic)]
    usable = []
    for folder in _newest_first(manager):
        problem = _unsuitable(folder, own, needs_critic)
        if problem is None:
            usable.append(folder)
        else:
            logger.warning("Passing over %s: %s.", folder, problem)
    if not usable and config.resume_mode == "must":
        raise CheckpointError(
            f"trainer.resume_mode=must, but {manager.described()} holds no complete checkpoint of this run."
        )
    if usable and own is not None:
        check_data(read_state(usable[0]), own)
    return usable


def _newest_first(manager: CheckpointManager) -> list[Path]:
    local, url = manager.folder.newest_first(), manager.config.default_hdfs_dir
    if url is None:
        return local
    found = remote.newest_remote(url)
    if found is None:
        return local
    step = step_of(Path(storage.name_of(found))) or 0
    if local and (step <= (step_of(local[0]) or 0) or remote.run_of(found) != manager.folder.run):
        return local
    # Nothing is here, or it is older: the machine is another one.
    return [remote.fetch(found, manager.folder), *local]


def _named(manager: CheckpointManager, path: str, own: dict[str, Any] | None, needs_critic: bool) -> Path:
    if storage.is_remote(path):
        folder = remote.fetch(path, RunFolder(manager.root / f"{TEMPORARY}resume"))
    else:
        folder = local_paths.expanded(path).absolute()
    if is_verl_checkpoint(folder):
        return folder
    problem = problem_of(folder) or _unsuitable(folder, own, needs_critic)
    if problem is not None:
        raise CheckpointError(
            f"trainer.resume_from_path={storage.shown(path)}: no complete checkpoint there: {problem}. Name a folder "
            f"global_step_N that a run has written."
        )
    if own is not None:
        check_data(read_state(folder), own)
    return folder


def _unsuitable(folder: Path, own: dict[str, Any] | None, needs_critic: bool) -> str | None:
    """Why this run cannot go on from a complete checkpoint, as a clause."""
    try:
        manifest = read_manifest(folder)
        reason = None
        if own is not None:
            state = read_state(folder)
            reason = other_trainer(state, own) or other_model(state, own)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if reason is None and needs_critic and not (folder / "critic").is_dir():
        kept = "was removed later (trainer.max_critic_ckpt_to_keep)" if "critic" in manifest.without else "is not in it"
        reason = f"its critic, which this run has, {kept}"
    return reason


# ------------------------------------------------------------------------------------------------------- load


def load(run: RunCheckpoints, folders: list[Path]) -> Path | None:
    """Puts trainer and workers where a checkpoint was taken.

    Where ``resume_mode=auto`` finds that the newest cannot be loaded, the one before is tried, which an event tells.

    Args:
        folders: as `find` gave them.

    Returns:
        the checkpoint; None: the run starts afresh.

    Raises:
        CheckpointError: none of those that are there could be loaded.
    """
    manager, mode = run.manager, run.manager.config.resume_mode
    failed: list[CheckpointError] = []
    for folder in folders:
        try:
            differing = _load_from(run, folder)
        except CheckpointError as error:
            failed.append(error)
            if mode == "resume_path":
                raise
            logger.warning("%s cannot be resumed from: %s The one before is tried.", folder, error)
            run.tell("warning", f"{folder.name} cannot be resumed from: {error}", step=step_of(folder))
            continue
        _tell(run, folder, differing)
        _begin_run(manager, folder)
        _forget_local_copy(run, folder)
        return folder
    if failed:
        raise CheckpointError(
            f"None of the {len(failed)} checkpoints in {manager.root} can be loaded. The newest: {failed[0]} To start afresh "
            f"beside them, set trainer.resume_mode=disable."
        )
    if not manager.config.val_only:
        # A new run, also where checkpoints were passed over: what this one keeps and removes are its own.
        manager.folder.begin_run()
    return None


def _load_from(run: RunCheckpoints, folder: Path) -> list[str]:
    """Loads one checkpoint; returns what differs from the run that wrote it."""
    trainer = run.trainer
    state = None if is_verl_checkpoint(folder) else read_state(folder)
    checked(trainer.actor_rollout_wg.load_checkpoint(f"{folder}/actor"))
    if trainer.critic_wg is not None:
        checked(trainer.critic_wg.load_checkpoint(f"{folder}/critic"))
    differing = []
    if state is None:
        trainer.global_steps = step_of(folder) or 0
        logger.warning(
            "%s is verl's: weights and step are taken from it; the data begin at the first row of their order.", folder
        )
    else:
        restore(trainer, state)
        restore_generators(trainer.config, state)
        differing = differences(state, run.belongings)
        run.validation_is_due = bool(state.get("validation_due"))
    run.manager.note_resumed(folder, trainer.global_steps)
    trainer.push_weights()
    return differing


def _tell(run: RunCheckpoints, folder: Path, differing: list[str]) -> None:
    logger.info("Resuming from %s.", folder)
    step = run.trainer.global_steps
    run.tell("resume", f"Resumed from {folder}, after step {step}.", step=step, path=str(folder))
    if differing:
        listed = "; ".join(differing[:_SHOWN])
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        message = f"The run goes on with another configuration than {folder.name} was saved with: {listed}{more}."
        logger.warning("%s", message)
        run.tell("warning", message, step=step)


def _begin_run(manager: CheckpointManager, folder: Path) -> None:
    is_own = folder.parent == manager.root and step_of(folder) is not None and not is_verl_checkpoint(folder)
    manager.folder.begin_run(read_manifest(folder).run if is_own else None)


def _forget_local_copy(run: RunCheckpoints, folder: Path) -> None:
    """Removes what was fetched for this start alone, and with ``del_local_ckpt_after_load`` what the URL has too."""
    manager, config = run.manager, run.manager.config
    if folder.parent.name == f"{TEMPORARY}resume":
        shutil.rmtree(folder.parent, ignore_errors=True)
        return
    if not config.del_local_ckpt_after_load or folder.parent != manager.root:
        return
    url = str(config.default_hdfs_dir)
    if not remote.is_copied(url, folder):
        logger.warning(
            "%s stays: trainer.default_hdfs_dir=%s has no complete copy of it (trainer.del_local_ckpt_after_load).",
            *(folder, storage.shown(url)),
        )
        return
    doomed = manager.root / f"{TEMPORARY}{folder.name}_loaded"
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    run.tell(
        "checkpoint_removed",
        f"Removed {folder.name} from this machine's disk after loading it; {storage.shown(url)} has it.",
        step=run.trainer.global_steps,
    )
