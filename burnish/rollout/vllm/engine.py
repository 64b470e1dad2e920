"""`VLLMRollout`: vLLM behind `BaseRollout`, whatever drives it."""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from burnish.config import ActorRolloutRefConfig, RolloutConfig
from burnish.model.lora import adapter_config
from burnish.rollout.base import (
    OnFinished,
    RolloutRequest,
    RolloutResponse,
    SamplingParams,
    WeightStream,
    check_requests,
    register_rollout,
)
from burnish.rollout.build import TrainedPolicy, ranks_per_engine, rollout_dtype
from burnish.rollout.lifecycle import Lifecycle, OnLifecycle
from burnish.rollout.stats import RolloutStats
from burnish.rollout.vllm.arguments import VLLMModel, engine_arguments, engine_environment, sequence_length
from burnish.rollout.vllm.core import Core
from burnish.rollout.vllm.expected import Expected
from burnish.rollout.vllm.installed import check_installed
from burnish.rollout.vllm.placement import IdleCore, engine_gpus, place
from burnish.rollout.vllm.requests import Finished, prepare, to_response
from burnish.utils import storage
from burnish.utils.errors import RolloutError
from burnish.utils.model_folder import config_folder

_PARTS = frozenset(("weights", "kv_cache"))


@register_rollout("vllm")
class VLLMRollout(OnLifecycle):
    """Generates with vLLM, which always has a copy of the weights; every token is drawn by burnish.

    Where several ranks are one engine all of them make one of these and call the same methods with the same arguments. With
    ``mode=async`` only the first of them drives the engine, and what the others return means nothing.

    Args:
        model: what the policy's model is.
        config: ``mode`` says where vLLM runs: sync in this process, async in processes of its own.
        device: where it computes.
        tokenizer: the model's, for stop strings.
        adapters: of a policy with adapters their configuration, as `burnish.model.lora.adapter_config` gives it.
        core: the engine itself, in place of one made from ``config``.

    Raises:
        RolloutError: vLLM is not installed, or does not start.
        ConfigError: keys that contradict each other or the model.
    """

    shares_storage = False

    def __init__(
        self,
        model: VLLMModel,
        config: RolloutConfig,
        *,
        device: torch.device | str = "cpu",
        tokenizer: Any = None,
        adapters: Mapping[str, Any] | None = None,
        core: Core | None = None,
    ) -> None:
        self.stats = RolloutStats()
        """Of the last ``generate``."""
        self.lost_weights = False
        """See `BaseRollout`."""
        self._config = config
        self._tokenizer = tokenizer
        self._has_adapters = adapters is not None
        self._lifecycle = Lifecycle(shares_storage=False)
        self._max_length = sequence_length(model.config, config)
        # vLLM sleeps only on a GPU, and only where it was started for it.
        self._can_sleep = torch.device(device).type == "cuda" and config.free_cache_engine
        self._asleep: frozenset[str] = frozenset()
        self._core = core if core is not None else make_core(model, config, torch.device(device), tokenizer)
        self._expected = Expected(model.config, has_adapters=self._has_adapters)
        if adapters is not None:
            self._core.call("use_adapters", dict(adapters))

    @classmethod
    def for_policy(
        cls,
        policy: TrainedPolicy,
        config: ActorRolloutRefConfig,
        device: torch.device | str,
        tokenizer: Any = None,
    ) -> "VLLMRollout":
        """The engine of a trained model; see `burnish.rollout.build.build_rollout`."""
        trained = policy.module.model
        adapters = adapter_config(trained)
        model = VLLMModel(
            path=config_folder(storage.localize(config.model.path)),
            config=copy.deepcopy(trained.config),
            dtype=rollout_dtype(policy, config.rollout),
            trust_remote_code=config.model.trust_remote_code,
            override_config=config.model.override_config,
            lora_rank=0 if adapters is None else int(adapters["r"]),
        )
        return cls(model, config.rollout, device=device, tokenizer=tokenizer, adapters=adapters)

    @property
    def core(self) -> Core:
        """What drives vLLM."""
        return self._core

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        with self._lifecycle.generating(request.request_id for request in requests):
            if self.lost_weights:
                raise RolloutError(
                    "The vLLM engine forgot its weights in its sleep (level 2); update_weights comes first."
                )
            check_requests(
                requests,
                sampling,
                max_length=self._max_length,
                vocab_size=self._expected.vocab_size,
                has_tokenizer=self._tokenizer is not None,
            )
            self.stats, begin = RolloutStats(), time.perf_counter()
            version = self.policy_version
            responses: dict[str, RolloutResponse] = {}

            def finish(finished: Finished) -> None:
                response = to_response(finished, version)
                responses[response.request_id] = response
                self._lifecycle.discharge(response.request_id)
                if on_finished is not None:
                    on_finished(response)

            if requests:
                prepared = [
                    prepare(request, request.sampling or sampling, with_adapters=self._has_adapters)
                    for request in requests
                ]
                self._core.run(prepared, finish, self._between_steps)
            ordered = [responses[request.request_id] for request in requests]
            self._count(requests, ordered, time.perf_counter() - begin)
        return ordered

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`. An engine that sleeps wakes up as far as its weights go."""
        with self._lifecycle.updating(version) as needed_base:
            self._wake(frozenset(("weights",)))
            checked = self._expected.check(stream, has_base=not needed_base)
            bucket_bytes = self._config.checkpoint_engine.update_weights_bucket_megabytes << 20
            self._core.send(checked, bucket_bytes, version)
            self.lost_weights = False

    def weights_checksum(self) -> dict[str, int] | None:
        """See `BaseRollout`.

        Raises:
            RolloutError: two ranks of the engine hold different weights.
        """
        of_ranks = self._core.call("fingerprints")
        if not of_ranks:
            return None
        checksum: dict[str, int] = of_ranks[0]
        for rank, other in enumerate(of_ranks[1:], start=1):
            differing = [name for name in checksum if name in other and other[name] != checksum[name]]
            if differing:
                raise RolloutError(
                    f"Of the vLLM engine's {len(of_ranks)} ranks, rank {rank} holds other values of {differing[0]!r} than "
                    f"rank 0: they would sample from different policies."
                )
        return checksum

    def pause(self) -> None:
        """Stops generating before the next step; ``update_weights`` may then be called. See `Lifecycle.pause`."""
        self._lifecycle.pause()
        self._core.pause()

    def resume(self) -> None:
        """Ends ``pause``: running responses go on, with the weights that are there now."""
        self._core.resume()
        self._lifecycle.resume()

    def sleep(self, level: int = 1) -> None:
        """See `BaseRollout.sleep`; level 1 keeps the weights in the computer's memory, level 2 forgets them.

        On a CPU, and with ``free_cache_engine=false``, everything stays where it is.
        """
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)
            if not self._can_sleep or self._asleep == _PARTS:
                return
            self._wake(_PARTS)  # vLLM falls asleep as a whole.
            self._core.sleep(level)
            self._asleep = _PARTS
            if level == 2:
                self.lost_weights = self._lifecycle.needs_base = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Makes the engine usable again.

        Args:
            tags: only these parts: ``weights``, or ``kv_cache``, without which it does not generate. None: all.
        """
        parts = _PARTS if tags is None else frozenset(tags)
        if unknown := sorted(parts - _PARTS):
            raise RolloutError(f"wake_up(tags={list(tags or ())}): {unknown[0]!r} is none of {sorted(_PARTS)}.")
        self._wake(parts)
        if not self._asleep:
            self._lifecycle.wake_up()

    def close(self) -> None:
        """Ends the engine and its processes."""
        self._core.close()

    def _wake(self, parts: frozenset[str]) -> None:
        if there := sorted(parts & self._asleep):
            self._core.wake_up(there)
            self._asleep -= parts

    def _between_steps(self) -> set[str]:
        self._lifecycle.stand_still_while_paused()
        return self._lifecycle.take_aborts()

    def _count(self, requests: Sequence[RolloutRequest], responses: Sequence[RolloutResponse], seconds: float) -> None:
        core = self._core
        num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.stats = RolloutStats(
            num_prompt_tokens=num_prompt_tokens,
            num_prefilled_tokens=core.num_prefilled_tokens,
            num_response_tokens=sum(len(response.token_ids) for response in responses),
            num_steps=core.num_steps,
            num_preemptions=sum(response.num_preemptions for response in responses),
            seconds=seconds,
            prefill_seconds=core.prefill_seconds,
            decode_seconds=core.decode_seconds,
            max_running=core.max_running,
            cache_bytes=core.cache_bytes,
        )


def make_core(model: VLLMModel, config: RolloutConfig, device: torch.device, tokenizer: Any) -> Core:
    """The engine that ``config`` asks for; all ranks call it.

    Raises:
        RolloutError: vLLM is not installed, or does not start.
        ConfigError: keys that contradict each other or the model.
    """
    check_installed()
    in_process = config.mode == "sync"
    environment = engine_environment(in_process=in_process, on_cpu=device.type == "cpu")
    arguments = engine_arguments(model, config, device, in_process=in_process)
    if in_process:
        from burnish.rollout.vllm.in_process import InProcessCore

        return InProcessCore(arguments, environment, tokenizer)
    num_ranks = ranks_per_engine(config)
    if gpus := engine_gpus(num_ranks, device):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if place()[0] % num_ranks:
        return IdleCore()
    from burnish.rollout.vllm.process import ProcessCore

    return ProcessCore(arguments, environment, tokenizer=tokenizer, device=device, timeout=config.engine_timeout)
