"""The native rollout engine: the policy decodes itself."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

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
    register_rollout,
)
from burnish.rollout.native.cache import bytes_per_token, memory_budget
from burnish.rollout.native.generation import Generation
from burnish.rollout.native.model_runner import ModelRunner
from burnish.rollout.native.scheduler import Scheduler
from burnish.rollout.native.slots import SlotState
from burnish.rollout.weights import load_weights
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
        self.policy_version = 0
        self._config = config
        self._memory_fraction = memory_fraction
        self._runner = ModelRunner(model, torch.device(device))
        self._asleep = False
        self._broken_update = False
        self._idle = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._aborted: deque[str] = deque()  # Filled from any thread, emptied by the one that generates.

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and response together that one sequence may have; None if nothing bounds it."""
        text = self._runner.model.config.get_text_config(decoder=True)
        limits = (getattr(text, "max_position_embeddings", None), self._config.max_model_len)
        return min((limit for limit in limits if limit is not None), default=None)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        self._check_usable()
        vocab_size = self._runner.model.get_input_embeddings().num_embeddings
        check_requests(requests, sampling, max_length=self.max_length, vocab_size=vocab_size)
        responses: dict[str, RolloutResponse] = {}

        def finish(response: RolloutResponse) -> None:
            responses[response.request_id] = response
            if on_finished is not None:
                on_finished(response)

        if requests:
            with self._exclusive("generate"), self._runner.inference(), self._abortable(requests):
                self._generation(requests, sampling, finish).run()
        return [responses[request.request_id] for request in requests]

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`."""
        with self._exclusive("update_weights"):
            self._broken_update = not self.shares_storage
            load_weights(self._runner.model, stream, copy=not self.shares_storage)
            self._broken_update = False
            self.policy_version = version

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        self._aborted.extend(self._running if request_ids is None else self._running.intersection(request_ids))

    def sleep(self, level: int = 1) -> None:
        """Frees the key-value cache. The weights stay at either level: they are the trained ones or filled anew.

        Raises:
            RolloutError: a level other than 1 or 2; the engine is generating.
        """
        if level not in (1, 2):
            raise RolloutError(f"sleep(level={level}): the level is 1 or 2.")
        with self._exclusive("sleep"):
            self._runner.cache.free()
            self._asleep = True

    def wake_up(self) -> None:
        """Ends ``sleep``; the cache is allocated again when requests come."""
        self._asleep = False

    @property
    def cache_bytes(self) -> int:
        """Memory that the key-value cache holds now."""
        return self._runner.cache.nbytes

    def _generation(self, requests: Sequence[RolloutRequest], sampling: SamplingParams, finish: OnFinished) -> Generation:
        num_slots = self._num_slots(requests, sampling)
        return Generation(
            runner=self._runner,
            scheduler=Scheduler(requests, num_slots, self._config.max_num_batched_tokens),
            slots=SlotState(num_slots, sampling, self._runner.device),
            sampling=sampling,
            policy_version=self.policy_version,
            pending_aborts=self._take_aborts,
            finish=finish,
        )

    def _num_slots(self, requests: Sequence[RolloutRequest], sampling: SamplingParams) -> int:
        """How many sequences run at once: as configured, unless their cache at full length passes the memory budget."""
        model, fraction = self._runner.model, self._memory_fraction
        longest = max(len(request.prompt_ids) for request in requests) + sampling.max_new_tokens
        sequence_bytes = longest * bytes_per_token(model.config, model.dtype)
        budget = memory_budget(self._runner.device, fraction, model) + self.cache_bytes
        if budget < sequence_bytes:
            raise RolloutError(
                f"One sequence of {longest} tokens needs {sequence_bytes / 2**20:.0f} MiB of key-value cache, but "
                f"the rollout's share of the device's memory ({fraction:.0%}) leaves {max(0, budget) / 2**20:.0f} MiB "
                f"beside the weights. Shorten the prompt or max_new_tokens."
            )
        return min(self._config.max_num_seqs, len(requests), budget // sequence_bytes)

    def _check_usable(self) -> None:
        if self._asleep:
            raise RolloutError("The rollout engine is asleep and cannot generate; call wake_up() first.")
        if self._broken_update:
            raise RolloutError(
                "The last update_weights failed half-way, so the rollout's weights are of no one policy; update them again."
            )

    def _take_aborts(self) -> set[str]:
        return {self._aborted.popleft() for _ in range(len(self._aborted))}

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """One of generate, update_weights and sleep at a time."""
        if not self._idle.acquire(blocking=False):
            raise RolloutError(f"{what} was called while the rollout engine is generating or updating its weights.")
        try:
            yield
        finally:
            self._idle.release()

    @contextmanager
    def _abortable(self, requests: Sequence[RolloutRequest]) -> Iterator[None]:
        """While these requests run, ``abort`` knows them; a run that fails leaves neither requests nor cache behind."""
        self._aborted.clear()
        self._running = frozenset(request.request_id for request in requests)
        try:
            yield
        except BaseException:
            self._runner.cache.free()
            raise
        finally:
            self._running = frozenset()
