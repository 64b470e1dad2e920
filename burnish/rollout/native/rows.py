"""Running sequences as rows: the host's arrays, which are the truth, and their copies on the device for one window.

A window is a number of decode steps that the device makes without the host. Before it every array is uploaded, after it
the host reads which tokens each row got and why it ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from burnish.rollout.native.paged_cache import SCRATCH_BLOCK
from burnish.rollout.native.sampler import stream_key
from burnish.rollout.native.scheduler import Sequence as RunningSequence


class Status(IntEnum):
    """What became of a row in a window."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NON_FINITE = 3
    IDLE = 4


# Name, numpy dtype, value in an idle row. ``lengths`` counts tokens in the cache; it is also the newest token's position.
_FIELDS: tuple[tuple[str, type, float], ...] = (
    ("tokens", np.int64, 0),
    ("lengths", np.int32, 0),
    ("remaining", np.int32, 0),
    ("min_remaining", np.int32, 0),
    ("keys", np.int64, 0),
    ("temperature", np.float32, 1),
    ("top_k", np.int32, 0),
    ("top_p", np.float32, 1),
    ("min_p", np.float32, 0),
    ("repetition_penalty", np.float32, 1),
    ("status", np.int8, Status.IDLE),
)


class DecodeState:
    """One entry a row, on the device, at addresses that stay: captured graphs read and write them.

    Attributes:
        tokens: int64 [rows], the newest token, which is not in the cache.
        lengths: int32 [rows], tokens in the cache.
        remaining: int32 [rows], tokens that the response may still get.
        min_remaining: int32 [rows], tokens that it must still get before one may end it.
        keys: int64 [rows], the random stream.
        temperature, top_p, min_p, repetition_penalty: fp32 [rows]; top_k: int32 [rows]. A temperature of 0 is greedy.
        stop_ids: int32 [rows, stops], padded with -1.
        status: int8 [rows], see `Status`.
        block_tables: int32 [rows, blocks].
        seen: bool [rows, vocab], tokens that a repetition penalty applies to; None until a row has one.
        step: int64 [1], steps made in this window.
        window_tokens: int32 [window, rows], -1 where a row was not running.
        window_log_probs, window_truncated: fp32 [window, rows].
    """

    tokens: Tensor
    lengths: Tensor
    remaining: Tensor
    min_remaining: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    status: Tensor

    def __init__(self, num_rows: int, window: int, table_width: int, num_stops: int, device: torch.device) -> None:
        self.num_rows, self.window, self.device = num_rows, window, device
        for name, dtype, idle in _FIELDS:
            array: np.ndarray = np.full(num_rows, idle, dtype=dtype)
            setattr(self, name, torch.from_numpy(array).to(device))
        self.stop_ids = torch.full((num_rows, num_stops), -1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_rows, table_width, dtype=torch.int32, device=device)
        self.seen: Tensor | None = None
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.window_tokens = torch.full((window, num_rows), -1, dtype=torch.int32, device=device)
        self.window_log_probs, self.window_truncated = (
            torch.zeros(window, num_rows, dtype=torch.float32, device=device) for _ in range(2)
        )

    def remember_seen(self, vocab_size: int) -> None:
        """Makes room to note which tokens each row has seen."""
        if self.seen is None:
            self.seen = torch.zeros(self.num_rows, vocab_size, dtype=torch.bool, device=self.device)

    def make_idle(self) -> None:
        """Every row idle: a step then writes into the scratch block only."""
        for name, _, idle in _FIELDS:
            getattr(self, name).fill_(idle)
        self.block_tables.zero_()
        self.step.zero_()


