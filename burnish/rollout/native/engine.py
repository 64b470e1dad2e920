"""The native rollout engine: the policy decodes itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.model.projections import pack_projections
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
from burnish.rollout.lifecycle import Lifecycle, OnLifecycle
from burnish.rollout.native.blocks import BlockManager
from burnish.rollout.native.generation import Generation, OnTokens
from burnish.rollout.native.graphs import default_sizes
from burnish.rollout.native.kernels import cpu as cpu_kernels
from burnish.rollout.native.memory import MemoryBudget, layer_shapes, wanted_blocks
from burnish.rollout.native.paged_cache import PagedCache
from burnish.rollout.native.prepacked_linear import PAYS_AFTER
from burnish.rollout.native.rows import DecodeState, Rows
from burnish.rollout.native.runner import DecodeRunner, ModelRunner
from burnish.rollout.native.scheduler import Scheduler
from burnish.rollout.native.scheduler import Sequence as RunningSequence
from burnish.rollout.native.session import RolloutSession
from burnish.rollout.stats import RolloutStats
from burnish.rollout.stopping import token_bytes
from burnish.rollout.weights import weights_checksum

# On a GPU: small, so that samples share most of their prompt and little is reserved in vain.
GPU_BLOCK_SIZE = 32
# Decode steps between two looks of the host. A GPU must not wait for it; a CPU is the host.
_WINDOW = {"cuda": 16, "cpu": 1}
_NUM_STOPS = 8
# Tokens of a sequence where neither the model nor the configuration bounds them.
_DEFAULT_LENGTH = 8192


@register_rollout("native")
class NativeRollout(OnLifecycle):
    """Generates with a Hugging Face causal LM, many sequences at once, each finished one replaced by a waiting one.

    A response depends on its request, the sampling parameters and the weights alone, not on what else is in the batch,
    in which order, or how many run at once (up to rounding in matrix products).

    Args:
        model: from `burnish.model.load`. With ``shares_storage`` the very module that is trained; otherwise the
            engine's own, which nobody else writes and ``update_weights`` fills.
        config: reads max_num_seqs, max_num_batched_tokens, max_model_len, prompt_length, response_length,
            gpu_memory_utilization, enforce_eager, cudagraph_capture_sizes, enable_chunked_prefill, free_cache_engine.
        device: where the model's weights are.
        tokenizer: turns tokens into the text that stop strings are looked for in.
        block_size, num_blocks: of the cache; None chooses. A block is 32 tokens on a GPU. On a CPU it holds a whole
            sequence, so that attention reads keys in place; memory that is not written to is not taken there.
        window: decode steps between two looks of the host; None chooses.
        universal: decode with the Hugging Face modules also where there is a fast path.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        *,
        shares_storage: bool,
        device: torch.device | str = "cpu",
        tokenizer: Any = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        window: int | None = None,
        universal: bool = False,
    ) -> None:
        self.shares_storage = shares_storage
        self.stats = RolloutStats()
        """Of the last call of ``generate``."""
        self._config = config
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        if not shares_storage:
            pack_projections(model)
        if self._device.type == "cpu":
            cpu_kernels.prepare(model.config.get_text_config().hidden_size)
        self._model_config = model.config
        self._runner = ModelRunner(model, self._device, max_length=self.max_length, universal=universal)
        self._lifecycle = Lifecycle(shares_storage=shares_storage)
        with self._runner.inference():
            self._layers = layer_shapes(model)
        self._block_size = block_size or (GPU_BLOCK_SIZE if self._device.type == "cuda" else None)
        self._num_blocks = num_blocks
        self._window = window or _WINDOW[self._device.type]
        self._decoder: DecodeRunner | None = None

    @property
    def cache_bytes(self) -> int:
        """Memory that the key-value cache holds now."""
        return 0 if self._decoder is None else self._decoder.cache.nbytes

    @property
    def max_length(self) -> int:
        """Tokens of prompt and response together that a sequence may have."""
        config = self._config
        asked = config.max_model_len
        if asked is None and config.prompt_length is not None and config.response_length is not None:
            asked = config.prompt_length + config.response_length
        return max_sequence_length(self._model_config, asked) or _DEFAULT_LENGTH

    @property
    def max_num_seqs(self) -> int:
        """Sequences that decode at once, at most."""
        return self._config.max_num_seqs

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        responses: dict[str, RolloutResponse] = {}

        def finish(response: RolloutResponse) -> None:
            responses[response.request_id] = response
            if on_finished is not None:
                on_finished(response)

        start = time.perf_counter()
        self.stats = RolloutStats()
        with self._lifecycle.generating(request.request_id for request in requests), self._runner.inference():
            self._check(requests, sampling)
            if requests:
                sequences = [RunningSequence(request, request.sampling or sampling) for request in requests]
                longest = max(len(s.prompt_ids) + s.sampling.max_new_tokens for s in sequences)
                lengths = [sequence.sampling.max_new_tokens for sequence in sequences]
                num_steps = max(*lengths, sum(lengths) // self.max_num_seqs)
                with self._holding_copies(longest, len(sequences), num_steps):
                    generation = self._generation(longest, len(sequences), finish, None)
                    try:
                        generation.add(sequences)
                        while not generation.done:
                            generation.round()
                    except BaseException:
                        self._free_cache()  # It may hold what must not be read.
                        raise
                self.stats = generation.stats
        self.stats.seconds = time.perf_counter() - start
        return [responses[request.request_id] for request in requests]

    def open_session(
        self, *, on_tokens: OnTokens | None = None, on_finished: OnFinished | None = None
    ) -> RolloutSession:
        """Requests that come and go, for a server: see `RolloutSession`."""
        return RolloutSession(self, on_tokens, on_finished)

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`; also while paused."""
        self._lifecycle.update_weights(self._runner.model, stream, version)

    def weights_checksum(self) -> dict[str, int]:
        """See `BaseRollout`."""
        return weights_checksum(self._runner.model)

    def pause(self) -> None:
        """Stops between two windows, and returns once the engine stands still (at once from a callback).

        Then ``update_weights`` and ``sleep`` are allowed. What runs keeps its tokens and goes on after ``resume``, with the
        weights there are then.
        """
        self._lifecycle.pause()

    def resume(self) -> None:
        """Ends ``pause``."""
        self._lifecycle.resume()

    def sleep(self, level: int = 1) -> None:
        """Frees the key-value cache. The weights stay at either level: they are the trained ones, or filled anew."""
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)
            self._free_cache()

    def wake_up(self) -> None:
        """Ends ``sleep``; the cache is allocated again when requests come."""
        self._lifecycle.wake_up()

    def _free_cache(self) -> None:
        self._runner.linears.drop()
        if self._decoder is not None:
            self._decoder.cache.free()

    def _check(self, requests: Sequence[RolloutRequest], sampling: SamplingParams | None) -> None:
        check_requests(
            requests,
            sampling,
            max_length=self.max_length,
            vocab_size=self._runner.vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )
        if any(params.stop for request in requests if (params := request.sampling or sampling)):
            token_bytes(self._tokenizer)  # Not every tokenizer's tokens can be searched for strings.

    def _holding_copies(self, longest: int, num_sequences: int, num_steps: int | None) -> AbstractContextManager[None]:
        """Inside, weights are copied for faster products where that pays and the memory holds it.

        Args:
            num_steps: decode steps that are expected; None is not known.
        """
        linears = self._runner.linears
        if not linears.pays(min(self.max_num_seqs, num_sequences), num_steps):
            return linears.holding(None)
        cache = self._ready_decoder(longest).cache
        blocks = 1 + -(-longest // cache.block_size)
        one_sequence = blocks * cache.block_size * cache.bytes_per_token
        if not self._budget.holds_copy(linears.copy_bytes, one_sequence):
            return linears.holding(None)
        return linears.holding(PAYS_AFTER if num_steps is None else 0)

    def _generation(
        self, longest: int, num_sequences: int, finish: OnFinished, on_tokens: OnTokens | None
    ) -> Generation:
        """Memory for sequences of up to ``longest`` tokens, and a scheduler over it."""
        decoder = self._ready_decoder(longest)
        cache, config = decoder.cache, self._config
        num_running = min(config.max_num_seqs, num_sequences)
        num_blocks, num_running = self._allocate(cache, longest, num_running)
        scheduler = Scheduler(
            BlockManager(num_blocks, cache.block_size),
            max_running=num_running,
            max_prefill_tokens=config.max_num_batched_tokens,
            chunked=config.enable_chunked_prefill,
        )
        rows = Rows(num_running, decoder.state.block_tables.shape[1], longest)
        return Generation(
            self._runner,
            decoder,
            scheduler,
            rows,
            self._lifecycle,
            window=self._window,
            allocate=partial(self._budget.allocate, cache),
            finish=finish,
            on_tokens=on_tokens,
            tokenizer=self._tokenizer,
        )

    def _allocate(self, cache: PagedCache, longest: int, num_running: int) -> tuple[int, int]:
        """Blocks that the generation may use, and how many sequences may run at once."""
        budget = self._budget
        limit = budget.cache_bytes(cache.nbytes) // (cache.block_size * cache.bytes_per_token)
        if self._num_blocks is not None:
            limit = min(limit, self._num_blocks)
        each = -(-longest // cache.block_size)
        spare = wanted_blocks(longest, cache.block_size, 0)
        budget.check_holds(cache, longest, limit)
        if each == 1:
            # A sequence never grows out of its block, so none need ever be preempted.
            num_running = max(1, min(num_running, limit - spare))
        num_blocks = min(limit, wanted_blocks(longest, cache.block_size, num_running))
        if cache.num_blocks < num_blocks:
            budget.allocate(cache, num_blocks)
        return max(num_blocks, cache.num_blocks) if self._num_blocks is None else num_blocks, num_running

    def _ready_decoder(self, longest: int) -> DecodeRunner:
        """The decode state and its graphs: kept between calls, since graphs are bound to its addresses."""
        block_size = self._block_size or longest
        width = -(-(self.max_length if self._block_size else longest) // block_size)
        decoder = self._decoder
        if decoder is not None and (decoder.cache.block_size, decoder.state.block_tables.shape[1]) == (
            block_size,
            width,
        ):
            decoder.follow_weights()
        else:
            on_cpu = self._device.type == "cpu"
            dtype = self._runner.model.dtype
            cache = PagedCache(self._layers, dtype, self._device, block_size, heads_first=on_cpu)
            state = DecodeState(self._config.max_num_seqs, self._window, width, _NUM_STOPS, self._device)
            decoder = self._decoder = DecodeRunner(self._runner, cache, state, self._graph_sizes())
        return decoder

    @property
    def _budget(self) -> MemoryBudget:
        return MemoryBudget.of(
            self._runner.model,
            self._device,
            self._config.gpu_memory_utilization,
            self._runner.linears.reserved_bytes,
        )

    def _graph_sizes(self) -> list[int] | None:
        if self._device.type != "cuda" or self._config.enforce_eager:
            return None
        largest = self._config.max_num_seqs
        sizes = self._config.cudagraph_capture_sizes or default_sizes(largest)
        return sorted({size for size in sizes if size < largest} | {largest})
