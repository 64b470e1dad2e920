"""burnish's draw in the place of vLLM's sampler: the tokens of the native engine, whatever else is in the batch.

vLLM's own sampler draws from a generator that every row advances, and its log-probs are either those before or those after
truncation. This one draws from the stream that (seed, uid, sample_index, position) name and gives both log-probs. `install` puts
it into vLLM's model runner. What it must know of a request is the `burnish.rollout.vllm.requests.DrawArgs` in its ``extra_args``.

Only vLLM's first model runner (``vllm.v1.worker.gpu_model_runner``, which its CPU runner extends) is known here, as vLLM 0.21 to
0.32 have it. Of it this module reads ``input_batch``, ``requests``, ``seq_lens`` and ``discard_request_mask``; nothing else.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.rollout.native.kernels import cpu
from burnish.rollout.native.sampler import Draw, SamplingRows, draw
from burnish.rollout.vllm.requests import DRAW, DrawArgs
from burnish.rollout.vllm.wide_head import widen_head
from burnish.utils.errors import RolloutError

# Rows of the buffer that is copied to the device: a multiple of this, so that each of its columns starts where a kernel may load
# several values at once.
_ALIGNMENT = 4
# Stop tokens a row has room for at least. The width only grows: the kernels are compiled for it.
_MIN_STOPS = 8
# What a row has on the device and its dtype there and on the host; the widest is first.
_COLUMNS: tuple[tuple[str, torch.dtype, type], ...] = (
    ("key", torch.int64, np.int64),
    ("temperature", torch.float32, np.float32),
    ("top_k", torch.int32, np.int32),
    ("top_p", torch.float32, np.float32),
    ("min_p", torch.float32, np.float32),
    ("repetition_penalty", torch.float32, np.float32),
    ("min_new_tokens", torch.int32, np.int32),
)


def install(model_runner: Any) -> None:
    """Makes ``model_runner`` draw its tokens with burnish's sampler from now on; a second call changes nothing.

    To be called on every rank, after the model is loaded: ranks of one tensor-parallel group have the same logits and draw
    the same tokens from them.

    Raises:
        RolloutError: a runner or an option of it with which the sampler would not be the one that decides.
    """
    if isinstance(model_runner.sampler, BurnishSampler):
        return
    _check(model_runner)
    hidden_size = model_runner.model_config.get_hidden_size()
    if model_runner.device.type == "cpu":
        cpu.prepare(hidden_size)
    widen_head(model_runner)
    model_runner.sampler = BurnishSampler(model_runner)


def _check(model_runner: Any) -> None:
    needed = ("input_batch", "requests", "seq_lens", "discard_request_mask")
    if missing := [name for name in needed if not hasattr(model_runner, name)]:
        raise RolloutError(
            f"vLLM's {type(model_runner).__module__}.{type(model_runner).__name__} has no {missing[0]}, which burnish's sampler "
            f"reads. Set VLLM_USE_V2_MODEL_RUNNER=0 in the environment, or install a vLLM that burnish supports (burnish doctor "
            f"names the range)."
        )
    if model_runner.speculative_config is not None:
        raise RolloutError(
            "engine_kwargs.vllm sets speculative_config, but with speculation vLLM's rejection sampler draws the tokens and a "
            "response would depend on the draft model. Leave it out."
        )
    if model_runner.model_config.logits_processors:
        raise RolloutError(
            "engine_kwargs.vllm sets logits_processors, but burnish draws the tokens itself and they would change nothing. "
            "Leave them out."
        )


class BurnishSampler:
    """Takes the place of ``vllm.v1.sample.sampler.Sampler`` in one model runner.

    On a device each step costs the kernels of `draw` and three small ones; the rows' parameters lie there in tensors that are
    made anew only when the batch changes, and nothing waits for the device.

    Its ``SamplerOutput`` holds one log-prob a row, that of the drawn token under softmax(logits / temperature) (see `Draw`).
    Where a request of the batch asks for ``logprobs`` of at least 1 there is a second one beside it, under another token's
    id: the drawn token's log-prob under the distribution that it was drawn from. Ranks are 0.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._vllm_sampler = model_runner.sampler
        self._table = _RequestTable()
        self._rows = _BatchRows(model_runner.device)
        self._seen = _SeenTokens(model_runner.device)
        self._metadata: Any = None
        self._ranks = torch.zeros(0, dtype=torch.int32, device=model_runner.device)

    def __getattr__(self, name: str) -> Any:
        # Prompt log-probs and warm-ups use helpers of vLLM's sampler.
        return getattr(self._vllm_sampler, name)

    def __call__(self, logits: Tensor, sampling_metadata: Any, **options: Any) -> Any:
        """vLLM's ``SamplerOutput`` for ``logits`` [rows, vocab] of the rows that ``input_batch`` holds.

        A row whose prompt is not read to its end yet has logits too; vLLM drops what is drawn for it.

        Raises:
            RolloutError: a request without its `DrawArgs`.
        """
        batch = self._runner.input_batch
        if sampling_metadata is not batch.sampling_metadata:
            # A warm-up with parameters of its own and no requests.
            return self._vllm_sampler(logits=logits, sampling_metadata=sampling_metadata, **options)
        # vLLM makes new metadata whenever a request joins, leaves or changes its row, and never else.
        if sampling_metadata is not self._metadata:
            self._follow_batch(logits.shape[1])
            self._metadata = sampling_metadata
        drawn = self._draw(logits, batch.num_reqs)
        return self._output(drawn, sampling_metadata.max_num_logprobs)

    def _follow_batch(self, vocab: int) -> None:
        batch, requests = self._runner.input_batch, self._runner.requests
        slots, is_new = self._table.slots_of(requests, batch.req_ids)
        prompt_lengths = batch.num_prompt_tokens[: len(slots)]
        self._rows.fill(self._table, slots, prompt_lengths)
        self._seen.follow(self._table.columns["repetition_penalty"][slots] != 1, slots, is_new, batch, vocab)

    def _draw(self, logits: Tensor, count: int) -> Draw:
        # Tokens of the sequence up to the one that the logits were computed from: the place of the next one.
        places = self._runner.seq_lens[:count]
        rows = self._rows.sampling_rows(places, self._seen.tokens)
        drawn = draw(logits, rows, truncates=self._rows.truncates)
        if self._seen.tokens is not None:
            self._seen.add(drawn.tokens, ~self._runner.discard_request_mask.gpu[:count])
        return drawn

    def _output(self, drawn: Draw, num_logprobs: int | None) -> Any:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        # New tensors each time: with asynchronous scheduling they are copied to the host while the next step runs.
        tokens = drawn.tokens.int()[:, None]
        if num_logprobs is None:
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
        ids, log_probs = tokens, drawn.log_probs[:, None]
        if num_logprobs != 0:
            truncated = drawn.log_probs if drawn.truncated_log_probs is None else drawn.truncated_log_probs
            ids = torch.cat([tokens, (tokens == 0).int()], dim=1)
            log_probs = torch.stack([drawn.log_probs, truncated], dim=1)
        if len(self._ranks) < len(ids):
            self._ranks = torch.zeros(len(ids), dtype=torch.int32, device=ids.device)
        return SamplerOutput(
            sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(ids, log_probs, self._ranks[: len(ids)])
        )


