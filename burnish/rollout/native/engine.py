"""The native rollout engine: the policy decodes itself."""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.base import (
    OnFinished,
    RolloutRequest,
    RolloutResponse,
    SamplingParams,
    WeightStream,
    check_requests,
    max_sequence_length,
    register_rollout,
)
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.cache import bytes_per_token, memory_budget
from burnish.rollout.native.generation import Generation
from burnish.rollout.native.model_runner import ModelRunner
from burnish.rollout.native.scheduler import Scheduler
from burnish.rollout.native.slots import SlotState
from burnish.utils.errors import RolloutError


@register_rollout("native")
class NativeRollout:
    """Generates with a Hugging Face causal LM, many sequences at once, each finished one replaced by a waiting one.

    A response depends on its request, the sampling parameters and the weights alone, not on what else is in the batch,
    in which order, or how many run at once (up to rounding in matrix products).

    Args:
        model: from `burnish.model.load`. With ``shares_storage`` the very module that is trained; otherwise the
            engine's own, which nobody else writes and ``update_weights`` fills.
        config: reads max_num_seqs, max_num_batched_tokens and max_model_len.
        device: where the model's weights are.
        memory_fraction: share of the device's memory that the weights and the key-value cache may take together; fewer
            than max_num_seqs run at once where their cache would not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        *,
        shares_storage: bool,
        device: torch.device | str = "cpu",
        memory_fraction: float = 0.5,
    ) -> None:
        self.shares_storage = shares_storage
        self._config = config
        self._memory_fraction = memory_fraction
        self._runner = ModelRunner(model, torch.device(device))
        self._lifecycle = Lifecycle(shares_storage=shares_storage)

    @property
    def policy_version(self) -> int:
        """The version of the weights it samples from."""
        return self._lifecycle.policy_version

    @property
    def cache_bytes(self) -> int:
        """Memory that the key-value cache holds now."""
        return self._runner.cache.nbytes

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        responses: dict[str, RolloutResponse] = {}

        def finish(response: RolloutResponse) -> None:
            responses[response.request_id] = response
            if on_finished is not None:
                on_finished(response)

        with self._lifecycle.generating(requests):
            model = self._runner.model
            check_requests(
                requests,
                sampling,
                max_length=max_sequence_length(model.config, self._config.max_model_len),
                vocab_size=model.get_input_embeddings().weight.shape[0],  # type: ignore[union-attr, index, arg-type]
            )
            if requests:
                with self._runner.inference():
                    self._generation(requests, sampling, finish).run()
        return [responses[request.request_id] for request in requests]

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`."""
        self._lifecycle.update_weights(self._runner.model, stream, version)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        self._lifecycle.abort(request_ids)

    def sleep(self, level: int = 1) -> None:
        """Frees the key-value cache. The weights stay at either level: they are the trained ones, or filled anew."""
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)
            self._runner.cache.free()

    def wake_up(self) -> None:
        """Ends ``sleep``; the cache is allocated again when requests come."""
        self._lifecycle.wake_up()

    def _generation(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, finish: OnFinished
    ) -> Generation:
        longest = max(len(request.prompt_ids) for request in requests) + sampling.max_new_tokens
        num_slots = min(self._config.max_num_seqs, len(requests), self._slots_that_fit(longest))
        self._runner.cache.begin(num_slots, longest)
        return Generation(
            runner=self._runner,
            scheduler=Scheduler(requests, num_slots, self._config.max_num_batched_tokens),
            slots=SlotState(num_slots, sampling, self._runner.device),
            sampling=sampling,
            policy_version=self.policy_version,
            take_aborts=self._lifecycle.take_aborts,
            finish=finish,
        )

    def _slots_that_fit(self, length: int) -> int:
        """How many sequences of ``length`` tokens the memory budget holds, all at their full length."""
        model = self._runner.model
        sequence_bytes = length * bytes_per_token(model.config, model.dtype)
        budget = memory_budget(self._runner.device, self._memory_fraction, model, self.cache_bytes)
        if budget < sequence_bytes:
            raise RolloutError(
                f"One sequence of {length} tokens needs {sequence_bytes / 2**20:.0f} MiB of key-value cache, but the "
                f"rollout's share of the device's memory ({self._memory_fraction:.0%}) leaves "
                f"{max(0, budget) / 2**20:.0f} MiB beside the weights. Shorten the prompt or max_new_tokens."
            )
        return budget // sequence_bytes
