"""`ServerRollout` (``rollout.mode=server``): responses from servers that run elsewhere, by OpenAI's API with token ids."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from burnish.config import ActorRolloutRefConfig, RolloutConfig
from burnish.model.lora import has_adapters
from burnish.rollout.base import (
    OnFinished,
    RolloutRequest,
    RolloutResponse,
    SamplingParams,
    WeightStream,
    check_requests,
    max_sequence_length,
)
from burnish.rollout.build import TrainedPolicy, rollout_dtype
from burnish.rollout.lifecycle import Lifecycle, OnLifecycle
from burnish.rollout.native.sampler import stream_key
from burnish.rollout.stats import RolloutStats
from burnish.rollout.vllm.server_facts import ServerFacts, look_at, server_clients
from burnish.rollout.vllm.server_requests import Asked, ask_all
from burnish.rollout.vllm.server_weights import Handover
from burnish.utils import env
from burnish.utils.errors import ConfigError, RolloutError

logger = logging.getLogger("burnish.rollout.vllm")

_KEY = "actor_rollout_ref.rollout.server"


class ServerRollout(OnLifecycle):
    """Asks servers for responses: ``vllm serve``, ``burnish serve``, or any other that takes and returns token ids.

    What it cannot do, as the servers sample by themselves:

    - A response depends on the seed, its prompt's uid and its number, but is not the one of burnish's own engines, and one that
      was cut does not go on as it would have.
    - Log-probs are of the kind that a server reports. Where they cannot be those of softmax(logits / temperature) they are NaN
      and a warning says so once; with ``server.weights_dir``, which is for training, the configured sampling must not be such.
    - Servers sleep and wake by themselves; `sleep` only has this object refuse to generate.
    - Weights arrive only by ``server.weights_dir`` (`Handover`). Without it the servers' own weights are taken for those of the
      policy, which nothing proves, and once it has generated other ones are refused.

    Args:
        config: ``server`` has the addresses.
        model_path: folder or hub name of the model.
        model_config: the model's, of transformers.
        vocab_size: rows of its embedding.
        tokenizer: the model's; compared with the servers'.
        dtype: in which weights are handed over.

    Raises:
        ConfigError: an address that is none.
        RolloutError: no server, one of another model, or one that does not return what is needed.
    """

    shares_storage = False

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str,
        model_config: Any,
        vocab_size: int,
        tokenizer: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.stats = RolloutStats()
        """Of the last ``generate``; a server tells nothing of its steps and its cache."""
        self._config = config
        self._server = config.server
        self._vocab_size = vocab_size
        self._lifecycle = Lifecycle(shares_storage=False)
        self._servers = [
            look_at(client, self._server, model_path=model_path, vocab_size=vocab_size, tokenizer=tokenizer)
            for client in server_clients(self._server, api_key(config))
        ]
        lengths = [facts.max_length for facts in self._servers if facts.max_length is not None]
        ours = max_sequence_length(model_config, config.max_model_len)
        self._max_length = min([*lengths, *([] if ours is None else [ours])], default=None)
        self._handover: Handover | None = None
        if self._server.weights_dir is not None:
            self._check_training()
            self._handover = Handover(self._servers, self._server, dtype)
        self._has_generated = False
        self._warned: set[str] = set()

    @classmethod
    def for_policy(
        cls, policy: TrainedPolicy, config: ActorRolloutRefConfig, device: torch.device | str, tokenizer: Any = None
    ) -> ServerRollout:
        """The rollout of a policy that is trained here; see `burnish.rollout.build.build_rollout`."""
        model = policy.module.model
        if has_adapters(model) and config.rollout.server.weights_dir is not None:
            raise ConfigError(
                f"{_KEY}.weights_dir={config.rollout.server.weights_dir} hands whole models over, but "
                f"actor_rollout_ref.model.lora_rank={config.model.lora_rank} trains adapters. Use rollout.mode=async, or "
                f"lora_rank=0."
            )
        return cls(
            config.rollout,
            model_path=config.model.path,
            model_config=model.config,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            tokenizer=tokenizer,
            dtype=rollout_dtype(policy, config.rollout),
        )

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`.

        Raises:
            RolloutError: also a server that refuses a request, returns what is no answer to it, or answers it in none of
                ``server.max_attempts`` attempts.
        """
        begin = time.perf_counter()
        with self._lifecycle.generating(request.request_id for request in requests):
            check_requests(
                requests, sampling, max_length=self._max_length, vocab_size=self._vocab_size, has_tokenizer=True
            )
            asked = [self._asked(request, request.sampling or sampling) for request in requests]
            self._has_generated = True
            responses = ask_all(
                asked, self._server, self.policy_version, self._vocab_size, self._lifecycle, on_finished
            )
        self.stats = RolloutStats(
            num_prompt_tokens=sum(len(request.prompt_ids) for request in requests),
            num_response_tokens=sum(len(response.token_ids) for response in responses),
            max_running=min(len(requests), self._server.max_connections),
            seconds=time.perf_counter() - begin,
        )
        return responses

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`; all ranks call it.

        Raises:
            RolloutError: also a server that did not take the weights, and without ``server.weights_dir`` any update after the
                first responses.
        """
        with self._lifecycle.updating(version, keeps_copy=self._handover is not None):
            if self._handover is not None:
                self._handover.send(stream, version)
                return
            for _ in stream:  # The ranks gather the weights together.
                pass
            if self._has_generated:
                raise RolloutError(
                    f"The servers at {', '.join(self._server.url)} cannot be given the weights of policy {version}: "
                    f"{_KEY}.weights_dir is not set, so they would go on sampling from the model that they were started with. "
                    f"Set it and start them with VLLM_SERVER_DEV_MODE=1 and burnish's worker extension (docs/vllm.md), or use "
                    f"rollout.mode=async."
                )
            self._warn(
                f"The weights of {', '.join(self._server.url)} are taken for those of the policy: nothing proves it."
            )

    def weights_checksum(self) -> dict[str, int] | None:
        """See `BaseRollout`; None where nothing was handed over, and on every rank but the first."""
        return None if self._handover is None else self._handover.checksum()

    def sleep(self, level: int = 1) -> None:
        """Refuses to generate from now on; the servers do not sleep."""
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)

    def wake_up(self) -> None:
        """Ends ``sleep``."""
        self._lifecycle.wake_up()

    def _asked(self, request: RolloutRequest, sampling: SamplingParams) -> Asked:
        key = stream_key(sampling.seed, request.uid, 0)
        server = self._servers[key % len(self._servers)]  # The samples of one prompt share a server's cache.
        if not server.knows_log_probs(sampling):
            self._warn(f"{_unknown_log_probs(server, sampling)} They are NaN.")
        return Asked(request, sampling, server)

    def _check_training(self) -> None:
        """Training needs the log-probs of its responses, under the policy and under what they are sampled from."""
        config = self._config
        sampling = SamplingParams(
            max_new_tokens=max(1, config.min_new_tokens),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            do_sample=config.do_sample,
            min_new_tokens=config.min_new_tokens,
            eos_token_ids=(0,),
        )
        for server in self._servers:
            if not server.knows_log_probs(sampling):
                raise ConfigError(f"{_unknown_log_probs(server, sampling)} Training needs those.")
            if sampling.truncates:
                raise ConfigError(
                    f"Training needs the log-probs of responses under the policy and under what they are sampled from, but "
                    f"{server.client.url} reports one of the two. Leave top_p, top_k, min_p, repetition_penalty and "
                    f"min_new_tokens of actor_rollout_ref.rollout as they are by default, or set rollout.mode=async."
                )

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning("%s", sentence)


def _unknown_log_probs(server: ServerFacts, sampling: SamplingParams) -> str:
    sentence = (
        f"{server.client.url} reports log-probs of kind {server.log_probs!r}, which with temperature="
        f"{sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k} and the like are not those of "
        f"softmax(logits / temperature)."
    )
    if server.log_probs == "raw" and not sampling.truncates:
        return f"{sentence} Start it with --logprobs-mode processed_logprobs."
    if server.log_probs == "processed" and sampling.policy_temperature == 1:
        return f"{sentence} Start it with --logprobs-mode raw_logprobs."
    return sentence


def api_key(config: RolloutConfig) -> str | None:
    """The key that the servers ask for.

    Raises:
        ConfigError: the variable that should hold it is not set.
    """
    name = config.server.api_key_env
    if name is None:
        return None
    key = env.get(name)
    if not key:
        raise ConfigError(f"{_KEY}.api_key_env={name}: the environment has no such variable, or it is empty.")
    return key.strip()
