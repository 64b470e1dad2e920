"""What the commands that train do with the words of a command line: ``burnish train`` and ``burnish sft``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, to_shown_yaml
from burnish.config.cli import parse_train_args
from burnish.config.usage import unread
from burnish.trainer.ending import exit_status
from burnish.trainer.run import RunSummary
from burnish.trainer.supervised import follow_supervisor, in_supervision
from burnish.trainer.supervisor import supervise
from burnish.utils import env
from burnish.utils.console import console
from burnish.utils.errors import ConfigError

C = TypeVar("C", PPOTrainerConfig, SFTTrainerConfig)


def run_command(
    name: str, *, module: str, argv: list[str] | None, load: Callable[..., C], run: Callable[[C], RunSummary]
) -> int:
    """Loads the configuration and lives one run, under a supervisor where it may be started again.

    Args:
        name: of the command, as ``--help`` calls it.
        module: whose ``main`` a supervisor starts.
        argv: the words behind the command; None: those of this process.
        load: as `burnish.config.load_config`.
        run: the run of a configuration.

    Returns:
        the exit status, as `burnish.trainer.ending` lists them.
    """
    words = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _run(name, module, words, load, run), needs_readers=False)


def _check_launcher(name: str) -> None:
    """One process starts a run.

    Raises:
        ConfigError: torchrun has started several, each of which would be a run of its own.
    """
    processes = env.get("WORLD_SIZE", "1")
    if env.get("TORCHELASTIC_RUN_ID") is not None and processes != "1":
        workers = env.get("LOCAL_WORLD_SIZE", processes)
        raise ConfigError(
            f"torchrun has started {processes} processes, and burnish starts its workers by itself. In place of torchrun and its "
            f"options, write burnish {name} trainer.n_gpus_per_node={workers} (and trainer.nnodes, where there are several)."
        )


def _run(name: str, module: str, argv: list[str], load: Callable[..., C], run: Callable[[C], RunSummary]) -> int:
    _check_launcher(name)
    args = parse_train_args(argv, command=name)
    config = load(args.overrides, config_name=args.config_name, config_path=args.config_path)
    if args.cfg:
        console.print(to_shown_yaml(config), soft_wrap=True)
        return 0
    if config.trainer.max_restarts > 0 and not in_supervision():
        return supervise(argv, config, module=module)
    follow_supervisor()
    summary = run(config)
    # A run that was stopped, or that trains nothing, reads fewer keys and is to blame for none.
    unread_keys = unread(config) if summary.trained and not summary.interrupted else []
    if unread_keys:
        console.print(f"Set, but never read in this run: {', '.join(unread_keys)}", soft_wrap=True)
    if config.trainer.console != "off":
        console.print(f"{summary.ending} The run's files are in {summary.run_dir}", soft_wrap=True)
    return summary.status