@dataclass(frozen=True)
class Window:
    """What a window gave.

    Attributes:
        tokens: int32 [steps, rows], -1 where a row was not running.
        log_probs: fp32 [steps, rows].
        truncated: fp32 [steps, rows] or None.
        counts: int64 [rows], tokens that each row got: its first ones.
        status: int8 [rows].
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    truncated: np.ndarray | None
    counts: np.ndarray
    status: np.ndarray


class Rows:
    """The rows that run now: ``0 .. len(sequences) - 1`` of every array.

    Args:
        num_rows: the most at once.
        table_width: blocks of the longest sequence.
        max_new_tokens: tokens that any of them may sample, at most.
    """

    def __init__(self, num_rows: int, table_width: int, max_new_tokens: int) -> None:
        self.sequences: list[RunningSequence] = []
        self._arrays: dict[str, np.ndarray] = {
            name: np.full(num_rows, idle, dtype=dtype) for name, dtype, idle in _FIELDS
        }
        self._tables = np.zeros((num_rows, table_width), dtype=np.int32)
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        # What a row has sampled stays in its slot, so that reordering rows moves one number a row.
        self._slots = np.zeros(num_rows, dtype=np.int64)
        self._free_slots = list(range(num_rows))[::-1]
        self._counts = np.zeros(num_rows, dtype=np.int64)
        self._width = max_new_tokens
        # Pages that no response reaches are never touched.
        first = min(max_new_tokens, 4096)
        self._token_ids: np.ndarray = np.zeros((num_rows, first), dtype=np.int32)
        self._log_probs: np.ndarray = np.zeros((num_rows, first), dtype=np.float32)
        self._truncated: np.ndarray = np.zeros((num_rows, first), dtype=np.float32)
        self._stops = np.full((num_rows, 8), -1, dtype=np.int32)
        self._truncates = np.zeros(num_rows, dtype=bool)
        # Where the device has noted what each row has seen; -1: nowhere yet.
        self._seen_rows = np.full(num_rows, -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def one_block_each(self) -> bool:
        """Whether a block holds a whole sequence."""
        return self._tables.shape[1] == 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in the cache, [rows]."""
        return self._arrays["lengths"][: len(self)]

    @property
    def remaining(self) -> np.ndarray:
        """Tokens that each row may still get, [rows]."""
        return self._arrays["remaining"][: len(self)]

    @property
    def num_blocks(self) -> np.ndarray:
        """Blocks of each row, [rows]."""
        return self._num_blocks[: len(self)]

    @property
    def truncates(self) -> bool:
        """Whether any row draws from another distribution than its softmax."""
        return bool(self._truncates[: len(self)].any())

    @property
    def penalises(self) -> bool:
        """Whether any row has a repetition penalty."""
        return bool((self._arrays["repetition_penalty"][: len(self)] != 1).any())

    @property
    def num_stops(self) -> int:
        """Stop tokens that any row may have."""
        return self._stops.shape[1]

    def append(self, sequences: Sequence[RunningSequence]) -> None:
        """New rows at the end."""
        if not sequences:
            return
        first, end = len(self), len(self) + len(sequences)
        self.sequences += sequences
        for (name, _, _), column in zip(_FIELDS, zip(*map(_row_values, sequences), strict=True), strict=True):
            self._arrays[name][first:end] = column
        for row, sequence in enumerate(sequences, first):
            self._slots[row] = self._free_slots.pop()
            self._set_stops(row, sequence.sampling.end_token_ids)
            self.set_blocks(row)
        self._counts[first:end] = 0
        self._truncates[first:end] = [sequence.sampling.truncates for sequence in sequences]
        self._seen_rows[first:end] = -1

    def _set_stops(self, row: int, ids: Sequence[int]) -> None:
        missing = len(ids) - self.num_stops
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[row] = -1
        if ids:
            self._stops[row, : len(ids)] = ids

    def set_blocks(self, row: int) -> None:
        """Takes over the blocks that the row's sequence has now."""
        self._write_blocks(row, 0)
        # A row that has ended stays idle to the window's end and goes on writing one place behind its tokens. Where that
        # is behind its blocks, it must be the scratch block and not one that another sequence got since.
        self._tables[row, len(self.sequences[row].blocks) :] = SCRATCH_BLOCK

    def add_blocks(self, row: int) -> None:
        """Takes over the blocks that the row's sequence got since."""
        self._write_blocks(row, int(self._num_blocks[row]))

    def _write_blocks(self, row: int, first: int) -> None:
        blocks = self.sequences[row].blocks
        self._tables[row, first : len(blocks)] = blocks[first:]
        self._num_blocks[row] = len(blocks)

    def remove(self, rows: Sequence[int], policy_version: int) -> list[RunningSequence]:
        """Takes rows out and closes the gaps; their sequences have all their tokens then.

        Args:
            policy_version: of the weights that sampled what the rows hold.
        """
        removed = [self.sequences[row] for row in rows]
        for row, sequence in zip(rows, removed, strict=True):
            self._write_back(row, sequence, policy_version)
            self._free_slots.append(int(self._slots[row]))
        gone = set(rows)
        self.reorder([row for row in range(len(self)) if row not in gone])
        return removed

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; rows that are not named are dropped."""
        if list(order) == list(range(len(self))):
            return
        self.sequences = [self.sequences[row] for row in order]
        indices = list(order)
        others = (self._tables, self._num_blocks, self._slots, self._counts, self._stops, self._truncates)
        for array in (*self._arrays.values(), *others, self._seen_rows):
            array[: len(indices)] = array[indices]

    def upload(self, state: DecodeState, num_rows: int) -> None:
        """Makes ``state`` say what the arrays say; rows up to ``num_rows`` that hold no sequence are idle."""
        count = len(self)
        # With one entry behind the last block: see `set_blocks`.
        width = min(int(self._num_blocks[:count].max()) + 1, self._tables.shape[1])
        for name, _, idle in _FIELDS:
            self._arrays[name][count:num_rows] = idle
            getattr(state, name)[:num_rows].copy_(torch.from_numpy(self._arrays[name][:num_rows]))
        self._tables[count:num_rows] = 0
        state.block_tables[:num_rows, :width].copy_(torch.from_numpy(self._tables[:num_rows, :width]))
        state.stop_ids[:num_rows, : self.num_stops].copy_(torch.from_numpy(self._stops[:num_rows]))
        # The state outlives these rows, and may have had sequences with more of them.
        state.stop_ids[:num_rows, self.num_stops :] = -1
        state.step.zero_()
        # Only then: once a row has had a penalty, the state has room for what rows have seen for good.
        if self.penalises and state.seen is not None:
            self._upload_seen(state.seen)

    def _upload_seen(self, seen: Tensor) -> None:
        """Rows that were there before take what is noted of them along, as the device has gone on with it; of others it is noted
        now, which takes time with each of their tokens."""
        rows, places = np.arange(len(self)), self._seen_rows[: len(self)]
        if (rows == places).all():
            return
        seen[: len(self)] = seen[torch.from_numpy(np.maximum(places, 0)).to(seen.device)]
        for row in np.flatnonzero(places < 0).tolist():
            seen[row] = False
            sequence, slot, count = self.sequences[row], self._slots[row], self._counts[row]
            if sequence.sampling.repetition_penalty != 1:
                sampled = self._token_ids[slot, :count].astype(np.int64)
                ids = np.concatenate([np.asarray(sequence.context, dtype=np.int64), sampled])
                seen[row, torch.from_numpy(ids).to(seen.device)] = True
        places[:] = rows

    def read(self, state: DecodeState, steps: int, truncates: bool) -> Window:
        """What the last ``steps`` steps gave; the arrays take it over."""
        count = len(self)
        tokens = state.window_tokens[:steps, :count].cpu().numpy()
        log_probs = state.window_log_probs[:steps, :count].cpu().numpy()
        truncated = state.window_truncated[:steps, :count].cpu().numpy() if truncates else None
        status = state.status[:count].cpu().numpy()
        valid = tokens >= 0
        counts = valid.sum(0)
        self._store(tokens, log_probs, truncated, valid, counts)
        moved = counts > 0
        newest = tokens[np.maximum(counts - 1, 0), np.arange(count)]
        arrays = self._arrays
        arrays["tokens"][:count][moved] = newest[moved]
        arrays["lengths"][:count] += counts.astype(np.int32)
        arrays["remaining"][:count] -= counts.astype(np.int32)
        arrays["min_remaining"][:count] = np.maximum(arrays["min_remaining"][:count] - counts, 0)
        return Window(tokens, log_probs, truncated, counts, status)

    def _store(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        truncated: np.ndarray | None,
        valid: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        count = len(self)
        before = self._counts[:count]
        self._widen(int((before + counts).max()))
        # Transposed, so that a row's tokens follow each other.
        row, step = np.nonzero(valid.T)
        slots, places = self._slots[:count][row], before[row] + step
        self._token_ids[slots, places] = tokens[step, row]
        self._log_probs[slots, places] = log_probs[step, row]
        if truncated is not None:
            self._truncated[slots, places] = truncated[step, row]
        self._counts[:count] += counts

    def cut(self, row: int, num_tokens: int) -> None:
        """Drops what the row got after its first ``num_tokens`` tokens since it became a row."""
        self._counts[row] = num_tokens

    def num_sampled(self, row: int) -> int:
        """Tokens that the row got since it became one."""
        return int(self._counts[row])

    def _write_back(self, row: int, sequence: RunningSequence, policy_version: int) -> None:
        slot, count = self._slots[row], int(self._counts[row])
        sequence.num_cached = int(self._arrays["lengths"][row])
        if not count:
            return
        sequence.token_ids.extend(self._token_ids[slot, :count].tolist())
        sequence.log_probs.extend(self._log_probs[slot, :count].tolist())
        if sequence.sampling.truncates:
            sequence.truncated_log_probs.extend(self._truncated[slot, :count].tolist())
        if sequence.versions and sequence.versions[-1][0] == policy_version:
            sequence.versions[-1][1] += count
        else:
            sequence.versions.append([policy_version, count])

    def _widen(self, width: int) -> None:
        """Makes room for ``width`` tokens a slot."""
        have = self._token_ids.shape[1]
        if width <= have:
            return
        # Doubled, and at least what is needed; most responses end long before the longest that is allowed.
        missing = max(width, min(2 * have, self._width)) - have
        self._token_ids, self._log_probs, self._truncated = (
            np.pad(buffer, ((0, 0), (0, missing))) for buffer in (self._token_ids, self._log_probs, self._truncated)
        )


def _row_values(sequence: RunningSequence) -> tuple[float, ...]:
    """What a sequence that starts has in each of `_FIELDS`."""
    sampling, num_sampled = sequence.sampling, len(sequence.token_ids)
    truncation = (0, 1.0, 0.0) if sampling.greedy else (max(0, sampling.top_k), sampling.top_p, sampling.min_p)
    return (
        sequence.token_ids[-1] if num_sampled else sequence.prompt_ids[-1],
        sequence.num_cached,
        sampling.max_new_tokens - num_sampled,
        max(0, sampling.min_new_tokens - num_sampled),
        stream_key(sampling.seed, sequence.request.uid, sequence.request.sample_index),
        0.0 if sampling.greedy else sampling.temperature,
        *truncation,
        sampling.repetition_penalty,
        Status.RUNNING,
    )
