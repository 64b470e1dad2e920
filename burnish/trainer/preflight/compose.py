"""The configuration of a command line, and everything that is wrong with it, not the first thing alone."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, batch_plan, check_hub_models, check_paths
from burnish.config.data_names import named_sets
from burnish.config.idle_sections import idle_sentences
from burnish.config.load import load_with_notices
from burnish.config.plan import BatchPlan
from burnish.config.validation_checks import check_validation_data, idle_without_validation_data
from burnish.trainer.preflight.findings import Findings
from burnish.utils.errors import BurnishError, ConfigError

_AREA = "config"

C = TypeVar("C")


def compose(
    overrides: Sequence[str], config_name: str | None, config_path: str | None, findings: Findings
) -> PPOTrainerConfig | None:
    """The configuration; None where it cannot be composed.

    A setting that is refused is noted and left out, and the rest is looked at again, so that all of them are told.
    """

    def load(words: list[str]) -> tuple[PPOTrainerConfig, Sequence[str]]:
        loaded = load_with_notices(words, config_name, config_path)
        return loaded.config, loaded.notices

    return composed(load, overrides, findings)


def composed(
    load: Callable[[list[str]], tuple[C, Sequence[str]]], overrides: Sequence[str], findings: Findings
) -> C | None:
    """What ``load`` makes of the overrides, with its notices, as `compose` says."""
    rest = list(overrides)
    left_out: list[str] = []
    while True:
        try:
            config, notices = load(rest)
        except ConfigError as error:
            message = str(error)
            culprit = _culprit(message, rest)
            # What is missing only because it was left out was told before.
            if not any(_key(setting) in message for setting in left_out):
                findings.error(_AREA, message)
            if culprit is None:
                return None
            rest.remove(culprit)
            left_out.append(culprit)
            continue
        break
    for notice in notices:
        findings.warning(_AREA, notice)
    if left_out:
        findings.note(_AREA, f"What follows was checked without {', '.join(map(_key, left_out))}.")
    return config


def tell_of_validation(config: PPOTrainerConfig | SFTTrainerConfig, findings: Findings) -> None:
    """What is said of a run without validation data, which a command line names by files alone."""
    if named_sets(config.data.val_files):
        return
    with findings.attempt(_AREA):
        check_validation_data(config)
    for notice in idle_sentences(config, idle_without_validation_data(config)):
        findings.warning(_AREA, notice)


def _key(setting: str) -> str:
    return setting.partition("=")[0].lstrip("+~")


def _culprit(message: str, overrides: Sequence[str]) -> str | None:
    """The setting that a message is about: the one named first in it."""
    named = [
        (message.find(key), -len(key), setting) for setting in overrides if (key := _key(setting)) and key in message
    ]
    return min(named)[2] if named else None


def check_composed(config: PPOTrainerConfig, findings: Findings) -> BatchPlan | None:
    """Files and folders that are named, this machine's share, and the plan of a step."""
    from burnish.trainer.main_ppo import resolve_machine, world_size

    with findings.attempt(_AREA):
        check_paths(config)
    with findings.attempt(_AREA):
        check_hub_models(config)
    try:
        resolve_machine(config)
    except BurnishError as error:
        findings.error(_AREA, str(error))
        if not isinstance(config.trainer.n_gpus_per_node, int):
            return None
    plan = batch_plan(config, world_size(config))
    update = plan.actor
    tokens = update.samples_per_worker * (plan.prompt_tokens + plan.response_tokens)
    findings.facts["plan"] = {
        "prompts": plan.prompts,
        "samples": plan.samples,
        "workers": plan.workers,
        "updates": update.updates,
        "samples_per_update": update.samples,
        "samples_per_update_and_worker": update.samples_per_worker,
        "micro_batch_samples": update.micro_batch_samples,
        "micro_batch_tokens": update.micro_batch_tokens,
        "max_tokens_per_step": plan.max_tokens,
        "max_tokens_per_update_and_worker": tokens,
    }
    return plan
