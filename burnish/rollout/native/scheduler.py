"""Which request runs in which slot: plain Python, no tensors."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burnish.rollout.base import RolloutRequest


@dataclass(slots=True)
class PromptGroup:
    """Requests with the same prompt, admitted together: prefilled once, then one slot each."""

    prompt_ids: Sequence[int]
    requests: list[RolloutRequest]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Move:
    """A running sequence changes its slot."""

    source: int
    target: int


class Scheduler:
    """Continuous refill, first come first served: a slot that becomes free is given to the next waiting request.

    A round is: ``admit`` until it returns nothing, ``compact``, decode slots ``0 .. num_running - 1``, ``release``.

    Args:
        requests: in the order in which they start.
        num_slots: sequences that run at the same time.
        max_prefill_tokens: prompt tokens of one prefill; a longer prompt is prefilled alone.
    """

    def __init__(self, requests: Iterable[RolloutRequest], num_slots: int, max_prefill_tokens: int) -> None:
        self._waiting = deque(requests)
        self._running: dict[int, RolloutRequest] = {}
        self._free = list(range(num_slots))  # A heap: the lowest slots first, so that running slots stay together.
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def request_in(self, slot: int) -> RolloutRequest:
        """The request that runs in ``slot``."""
        return self._running[slot]

    def admit(self) -> list[PromptGroup]:
        """Gives free slots to waiting requests, as many as one prefill takes; an empty list when none can start."""
        groups: dict[tuple[int, ...], PromptGroup] = {}
        num_tokens = 0
        while self._waiting and self._free:
            prompt = tuple(self._waiting[0].prompt_ids)
            group = groups.get(prompt)
            if group is None:
                num_tokens += len(prompt)
                if groups and num_tokens > self._max_prefill_tokens:
                    break
                group = groups[prompt] = PromptGroup(prompt, [], [])
            request, slot = self._waiting.popleft(), heapq.heappop(self._free)
            self._running[slot] = request
            group.requests.append(request)
            group.slots.append(slot)
        return list(groups.values())

    def release(self, slots: Iterable[int]) -> list[RolloutRequest]:
        """Takes the slots of finished sequences back; returns their requests."""
        released = []
        for slot in slots:
            released.append(self._running.pop(slot))
            heapq.heappush(self._free, slot)
        return released

    def compact(self) -> list[Move]:
        """Moves running sequences from the end into free slots, so that ``0 .. num_running - 1`` are the running ones.

        The sources and the targets of the moves are disjoint.
        """
        num_running = len(self._running)
        targets = [slot for slot in self._free if slot < num_running]
        if not targets:
            return []
        sources = [slot for slot in self._running if slot >= num_running]
        moves = [Move(source, target) for source, target in zip(sorted(sources), sorted(targets), strict=True)]
        for move in moves:
            self._running[move.target] = self._running.pop(move.source)
        self._free = sorted({*self._free, *sources} - set(targets))  # A sorted list is a heap.
        return moves

    def abort(self, request_ids: set[str]) -> tuple[list[int], list[RolloutRequest]]:
        """Running slots of these requests (still held: ``release`` them), and the waiting ones, which are dropped."""
        slots = [slot for slot, request in self._running.items() if request.request_id in request_ids]
        dropped = [request for request in self._waiting if request.request_id in request_ids]
        if dropped:
            self._waiting = deque(request for request in self._waiting if request.request_id not in request_ids)
        return slots, dropped
