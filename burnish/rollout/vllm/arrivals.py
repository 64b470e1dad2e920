"""What comes from an engine in another process, on its way from the thread that listens to the one that waits for responses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from burnish.rollout.vllm.requests import Finished, Progress
from burnish.utils.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One of three: tokens of a request, how many it had when the policy changed, or what became of it."""

    request_id: str
    version: int
    """The policy that the engine held when this came."""
    output: Any = None
    """vLLM's ``CompletionOutput``."""
    mark: int | None = None
    """Tokens that it had when the policy ``version`` was replaced."""
    error: Exception | None = None
    num_cached_tokens: int = 0
    """Of its prompt, in the prefix cache."""


@dataclass(slots=True)
class Running:
    """A request in the engine."""

    progress: Progress
    cumulative: bool
    """Its tokens come all at once at its end; else as they are sampled."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens that it had when that version was replaced), in order."""

    def take(self, arrival: Arrival) -> Finished | None:
        """Takes tokens.

        Returns:
            The request, if it is over. One that a stop string ended is not over for the engine, and must be aborted there.

        Raises:
            RolloutError: logits that are not finite, or vLLM gave the request up.
        """
        output, progress = arrival.output, self.progress
        token_ids = list(output.token_ids)
        columns = columns_of(output.logprobs, len(token_ids), 1 if progress.truncated is None else 2)
        for version, start, end in self._stretches(len(token_ids), arrival.version):
            truncated = None if progress.truncated is None else columns[1][start:end]
            stop = progress.take(token_ids[start:end], columns[0][start:end], truncated, version)
            if stop is not None:
                return progress.finished("stop", stop)
        if output.finish_reason is None:
            return None
        if output.finish_reason == "abort":
            return progress.finished(progress.abort_or_length)
        if output.finish_reason not in ("stop", "length"):
            raise RolloutError(
                f"vLLM ended request {arrival.request_id!r} with the reason {output.finish_reason!r}, in the middle of its "
                f"response."
            )
        return progress.finished(output.finish_reason, output.stop_reason)

    def _stretches(self, num_tokens: int, version: int) -> Iterator[tuple[int, int, int]]:
        """(version, first token, end) of each stretch that one policy sampled."""
        if not self.cumulative:
            yield version, 0, num_tokens
            return
        ends = [*((marked, min(count, num_tokens)) for marked, count in self.marks), (version, num_tokens)]
        for (_, start), (marked, end) in itertools.pairwise([(version, 0), *ends]):
            if end > start:
                yield marked, start, end


class StepCounter:
    """Counts an engine's steps by what comes of them; stands in front of ``process_outputs`` of vLLM's output processor.

    Args:
        processor: vLLM's ``OutputProcessor``.
    """

    def __init__(self, processor: Any) -> None:
        self._states, self._process = processor.request_states, processor.process_outputs
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self.num_steps = self.max_running = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._step, self._running = time.monotonic(), 0

    def __call__(self, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
        """What ``process_outputs`` returns. vLLM may give the outputs of one step, which have one timestamp, in parts."""
        if outputs and timestamp is not None:
            if timestamp != self._step:
                self.num_steps += 1
                seconds, self._step, self._running = max(0.0, timestamp - self._step), timestamp, 0
                if any(self._is_first(output.request_id) for output in outputs):
                    self.prefill_seconds += seconds
                else:
                    self.decode_seconds += seconds
            self._running += len(outputs)
            self.max_running = max(self.max_running, self._running)
        return self._process(outputs, timestamp, *args, **kwargs)

    def _is_first(self, request_id: str) -> bool:
        state = self._states.get(request_id)
        return state is not None and state.detokenizer.num_output_tokens() == 0


def columns_of(log_probs: Any, num_tokens: int, num_columns: int) -> list[list[float]]:
    """The log-probs of the last ``num_tokens`` tokens, a list for each column of vLLM's ``FlatLogprobs``."""
    if not num_tokens:
        return [[] for _ in range(num_columns)]
    flat = log_probs.logprobs[-num_tokens * num_columns :]
    return [flat[column::num_columns] for column in range(num_columns)]
