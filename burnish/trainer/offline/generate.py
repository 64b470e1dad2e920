"""Responses of a finished model: the prompts are rendered, the requests named and the tokens drawn as in a run's validation, so
the same checkpoint gives the same responses here as there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from burnish.config import PPOTrainerConfig
from burnish.data import create_rl_dataset
from burnish.data.collate import collate_fn
from burnish.engine.compute_dtype import resolve_dtype
from burnish.engine.layout import persistent_buffers
from burnish.model import lora
from burnish.model.load import eos_token_ids, load_config
from burnish.protocol import DataProto
from burnish.rollout import requests_from_dataproto, responses_to_dataproto, sampling_of
from burnish.rollout.base import WeightStream, max_sequence_length
from burnish.rollout.build import build_rollout, rollout_class
from burnish.trainer.offline.models import load_model, load_source_tokenizer
from burnish.trainer.offline.settings import AskOptions, choose_device, settings_of
from burnish.trainer.offline.source import ModelSource, find_model
from burnish.trainer.ppo.prompts import repeat_prompts
from burnish.trainer.ppo.stages import PROMPT_TENSORS
from burnish.utils.errors import ConfigError, DataError
from burnish.workers.early_scoring import EarlyScoring

logger = logging.getLogger("burnish.offline")

# Responses that are asked for in one call of the engine, and held as tensors together.
_RESPONSES_AT_ONCE = 4096
_LEAST_RESPONSE = 16
# What the reader puts where a row has nothing.
_FILLED_IN: dict[str, Any] = {"data_source": "unknown", "extra_info": {}, "reward_model": {"ground_truth": None}}

OnDone = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model with what it is asked.

    Attributes:
        source: the model.
        config: see `burnish.trainer.offline.settings.settings_of`; its lengths are those of the data.
        device: where it computes.
        dtype: that it computes in.
        tokenizer, dataset: of the prompts.
    """

    source: ModelSource
    config: PPOTrainerConfig
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    dataset: Any

    @property
    def n(self) -> int:
        """Responses to each prompt."""
        return int(self.config.actor_rollout_ref.rollout.val_kwargs.n)

    @property
    def num_responses(self) -> int:
        """Of all prompts together."""
        return len(self.dataset) * self.n


def prepare(name: str, options: AskOptions, *, like: ModelSource | None = None) -> Asked:
    """Finds the model, renders the prompts and checks the lengths; no weight is read yet.

    Args:
        like: the model whose run says how to ask, where two are to be asked alike; None: this one.

    Raises:
        ConfigError, DataError, ModelError: what cannot be asked.
    """
    source = find_model(name, base=options.base)
    if source.role == "critic":
        raise ConfigError(f"{name} is a critic: it has a value head and generates nothing. Name the actor beside it.")
    config = settings_of(options, source, source if like is None else like)
    tokenizer = load_source_tokenizer(
        source, trust_remote_code=options.trust_remote_code, chat_template=options.chat_template
    )
    rows = [{config.data.prompt_key: text} for text in options.prompts] or None
    try:
        dataset = create_rl_dataset(config.data, tokenizer, split="val", rows=rows)
    except DataError as error:
        if not options.data:
            raise
        raise DataError(str(error).replace("data.val_files", "--data")) from error
    assert dataset is not None
    device = choose_device(options.device)
    model_config = load_config(
        source.model_path, trust_remote_code=options.trust_remote_code, override_config=source.override_config
    )
    fitted = _fit_lengths(config, dataset, max_sequence_length(model_config, None), is_chosen=_chooses_length(options))
    dtype = resolve_dtype(options.dtype, device, lambda: model_config)
    return Asked(source=source, config=fitted, device=device, dtype=dtype, tokenizer=tokenizer, dataset=dataset)


