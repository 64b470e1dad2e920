"""All checks of a run, in the order in which they build on each other."""

from collections.abc import Sequence
from typing import Any

from burnish.config import HFModelConfig, PPOTrainerConfig
from burnish.config.plan import BatchPlan
from burnish.config.profiler_checks import check_profiled_device
from burnish.model.load import load_config
from burnish.render import tokenizer_of
from burnish.reward import load_reward_manager
from burnish.trainer.preflight.cluster import check_cluster
from burnish.trainer.preflight.compose import check_composed, compose, tell_of_validation
from burnish.trainer.preflight.data import check_sources, load_data
from burnish.trainer.preflight.disk import check_disk
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.memory_check import check_memory
from burnish.trainer.preflight.reward import probe_reward
from burnish.trainer.preflight.template import check_tokenizer
from burnish.utils import local_paths, storage
from burnish.utils.device_table import DeviceCeilings


def preflight(
    overrides: Sequence[str],
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    device: DeviceCeilings | None = None,
    findings: Findings | None = None,
) -> tuple[Findings, PPOTrainerConfig | None, BatchPlan | None]:
    """Looks at everything that the arguments of ``burnish train`` name.

    Args:
        device: plans memory and time for this GPU instead of the machine's own.
        findings: to go on from.

    Returns:
        what was found, the configuration and the plan of a step, as far as these can be made.
    """
    found = Findings() if findings is None else findings
    config = compose(overrides, config_name, config_path, found)
    if config is None:
        return found, None, None
    plan = check_composed(config, found)
    tell_of_validation(config, found)
    tokenizer: Any = None
    model = config.actor_rollout_ref.model
    if model.path is not None and not found.tells_error_of(tokenizer_key(model, "actor_rollout_ref.model")):
        with found.attempt("template"):
            tokenizer = tokenizer_of(model)
    num_steps = config.trainer.total_training_steps
    if tokenizer is not None:
        check_tokenizer(config, tokenizer, found)
        rows = _check_rows(config, tokenizer, found)
        if num_steps is None and rows is not None:
            num_steps = rows // config.data.train_batch_size * config.trainer.total_epochs
    with found.attempt("config"):
        _check_plug_ins(config)
        check_profiled_device(config)
    reports = []
    if plan is not None and model.path is not None and _has_config(model.path, on_hub=tokenizer is not None):
        with found.attempt("config"):
            load_config(model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config)
            reports = check_memory(config, plan, found, device=device)
    if reports:
        check_disk(config, {role: one for report in reports for role, one in report.models.items()}, num_steps, found)
    check_cluster(config, found)
    return found, config, plan


def _check_rows(config: PPOTrainerConfig, tokenizer: Any, found: Findings) -> int | None:
    """Data and rewards; the number of training rows."""
    datasets = load_data(config, tokenizer, found)
    manager: Any = None
    # A file that is not there was told with the configuration.
    if not found.tells_error_of("reward.custom_reward_function.path"):
        with found.attempt("reward"):
            manager = load_reward_manager(config.reward, tokenizer)
    if manager is not None:
        try:
            for split, dataset in datasets.items():
                num_errors = len(found.of("error"))
                check_sources({split: dataset}, manager, found)
                # Rows that no function can score would be told of again, with a traceback.
                can_score = len(found.of("error")) == num_errors
                if can_score and not any(item.area == "reward" and item.level == "error" for item in found.items):
                    probe_reward(config, manager, dataset, tokenizer, found, key=f"data.{split}_files")
        finally:
            close = getattr(manager, "close", None)
            if close is not None:
                close()
    return len(datasets["train"]) if "train" in datasets else None


def tokenizer_key(model: HFModelConfig, section: str) -> str:
    """The key that names where the tokenizer is: the model's, unless it has a place of its own."""
    return f"{section}.{'path' if model.tokenizer_path in (None, model.path) else 'tokenizer_path'}"


def _check_plug_ins(config: PPOTrainerConfig) -> None:
    """Code that is named by the configuration can be loaded."""
    from burnish.rollout import get_rollout_cls
    from burnish.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from burnish.utils.tracking import check_loggers

    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    get_rollout_cls(config.actor_rollout_ref.rollout.name)
    check_loggers(config.trainer.logger)


def _has_config(path: str, *, on_hub: bool) -> bool:
    """Whether the model's configuration can be read.

    Args:
        on_hub: whether a name of the hub is worth asking for: where its tokenizer could not be had, each further question
            would wait half a minute for the same refusal.
    """
    if storage.is_remote(path):
        return on_hub  # Its tokenizer came from the same copy.
    folder = local_paths.expanded(path)
    return local_paths.is_file(folder / "config.json") or (
        on_hub and not local_paths.exists(folder) and path.count("/") == 1
    )