class _RequestTable:
    """The numbers of every request that the runner knows, one slot each, on the host: they are parsed once a request."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._states: list[Any] = []
        self._free: list[int] = []
        self.columns: dict[str, np.ndarray] = {name: np.zeros(0, dtype=dtype) for name, _, dtype in _COLUMNS}
        self.stop_ids = np.full((0, _MIN_STOPS), -1, dtype=np.int32)
        self.truncates = np.zeros(0, dtype=bool)

    def slots_of(self, requests: dict[str, Any], request_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The slots of ``request_ids``, int64 [rows], and whether they got them just now; forgotten requests lose theirs.

        Args:
            requests: of the runner, its ``CachedRequestState`` by request id. An id that is used again has another state.
        """
        for gone in self._slots.keys() - set(map(id, requests.values())):
            slot = self._slots.pop(gone)
            self._states[slot] = None
            self._free.append(slot)
        states = [requests[request_id] for request_id in request_ids]
        slots = [self._slots.get(id(state), -1) for state in states]
        known = np.array(slots, dtype=np.int64)
        is_new = known < 0
        for row in is_new.nonzero()[0].tolist():
            known[row] = self._admit(states[row])
        return known, is_new

    def _admit(self, state: Any) -> int:
        args: DrawArgs | None = (state.sampling_params.extra_args or {}).get(DRAW)
        if args is None:
            raise RolloutError(
                f"Request {state.req_id!r} came to the engine without extra_args[{DRAW!r}], so burnish's sampler does not know "
                f"its random stream. Requests for this engine must be made by burnish.rollout.vllm.requests.prepare."
            )
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for name, column in self.columns.items():
            column[slot] = args[name]  # type: ignore[literal-required]
        ends = args["stop_ids"]
        if len(ends) > self.stop_ids.shape[1]:
            missing = len(ends) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ends)] = ends
        self.truncates[slot] = args["truncates"]
        # Kept, so that no other object can get its address.
        self._slots[id(state)], self._states[slot] = slot, state
        return slot

    def _grow(self) -> None:
        have, missing = len(self._states), max(64, len(self._states))
        self._states += [None] * missing
        self._free += range(have + missing - 1, have - 1, -1)
        for name, column in self.columns.items():
            self.columns[name] = np.pad(column, (0, missing))
        self.stop_ids = np.pad(self.stop_ids, ((0, missing), (0, 0)), constant_values=-1)
        self.truncates = np.pad(self.truncates, (0, missing))


