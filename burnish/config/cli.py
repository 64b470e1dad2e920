"""The command line of training: options of Hydra's kind, and ``key=value`` overrides."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from burnish.utils.errors import ConfigError

_EPILOG = """\
examples:
  algorithm.adv_estimator=grpo actor_rollout_ref.model.path=./model data.train_files=train.parquet
  recipe=demo data.train_batch_size=32              a recipe, with changes
  --config-path ./conf --config-name mine           a YAML file of your own

docs/config.md lists all keys.
"""
_SFT_EPILOG = """\
examples:
  model.path=./model data.train_files=conversations.jsonl
  recipe=lora model.path=org/model data.train_files=train.parquet data.val_files=test.parquet trainer.test_freq=20
  --config-path ./conf --config-name mine           a YAML file of your own

docs/sft.md explains them; docs/config.md lists all keys.
"""
_DESCRIPTIONS = {
    "sft": "Teaches a language model the answers of conversations (supervised fine-tuning).",
    "train": "Trains a language model with reinforcement learning.",
    "check": "Checks a run before it costs anything: says what burnish train would meet with the same arguments.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArgs:
    """A parsed command line.

    Attributes:
        overrides: ``key=value`` words, in order.
        config_name: a YAML file to start from, without ``.yaml``.
        config_path: the folder of YAML files of the user's own.
        cfg: "job" prints the composed configuration instead of running.
    """

    overrides: list[str]
    config_name: str | None = None
    config_path: str | None = None
    cfg: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. Keys are set as key=value; --help shows the options.")


def parse_train_args(argv: Sequence[str], *, command: str = "train", own_options: str = "") -> TrainArgs:
    """Parses the words after ``burnish train``, ``burnish sft``, ``burnish check`` or ``python -m burnish.trainer.main_ppo``.

    Args:
        command: as ``--help`` calls it.
        own_options: what ``--help`` says of options that the command has taken out of ``argv`` itself.

    Raises:
        ConfigError: an option that does not exist, or a key written as an option.
        SystemExit: ``--help`` was asked for and printed.
    """
    options, words = _parser(command, own_options).parse_known_args(list(argv))
    for word in words:
        if word.startswith("-"):
            raise _unknown_option(word)
    if options.multirun:
        raise ConfigError("--multirun: one command is one run. Loop over the values in the shell.")
    return TrainArgs(
        overrides=[*options.overrides, *words],
        config_name=_only("--config-name", options.config_name),
        config_path=_only("--config-path", options.config_path),
        cfg=options.cfg,
    )


def _parser(command: str, own_options: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"burnish {command}",
        description=_DESCRIPTIONS[command],
        epilog=own_options + (_SFT_EPILOG if command == "sft" else _EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in Hydra's grammar")
    named: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="YAML file to start from (a recipe, or your own)", **named
    )
    parser.add_argument(
        "--config-path", "--config-dir", "-cp", "-cd", metavar="DIR", help="folder of your YAML files", **named
    )
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)  # what --cfg prints is resolved
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return parser


def _only(option: str, values: Sequence[str]) -> str | None:
    """The value of an option that may be given once, or again with the same value."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise ConfigError(
            f"{' and '.join(f'{option}={value}' for value in different)}: a run takes one. Leave one out."
        )
    return different[0] if different else None


def _unknown_option(word: str) -> ConfigError:
    name = word.lstrip("-")
    if "=" in name or "." in name:
        return ConfigError(f"{word}: keys are written without dashes, as {name if '=' in name else name + '=value'}.")
    return ConfigError(f"{word}: there is no such option. Keys are set as key=value; --help shows the options.")
