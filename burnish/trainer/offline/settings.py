"""How a finished model is asked: from a command's options, the run that wrote it, and ``key=value``, to a configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from burnish.config import PPOTrainerConfig
from burnish.config.load import load_with_notices
from burnish.config.schema import leaves
from burnish.trainer.offline.source import ModelSource
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import HIDDEN

logger = logging.getLogger("burnish.offline")

ENGINES = ("native", "vllm", "hf")
_VAL = "actor_rollout_ref.rollout.val_kwargs"
# Of a run's configuration: what its prompts, its sampling in validation and its rewards follow from.
_OF_THE_RUN = (
    "data.prompt_key", "data.answer_key", "data.system_prompt", "data.reward_fn_key", "data.default_data_source",
    "data.tool_config_path", "data.apply_chat_template_kwargs", "data.custom_cls.", "data.max_response_length",
    "actor_rollout_ref.rollout.seed", "actor_rollout_ref.rollout.ignore_eos", "trainer.seed", f"{_VAL}.", "reward.",
)  # fmt: skip
# A reward model needs workers of its own, which there are none of here.
_NOT_OF_THE_RUN = ("reward.reward_model.",)
_NO_BOUND = 1 << 20


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """What to ask, and how responses are sampled; None everywhere: as the run validated, or as said.

    Attributes:
        data: files, patterns, folders or data sets of the hub.
        prompts: texts, instead of data.
        n: responses to each prompt; else 1.
        temperature: 0 is greedy; else greedy for one response and 1.0 for several.
        max_tokens: of a response; else 1024, or what the model has positions for.
        seed: of sampling; else the default of ``rollout.seed``.
        limit: only the first so many rows.
        engine: native, vllm or hf.
        device: cpu or cuda; else the GPU, if there is one.
        dtype: auto, float32 or bfloat16.
        chat_template: Jinja, or a file of it, instead of the tokenizer's.
        overrides: configuration, ``key=value``; it wins over the options.
    """

    data: Sequence[str] = ()
    prompts: Sequence[str] = ()
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    limit: int | None = None
    engine: str = "native"
    device: str | None = None
    dtype: str = "auto"
    chat_template: str | None = None
    base: str | None = None
    trust_remote_code: bool = False
    reward: str | None = None
    overrides: Sequence[str] = field(default_factory=tuple)


def settings_of(options: AskOptions, source: ModelSource, run: ModelSource) -> PPOTrainerConfig:
    """The configuration for asking one model; its device is chosen, its lengths are not yet.

    Args:
        run: the model whose run says how prompts are made and responses sampled and scored.

    Raises:
        ConfigError: an option or a key that cannot be.
    """
    _check(options)
    device = choose_device(options.device)
    of_run = run_settings(run)
    given: dict[str, Any] = {
        "actor_rollout_ref.model.path": source.model_path,
        "actor_rollout_ref.model.trust_remote_code": options.trust_remote_code,
        "actor_rollout_ref.rollout.name": options.engine,
        # Nothing is trained beside it.
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.9 if device.type == "cuda" else 0.5,
        "data.max_prompt_length": _NO_BOUND,
        # Bounds of training's passes, of which there are none.
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1 << 40,
        "critic.ppo_max_token_len_per_gpu": 1 << 40,
        "data.max_response_length": 1024,
        "data.val_files": list(options.data) or None,
        "trainer.device": device.type,
        **of_run,
        **reward_keys(options.reward),
    }
    if source.kind == "adapters":
        given["actor_rollout_ref.model.lora_adapter_path"] = source.folder
        given["actor_rollout_ref.model.override_config"] = source.override_config
    for key, value in {
        f"{_VAL}.n": options.n,
        f"{_VAL}.temperature": options.temperature,
        f"{_VAL}.do_sample": None if options.temperature is None else options.temperature > 0,
        f"{_VAL}.top_p": options.top_p,
        f"{_VAL}.top_k": options.top_k,
        "data.max_response_length": options.max_tokens,
        "data.val_max_samples": options.limit,
        "actor_rollout_ref.rollout.seed": options.seed,
    }.items():
        if value is not None:
            given[key] = value
    loaded = load_with_notices([given, *options.overrides], train_rows_given=True)
    if options.overrides:
        # What there is to say of the keys above is nobody's who only gave options.
        expected = load_with_notices([given], train_rows_given=True).notices
        for notice in (notice for notice in loaded.notices if notice not in expected):
            logger.warning("%s", notice)
    config = loaded.config
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    is_greedy = not sampling.do_sample or sampling.temperature == 0
    is_chosen = options.temperature is not None or any(
        f"{_VAL}.{name}=" in text for text in options.overrides for name in ("temperature", "do_sample")
    )
    if is_greedy and sampling.n > 1 and not is_chosen:
        # Several greedy responses are one response several times.
        sampling.do_sample, sampling.temperature = True, 1.0
    return config


def run_settings(source: ModelSource) -> dict[str, Any]:
    """What the run that wrote a checkpoint says of prompts, sampling and rewards, where it is not the default.

    Raises:
        ConfigError: its ``config.yaml`` cannot be read.
    """
    tree = source.run_values()
    # A class for conversations to learn gives no prompts.
    is_sft = bool(tree) and "actor_rollout_ref" not in tree
    left_out = (*_NOT_OF_THE_RUN, "data.custom_cls.") if is_sft else _NOT_OF_THE_RUN
    found = {}
    for path, leaf in leaves().items():
        if not path.startswith(_OF_THE_RUN) or path.startswith(left_out):
            continue
        value: Any = tree
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        # A hidden secret is no value; what followed another key follows it again.
        if value is not None and value != leaf.default and HIDDEN not in str(value):
            found[path] = value
    return found


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None: the GPU, if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device={name}: models are run on cpu and, with a GPU, on cuda.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device={name}: torch {torch.__version__} finds no GPU here.")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device={name} is no device.") from error


def _check(options: AskOptions) -> None:
    if bool(options.data) == bool(options.prompts):
        raise ConfigError("Prompts come from --data FILE or from --prompt TEXT, one of the two.")
    if options.engine not in ENGINES:
        raise ConfigError(f"--engine={options.engine}: there is {', '.join(ENGINES)}.")
    if options.dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype={options.dtype}: there is auto, float32 and bfloat16.")
    for name, value, least in (
        ("-n", options.n, 1),
        ("--max-tokens", options.max_tokens, 1),
        ("--limit", options.limit, 1),
        ("--temperature", options.temperature, 0),
        ("--seed", options.seed, 0),
    ):
        if value is not None and not value >= least:
            raise ConfigError(f"{name}={value}: it must be at least {least}.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p={options.top_p}: it must be above 0 and at most 1; 1 keeps every token.")


def reward_keys(reward: str | None) -> dict[str, Any]:
    """The keys of ``--reward my_reward.py:compute_score``."""
    if reward is None:
        return {}
    path, colon, name = reward.rpartition(":")
    if not colon or not path or "/" in name:
        raise ConfigError(f"--reward={reward}: write the file and the function, as my_reward.py:compute_score.")
    return {"reward.custom_reward_function.path": path, "reward.custom_reward_function.name": name}
