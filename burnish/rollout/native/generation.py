"""Rounds of admitting, prefilling, decoding and releasing until every request is answered."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from burnish.model.attention import PackedContext
from burnish.rollout.base import FinishReason, RolloutResponse
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.rows import Rows, Status, Window
from burnish.rollout.native.runner import DecodeRunner, ModelRunner, first_non_finite
from burnish.rollout.native.scheduler import Scheduler
from burnish.rollout.native.scheduler import Sequence as RunningSequence
from burnish.rollout.stats import RolloutStats
from burnish.rollout.stopping import StopStrings
from burnish.utils import progress
from burnish.utils.errors import RolloutError

OnTokens = Callable[[str, list[int], list[float]], None]

_REASONS: dict[int, FinishReason] = {Status.STOP: "stop", Status.LENGTH: "length"}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Thousands of new lists would make Python look for garbage cycles among millions of token ids, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Generation:
    """What runs and waits in one call of ``generate``, or in one session.

    Args:
        window: decode steps between two looks of the host. A sequence that ends inside a window leaves its row idle to
            the window's end.
        allocate: makes that many blocks of the cache again, after they were freed while paused.
        finish: receives each response as soon as it is finished.
        on_tokens: receives (request id, token ids, log-probs) of every window.
        tokenizer: for stop strings.
    """

    def __init__(
        self,
        runner: ModelRunner,
        decoder: DecodeRunner,
        scheduler: Scheduler,
        rows: Rows,
        lifecycle: Lifecycle,
        *,
        window: int,
        allocate: Callable[[int], None],
        finish: Callable[[RolloutResponse], None],
        on_tokens: OnTokens | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._runner, self._decoder, self._scheduler, self._rows = runner, decoder, scheduler, rows
        self._lifecycle, self._window, self._finish, self._on_tokens = lifecycle, window, finish, on_tokens
        self._tokenizer = tokenizer
        self._num_blocks, self._allocate = decoder.cache.num_blocks, allocate
        self._stops: dict[RunningSequence, StopStrings] = {}
        self._version, self._num_updates = lifecycle.policy_version, lifecycle.num_updates
        self.stats = RolloutStats(cache_bytes=decoder.cache.nbytes)

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self._scheduler.done

    def add(self, sequences: Sequence[RunningSequence]) -> None:
        """These wait from now on."""
        for sequence in sequences:
            if sequence.sampling.stop:
                stop, after = sequence.sampling.stop, sequence.sampling.min_new_tokens
                self._stops[sequence] = StopStrings(self._tokenizer, stop, after)
        self._scheduler.add(sequences)
        self.stats.num_prompt_tokens += sum(len(sequence.prompt_ids) for sequence in sequences)

    def round(self, arrivals: Callable[[], Sequence[RunningSequence]] = tuple) -> None:
        """Refills free rows, then decodes a window.

        Args:
            arrivals: gives the sequences that came since the last round.
        """
        self._stand_still_while_paused()
        aborted = self._lifecycle.take_aborts()
        # Afterwards, so that whoever was added and aborted meanwhile has arrived.
        self.add(arrivals())
        self._abort(aborted)
        self._admit()
        if len(self._rows):
            self._decode()

    def _admit(self) -> None:
        """Prefills and starts whatever fits."""
        start, prefilled = time.perf_counter(), False
        while True:
            chunks = self._scheduler.next_prefill()
            if chunks:
                self._runner.prefill(self._decoder.cache, chunks)
                progress.tick()
                self.stats.num_prefilled_tokens += sum(len(chunk.token_ids) for chunk in chunks)
                prefilled = True
            started, copies = self._scheduler.start()
            if copies:
                longest = max(copy.num_tokens for copy in copies)
                self._copy_blocks([(copy.source, copy.target) for copy in copies], longest)
            self._rows.append(started)
            if not chunks and not started:
                break
        if prefilled and self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.max_running = max(self.stats.max_running, len(self._rows))

    def _decode(self) -> None:
        """A window of decode steps for every row."""
        progress.tick()
        start = time.perf_counter()
        rows = self._rows
        steps = min(self._window, int(rows.remaining.max()))
        self._grow(steps)
        self._close_gaps()
        variant = (self._decoder.padded(len(rows)), rows.truncates, rows.penalises)
        if rows.penalises:
            self._decoder.state.remember_seen(self._runner.vocab_size)
        self._decoder.hold_stops(rows.num_stops)
        self._decoder.ready(variant)
        rows.upload(self._decoder.state, variant[0])
        self._decoder.run(variant, steps)
        window = rows.read(self._decoder.state, steps, rows.truncates)
        self.stats.num_steps += steps
        self.stats.decode_seconds += time.perf_counter() - start
        self._take(window)

    def _grow(self, steps: int) -> None:
        """Blocks for what the window stores; where they run out, the youngest sequences go back to waiting."""
        rows, block_size = self._rows, self._decoder.cache.block_size
        needed = rows.lengths + np.minimum(steps, rows.remaining)
        short: list[int] = np.flatnonzero(needed > rows.num_blocks * block_size).tolist()
        if not short:
            return
        needs = [(rows.sequences[row], int(needed[row])) for row in short]
        preempted = self._scheduler.grow(needs)
        for row in short:
            rows.add_blocks(row)
        if preempted:
            self._requeue(preempted)

    def _requeue(self, preempted: Sequence[RunningSequence]) -> None:
        leaving = set(preempted)
        places = [row for row, sequence in enumerate(self._rows.sequences) if sequence in leaving]
        self._scheduler.requeue(self._rows.remove(places, self._version))
        self.stats.num_preemptions += len(preempted)

    def _close_gaps(self) -> None:
        """Where a block holds a whole sequence: running ones in adjacent blocks, so that attention reads them in place."""
        rows = self._rows
        if not rows.one_block_each:
            return
        copies = self._scheduler.compact()
        if copies:
            # Of a running sequence the scheduler says the whole block; what is filled of it, the rows know.
            filled = [copy.num_tokens for copy in copies if copy.num_tokens < self._decoder.cache.block_size]
            longest = max(int(rows.lengths.max()), *filled, 1)
            self._copy_blocks([(copy.source, copy.target) for copy in copies], longest)
            for row in range(len(rows)):
                rows.set_blocks(row)
        rows.reorder(np.argsort([sequence.blocks[0] for sequence in rows.sequences]).tolist())

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]], num_tokens: int) -> None:
        self._decoder.cache.copy_blocks([source for source, _ in pairs], [target for _, target in pairs], num_tokens)

    def _take(self, window: Window) -> None:
        """Hands out what a window gave."""
        if (window.status == Status.NON_FINITE).any():
            self._raise_non_finite(np.flatnonzero(window.status == Status.NON_FINITE))
        ended: dict[int, tuple[FinishReason, int | str | None]] = {}
        for row in np.flatnonzero(window.status != Status.RUNNING).tolist():
            reason = _REASONS[int(window.status[row])]
            last = int(window.tokens[window.counts[row] - 1, row])
            ended[row] = (reason, last if reason == "stop" else None)
        counts = self._find_stop_strings(window, ended)
        if self._on_tokens is not None:
            for row, count in enumerate(counts.tolist()):
                if count:
                    ids, log_probs = window.tokens[:count, row].tolist(), window.log_probs[:count, row].tolist()
                    self._on_tokens(self._rows.sequences[row].request.request_id, ids, log_probs)
        if ended:
            self._answer(ended)

    def _find_stop_strings(self, window: Window, ended: dict[int, tuple[FinishReason, int | str | None]]) -> np.ndarray:
        """Ends the rows whose text now holds a stop string; returns the tokens of the window that each row keeps."""
        counts = window.counts
        if not self._stops:
            return counts
        for row, sequence in enumerate(self._rows.sequences):
            if sequence not in self._stops or not window.counts[row]:
                continue
            hit = self._stops[sequence].feed(window.tokens[: window.counts[row], row].tolist())
            if hit is not None:
                counts = counts.copy() if counts is window.counts else counts
                counts[row] = hit.index + 1
                self._rows.cut(row, self._rows.num_sampled(row) - int(window.counts[row]) + hit.index + 1)
                ended[row] = ("stop", hit.stop)
        return counts

    def _answer(self, ended: dict[int, tuple[FinishReason, int | str | None]]) -> None:
        """Releases the rows and hands out their responses."""
        with _without_collection():
            sequences = self._rows.remove(list(ended), self._version)
        self._scheduler.release(sequences)
        for sequence, (reason, stop_reason) in zip(sequences, ended.values(), strict=True):
            self._respond(sequence, reason, stop_reason)

    def _respond(self, sequence: RunningSequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._stops.pop(sequence, None)
        self.stats.num_response_tokens += len(sequence.token_ids)
        self._lifecycle.discharge(sequence.request.request_id)
        versions = tuple((version, count) for version, count in sequence.versions)
        self._finish(
            RolloutResponse(
                sequence.request.request_id,
                sequence.token_ids,
                sequence.log_probs,
                reason,
                versions[0][0] if versions else self._version,
                policy_versions=versions,
                truncated_log_probs=sequence.truncated_log_probs if sequence.sampling.truncates else None,
                stop_reason=stop_reason,
                num_preemptions=sequence.num_preemptions,
            )
        )

    def _abort(self, request_ids: set[str]) -> None:
        """Answers the requests whose abortion was asked for."""
        if not request_ids:
            return
        waiting = self._scheduler.take_waiting(request_ids)
        names = [sequence.request.request_id for sequence in self._rows.sequences]
        rows = [row for row, name in enumerate(names) if name in request_ids]
        if rows:
            self._answer(dict.fromkeys(rows, ("abort", None)))
        for sequence in waiting:
            self._respond(sequence, "abort", None)

    def _stand_still_while_paused(self) -> None:
        """Lets an update happen; after it everything that was computed with the old weights is computed again."""
        if not self._lifecycle.stand_still_while_paused():
            return
        # Others may have written the weights: copies of them are made anew.
        self._runner.linears.drop()
        self._decoder.follow_weights()
        if self._lifecycle.num_updates != self._num_updates or not self._decoder.cache.num_blocks:
            self.forget_cache()

    def forget_cache(self) -> None:
        """What the cache holds is of no use any more: every sequence is prefilled again, with the tokens that it has."""
        running = self._scheduler.running
        if running:
            self._requeue(running)
        self._scheduler.drop_prefixes()
        if not self._decoder.cache.num_blocks:
            self._allocate(self._num_blocks)
        self._version, self._num_updates = self._lifecycle.policy_version, self._lifecycle.num_updates

    def _raise_non_finite(self, rows: Iterable[int]) -> None:
        broken = {self._rows.sequences[row]: row for row in rows}
        sequence = next(sequence for sequence in self._scheduler.running if sequence in broken)
        count, num_running = self._rows.num_sampled(broken[sequence]), len(self._rows)
        self._rows.remove([broken[sequence]], self._version)  # Writes its tokens back.
        context = sequence.context[: len(sequence.context) - 1] if count else sequence.context
        where = first_non_finite(self._runner.model, context, PackedContext([len(context)], self._runner.device))
        raise RolloutError(
            f"The model's logits are not finite for {len(broken)} of {num_running} sequences, first for request "
            f"{sequence.request.request_id!r} at position {len(context)}. The first tensor that is not finite is "
            f"{where or 'the logits'}. The weights of policy version {self._version} or their dtype overflow; look at the "
            f"last updates' grad_norm."
        )