class Asking:
    """A loaded model and its engine; use it as a context manager.

    Raises:
        ModelError: the model cannot be loaded.
        RolloutError: the engine cannot start.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        rollout = asked.config.actor_rollout_ref.rollout
        model = load_model(
            asked.source, asked.dtype, trust_remote_code=asked.config.actor_rollout_ref.model.trust_remote_code
        )
        self.sampling = sampling_of(rollout, rollout.val_kwargs, eos_token_ids(model, asked.tokenizer))
        self.rollout = _start_engine(model, asked)
        logger.debug("%s is ready on %s in %s.", rollout.name, asked.device, asked.dtype)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exception: object) -> None:
        if close := getattr(self.rollout, "close", None):
            close()

    def batches(self, on_done: OnDone | None = None, manager: Any = None) -> Iterator[DataProto]:
        """The prompts with their responses, as many at a time as `_RESPONSES_AT_ONCE` says.

        Args:
            on_done: called with the number of finished responses, and of all.
            manager: a reward manager, which then scores each response while others are sampled; what became of that is the
                column ``reward_outcome``.
        """
        asked = self.asked
        size = max(1, _RESPONSES_AT_ONCE // asked.n)
        num_done = 0

        def done(_: Any) -> None:
            nonlocal num_done
            num_done += 1
            if on_done is not None:
                on_done(num_done, asked.num_responses)

        for start in range(0, len(asked.dataset), size):
            rows = [asked.dataset[i] for i in range(start, min(start + size, len(asked.dataset)))]
            pad = asked.tokenizer.pad_token_id
            batch = repeat_prompts(collate_fn(rows, pad), n=asked.n, uid_prefix="val", pad_token_id=pad)
            yield self._answer(batch, done, manager)

    def _answer(self, batch: DataProto, done: Callable[[Any], None], manager: Any) -> DataProto:
        columns = dict(batch.non_tensor_batch)
        prompts = batch.pop(batch_keys=PROMPT_TENSORS)
        prompts.non_tensor_batch = columns
        requests = requests_from_dataproto(prompts)
        scorer = None if manager is None or not hasattr(manager, "scorer") else manager.scorer()
        scoring = None if scorer is None else EarlyScoring(manager, scorer, prompts, requests)

        def finished(response: Any) -> None:
            done(response)
            if scoring is not None:
                scoring.submit(response)

        responses = self.rollout.generate(requests, self.sampling, finished)
        generated = responses_to_dataproto(prompts, responses, pad_token_id=self.asked.tokenizer.pad_token_id)
        if scoring is not None:
            generated.non_tensor_batch["reward_outcome"], _ = scoring.collect(responses)
        return batch.union(generated)


def _chooses_length(options: AskOptions) -> bool:
    """Whether somebody asked for a length of responses, so that another one must not be taken silently."""
    return options.max_tokens is not None or any("max_response_length" in text for text in options.overrides)


def _fit_lengths(config: PPOTrainerConfig, dataset: Any, positions: int | None, *, is_chosen: bool) -> PPOTrainerConfig:
    """The rollout's lengths as these prompts and this model have them."""
    lengths = [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    longest = max(lengths)
    wanted = config.data.max_response_length
    row = lengths.index(longest)
    place = dataset.location(row) if hasattr(dataset, "location") else f"row {row}"
    if positions is not None and longest + wanted > positions:
        room = positions - longest
        if is_chosen or room < min(wanted, _LEAST_RESPONSE):
            raise DataError(
                f"{place}: this prompt has {longest} tokens, and the model has {positions} positions for prompt and response, "
                f"which leaves {max(room, 0)} of the {wanted} tokens for the response (--max-tokens)."
            )
        wanted = room
    config.actor_rollout_ref.rollout.prompt_length = longest
    set_response_length(config, wanted)
    return config


def set_response_length(config: PPOTrainerConfig, length: int) -> None:
    """Responses of up to ``length`` tokens, and room for them behind the longest prompt."""
    rollout = config.actor_rollout_ref.rollout
    rollout.response_length, rollout.max_model_len = length, rollout.prompt_length + length


def _start_engine(model: PreTrainedModel, asked: Asked) -> Any:
    rollout = asked.config.actor_rollout_ref.rollout
    tokenizer = asked.tokenizer if rollout.val_kwargs.stop else None
    engine_cls = rollout_class(rollout)
    if not hasattr(engine_cls, "for_policy"):
        model.to(asked.device)  # type: ignore[arg-type]  # transformers declares it for its own wrapper
        given = {"device": asked.device} | ({} if tokenizer is None else {"tokenizer": tokenizer})
        return engine_cls(model, rollout, shares_storage=False, **given)
    policy: Any = SimpleNamespace(module=SimpleNamespace(model=model), shares_storage=False, dtype=asked.dtype)
    engine = build_rollout(policy, asked.config.actor_rollout_ref, asked.device, tokenizer)
    try:
        engine.update_weights(weight_stream(model), 0)
    except BaseException:
        if close := getattr(engine, "close", None):
            close()
        raise
    return engine


def weight_stream(model: PreTrainedModel) -> WeightStream:
    """Every weight by its Hugging Face name, in the order in which an engine takes them: the model's own, then adapters."""
    parameters = [(lora.hf_name(name), parameter.detach()) for name, parameter in model.named_parameters()]
    yield from ((name, tensor) for name, tensor in parameters if not lora.is_adapter_name(name))
    yield from persistent_buffers(model)
    yield from ((name, tensor) for name, tensor in parameters if lora.is_adapter_name(name))


def rows_of(batch: DataProto, tokenizer: Any, config: PPOTrainerConfig) -> Iterator[dict[str, Any]]:
    """A line for each response: the row of the data that it answers, so that the file is data, too, and what came of it.

    ``response`` is the text without special tokens, as reward functions get it. Of a scored batch a line has ``score``
    (null where there is none), ``valid`` and what else the reward function returned.
    """
    tensors, columns = batch.tensors, batch.non_tensor_batch
    mask = tensors["response_mask"]
    scores = tensors["token_level_scores"].sum(-1).tolist() if "token_level_scores" in tensors else None
    extras = batch.meta_info.get("reward_extra_keys", [])
    own = ("uid", "sample_index", "finish_reason", "reward_outcome", "raw_prompt", *extras)
    data_keys = [key for key in columns if key not in own]
    for i in range(len(batch)):
        ids = tensors["responses"][i][mask[i].bool()].tolist()
        said = {
            "uid": str(columns["uid"][i]),
            "sample_index": int(columns["sample_index"][i]),
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": columns["finish_reason"][i],
            "num_tokens": len(ids),
        }
        if scores is not None:
            is_valid = bool(tensors["valid"][i])
            said |= {"score": scores[i] if is_valid else None, "valid": is_valid}
            said |= {key: _plain(columns[key][i]) for key in extras if columns[key][i] is not None}
        row = {config.data.prompt_key: columns["raw_prompt"][i]} if "raw_prompt" in columns else {}
        row |= {key: columns[key][i] for key in data_keys if columns[key][i] not in (None, _FILLED_IN.get(key))}
        yield {(f"data/{key}" if key in said else key): _plain(value) for key, value in row.items()} | said


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