class _BatchRows:
    """The rows' parameters on the device, in one buffer that one copy fills."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: SamplingRows | None = None
        self._first_stop = torch.zeros(0, dtype=torch.int32, device=device)
        self.truncates = False
        """Whether any row draws from another distribution than its softmax."""

    def fill(self, table: _RequestTable, slots: np.ndarray, prompt_lengths: np.ndarray) -> None:
        """Makes the rows those of ``slots``.

        Args:
            prompt_lengths: int32 [rows], tokens.
        """
        count, num_stops = len(slots), table.stop_ids.shape[1]
        width = -(-count // _ALIGNMENT) * _ALIGNMENT
        # The host's side is pinned and never written again: the copy may run long after this call.
        size = width * (sum(dtype.itemsize for _, dtype, _ in _COLUMNS) // 4 + num_stops)
        words = torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for (name, _, _), column in zip(_COLUMNS, _columns_of(words, width), strict=True):
            values = table.columns[name][slots]
            # A stop token may be drawn from this place in the sequence on.
            values = values + prompt_lengths if name == "min_new_tokens" else values
            column[:count] = torch.from_numpy(values)
        stops = slice(size - width * num_stops, size - (width - count) * num_stops)
        words[stops] = torch.from_numpy(table.stop_ids[slots].ravel())
        there = words.to(self._device, non_blocking=True)
        columns = [column[:count] for column in _columns_of(there, width)]
        keys, temperature, top_k, top_p, min_p, repetition_penalty, self._first_stop = columns
        self.truncates = bool(table.truncates[slots].any())
        self._rows = SamplingRows(
            keys=keys,
            positions=keys,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop_ids=there[stops].view(count, num_stops),
            may_stop=keys,
            seen=None,
        )

    def sampling_rows(self, places: Tensor, seen: Tensor | None) -> SamplingRows:
        """The rows at ``places``, int [rows], in their sequences."""
        assert self._rows is not None, "no batch has been followed yet"
        if not self.truncates:  # Then nothing else is read.
            return self._rows._replace(positions=places.long())
        return self._rows._replace(positions=places.long(), may_stop=places >= self._first_stop, seen=seen)


def _columns_of(words: Tensor, width: int) -> list[Tensor]:
    """The parts of a buffer, int32 [any], that hold each of `_COLUMNS` of ``width`` rows."""
    columns, start = [], 0
    for _, dtype, _ in _COLUMNS:
        end = start + width * dtype.itemsize // words.itemsize
        columns.append(words[start:end].view(dtype))
        start = end
    return columns


class _SeenTokens:
    """Which tokens each row holds, for repetition penalties: kept on the device, where the newest tokens are known first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = np.zeros(0, dtype=np.int64)
        self.tokens: Tensor | None = None
        """bool [rows, vocab]; None where no row has a penalty."""

    def follow(self, penalised: np.ndarray, slots: np.ndarray, is_new: np.ndarray, batch: Any, vocab: int) -> None:
        """Makes ``tokens`` that of the batch's rows.

        Args:
            penalised: bool [rows].
            slots, is_new: [rows], see `_RequestTable.slots_of`.
            batch: the runner's ``InputBatch``.
            vocab: logits a row.
        """
        before, self._slots = self._slots, slots
        if not penalised.any():
            self.tokens = None
            return
        count = len(slots)
        lengths = batch.num_tokens_no_spec[:count]
        row_of = {slot: row for row, slot in enumerate(before.tolist())} if self.tokens is not None else {}
        origin = np.array([row_of.get(slot, -1) for slot in slots.tolist()], dtype=np.int64)
        origin[is_new] = -1
        # A row that is new here, or whose tokens are (still, or once more) being prefilled, has all of them on the host. Of
        # one that decodes the host may not know the newest yet, but the device does.
        fresh = (origin < 0) | (batch.num_computed_tokens_cpu[:count] < lengths - 1)
        if self.tokens is None:
            self.tokens = torch.zeros(count, vocab, dtype=torch.bool, device=self._device)
        else:
            self.tokens = self.tokens.index_select(0, self._upload(np.maximum(origin, 0)))
            self.tokens.index_fill_(0, self._upload(fresh.nonzero()[0]), False)
        rows = (fresh & penalised).nonzero()[0].tolist()
        if not rows:
            return
        held = [batch.token_ids_cpu[row, : lengths[row]] for row in rows]
        where = np.concatenate([ids + np.int64(row) * vocab for row, ids in zip(rows, held, strict=True)])
        self.tokens.view(-1).index_fill_(0, self._upload(where), True)

    def add(self, tokens: Tensor, counts: Tensor) -> None:
        """Notes what was drawn.

        Args:
            tokens: int64 [rows].
            counts: bool [rows]; a token is noted where True.
        """
        assert self.tokens is not None, "no row has a penalty"
        places = tokens[:, None]
        self.tokens.scatter_(1, places, self.tokens.gather(1, places) | counts[:, None])

    def _upload(self, indices: np.ndarray) -> Tensor:
        host = torch.from_numpy(indices)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
