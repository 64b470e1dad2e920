"""One call of ``generate``: rounds of admitting, prefilling, decoding and releasing until every request is answered."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from burnish.rollout.base import FinishReason, RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.model_runner import ModelRunner
from burnish.rollout.native.sampler import sample, stream_key
from burnish.rollout.native.scheduler import PromptGroup, Scheduler
from burnish.rollout.native.slots import SlotState
from burnish.utils.errors import RolloutError


class Generation:
    """The state of one call.

    Args:
        take_aborts: gives the request ids that are to be aborted since the last call of it.
        finish: receives each response as soon as it is finished.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        slots: SlotState,
        sampling: SamplingParams,
        policy_version: int,
        take_aborts: Callable[[], set[str]],
        finish: Callable[[RolloutResponse], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._slots = slots
        self._sampling = sampling
        self._version = policy_version
        self._take_aborts = take_aborts
        self._finish = finish
        self._all_slots = torch.arange(slots.tokens.shape[0], device=runner.device)

    def run(self) -> None:
        """Until nothing waits and nothing runs. If it raises, the cache is freed: it may hold what must not be read."""
        try:
            while not self._scheduler.done:
                self._round()
        except BaseException:
            self._runner.cache.free()
            raise

    def _round(self) -> None:
        """Refills free slots, then decodes one token."""
        self._abort()
        while groups := self._scheduler.admit():
            self._prefill(groups)
        if self._scheduler.num_running:
            self._decode()

    def _prefill(self, groups: Sequence[PromptGroup]) -> None:
        """Prefills the groups and samples the first token of each of their responses."""
        logits, device = self._runner.prefill(groups), self._runner.device
        slots = torch.tensor([slot for group in groups for slot in group.slots], device=device)
        owner = torch.tensor([i for i, group in enumerate(groups) for _ in group.slots], device=device)
        prompt_lengths = torch.tensor([len(group.prompt_ids) for group in groups], device=device)
        requests = [request for group in groups for request in group.requests]
        seed = self._sampling.seed
        keys = [stream_key(seed, request.uid, request.sample_index) for request in requests]
        self._slots.start(slots, prompt_lengths[owner], torch.tensor(keys, device=device))
        self._sample(slots, logits[owner])

    def _decode(self) -> None:
        """One more token for every running sequence."""
        state, num_running = self._slots, self._scheduler.num_running
        if moves := self._scheduler.compact():
            self._runner.move(moves, int(state.lengths.max()))
            state.move(moves)
        lengths = state.lengths[:num_running]
        logits = self._runner.decode(state.tokens[:num_running], lengths, int(lengths.max()))
        lengths += 1
        self._sample(self._all_slots[:num_running], logits)

    def _sample(self, slots: Tensor, logits: Tensor) -> None:
        """Samples the next token of ``slots`` and answers the requests that it ends."""
        # The position of the token in its sequence, prompt included: a response that was cut and goes on with its
        # first part as prompt draws the numbers that it would have drawn.
        positions = self._slots.lengths[slots]
        tokens, log_probs = sample(logits, self._sampling, self._slots.keys[slots], positions)
        finite = torch.isfinite(log_probs)
        if not finite.all():
            self._raise_non_finite(slots[~finite].tolist())
        stopped, ended = self._slots.append(slots, tokens, log_probs)
        if ended.any():
            by_stop = stopped[ended].tolist()
            self._answer(slots[ended].tolist(), ["stop" if stop else "length" for stop in by_stop])

    def _answer(self, slots: list[int], reasons: Sequence[FinishReason]) -> None:
        """Releases the slots and hands out their responses."""
        outputs = self._slots.output(slots)
        requests = self._scheduler.release(slots)
        for request, (token_ids, log_probs), reason in zip(requests, outputs, reasons, strict=True):
            self._finish(RolloutResponse(request.request_id, token_ids, log_probs, reason, self._version))

    def _abort(self) -> None:
        """Answers the requests whose abortion was asked for."""
        if request_ids := self._take_aborts():
            slots, dropped = self._scheduler.abort(request_ids)
            if slots:
                self._answer(slots, ["abort"] * len(slots))
            for request in dropped:
                self._finish(RolloutResponse(request.request_id, [], [], "abort", self._version))

    def _raise_non_finite(self, slots: list[int]) -> None:
        requests: list[RolloutRequest] = [self._scheduler.request_in(slot) for slot in slots]
        length = int(self._slots.lengths[slots[0]])
        raise RolloutError(
            f"The model's logits are not finite for {len(requests)} of {self._scheduler.num_running} sequences, first "
            f"for request {requests[0].request_id!r} at position {length}. The weights of policy version "
            f"{self._version} or their dtype overflow; look at the last updates' grad_norm."
        )
