"""The plain reference engine: transformers' ``generate`` on left-padded batches, log-probs by a forward pass."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from burnish.config import RolloutConfig
from burnish.model.attention import ATTENTION_NAME, plain_attention
from burnish.rollout.base import (
    FinishReason,
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
from burnish.rollout.native.sampler import SamplingRows, draw, stream_key
from burnish.rollout.stats import RolloutStats
from burnish.rollout.stopping import StopStrings
from burnish.rollout.weights import weights_checksum
from burnish.utils import progress
from burnish.utils.errors import RolloutError


@register_rollout("hf")
class HFRollout(OnLifecycle):
    """Generates with ``model.generate``, ``max_num_seqs`` requests at a time: slow, the yardstick of `native`.

    Attention, cache and batching are transformers' own; only the draw is ours, so that both engines give the same
    tokens. ``on_finished`` is called when a whole batch of requests is done.

    Args:
        model: a causal LM, loaded by `burnish.model.load` or by transformers; see `NativeRollout` for the rest.
        tokenizer: the model's, for stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        *,
        shares_storage: bool,
        device: torch.device | str = "cpu",
        tokenizer: Any = None,
    ) -> None:
        self.shares_storage = shares_storage
        self.stats = RolloutStats()
        """Of the last ``generate``; it knows nothing of transformers' cache."""
        self._model = model
        self._config = config
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        self._lifecycle = Lifecycle(shares_storage=shares_storage)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        responses: list[RolloutResponse] = []
        with self._lifecycle.generating(request.request_id for request in requests):
            check_requests(
                requests,
                sampling,
                max_length=max_sequence_length(self._model.config, self._config.max_model_len),
                vocab_size=self._model.get_input_embeddings().weight.shape[0],  # type: ignore[union-attr, index, arg-type]
                has_tokenizer=self._tokenizer is not None,
            )
            self.stats, begin = RolloutStats(), time.perf_counter()
            aborted: set[str] = set()
            for start in range(0, len(requests), self._config.max_num_seqs):
                batch = requests[start : start + self._config.max_num_seqs]
                with self._plain_inference(), torch.no_grad():
                    finished = self._generate_batch(batch, [request.sampling or sampling for request in batch], aborted)
                for response in finished:
                    responses.append(response)
                    if on_finished is not None:
                        on_finished(response)
            self.stats.seconds = time.perf_counter() - begin
        return responses

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`."""
        self._lifecycle.update_weights(self._model, stream, version)

    def weights_checksum(self) -> dict[str, int]:
        """See `BaseRollout`."""
        return weights_checksum(self._model)

    def sleep(self, level: int = 1) -> None:
        """Refuses to generate from now on; no memory outlives a call of ``generate``, so nothing is freed."""
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)

    def wake_up(self) -> None:
        """Ends ``sleep``."""
        self._lifecycle.wake_up()

    def _generate_batch(
        self, requests: Sequence[RolloutRequest], samplings: Sequence[SamplingParams], aborted: set[str]
    ) -> list[RolloutResponse]:
        input_ids, mask = self._pad_left(requests)
        width = input_ids.shape[1]

        def update_aborted() -> set[str]:
            aborted.update(self._lifecycle.take_aborts())
            return aborted

        stop = _Stop(requests, samplings, self._tokenizer, update_aborted, width)
        draw_tokens = _SeededDraw(requests, samplings, input_ids, mask, stop.ends, self.policy_version)
        start = time.perf_counter()
        sequences = self._model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(sampling.max_new_tokens for sampling in samplings),
                do_sample=False,
                pad_token_id=0,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([draw_tokens]),
            stopping_criteria=StoppingCriteriaList([stop]),
        )
        self._count(requests, stop, draw_tokens, start)
        temperatures = [sampling.policy_temperature for sampling in samplings]
        log_probs = self._log_probs(sequences, mask, torch.tensor(temperatures, device=self._device))
        truncated = draw_tokens.truncated_log_probs()
        responses = []
        for row, (request, sampling) in enumerate(zip(requests, samplings, strict=True)):
            reason, length, stop_reason = stop.ends[row]
            responses.append(
                RolloutResponse(
                    request.request_id,
                    sequences[row, width : width + length].tolist(),
                    log_probs[row, :length].tolist(),
                    reason,
                    self.policy_version,
                    truncated_log_probs=truncated[row, :length].tolist() if sampling.truncates else None,
                    stop_reason=stop_reason,
                )
            )
        return responses

    def _count(
        self, requests: Sequence[RolloutRequest], stop: "_Stop", draw_tokens: "_SeededDraw", start: float
    ) -> None:
        num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.stats += RolloutStats(
            num_prompt_tokens=num_prompt_tokens,
            num_prefilled_tokens=num_prompt_tokens,  # Each sample's prompt goes through the model again.
            num_response_tokens=sum(end.length for end in stop.ends.values()),
            num_steps=draw_tokens.num_steps,
            prefill_seconds=draw_tokens.first_at - start,
            decode_seconds=time.perf_counter() - draw_tokens.first_at,
            max_running=len(requests),
        )

    def _pad_left(self, requests: Sequence[RolloutRequest]) -> tuple[Tensor, Tensor]:
        """Prompts and their mask, [rows, longest prompt] int64."""
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        ids = [[0] * pad + list(request.prompt_ids) for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _log_probs(self, sequences: Tensor, prompt_mask: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [rows, response] of the generated tokens, by one forward over prompt and response."""
        width = prompt_mask.shape[1]
        mask = torch.cat([prompt_mask, torch.ones_like(sequences[:, width:])], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = self._model(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False)
        logits = output.logits[:, width - 1 : -1].float() / temperatures[:, None, None]
        return logits.log_softmax(-1).gather(-1, sequences[:, width:, None]).squeeze(-1)

    @contextmanager
    def _plain_inference(self) -> Iterator[None]:
        """transformers' own attention, no dropout, and none of the model's own generation defaults."""
        model = self._model
        modes = [(module, module.training) for module in model.modules()]
        defaults, model.generation_config = model.generation_config, GenerationConfig()
        model.eval()
        try:
            if model.config._attn_implementation == ATTENTION_NAME:
                with plain_attention(model):
                    yield
            else:
                yield
        finally:
            model.generation_config = defaults
            for module, training in modes:
                module.training = training


class _End(NamedTuple):
    """How a row ended."""

    reason: FinishReason
    length: int
    stop_reason: int | str | None


class _SeededDraw(LogitsProcessor):
    """Draws each row's token from its own random stream and leaves ``generate``'s argmax nothing else to take.

    Args:
        input_ids, mask: the prompts, [rows, longest prompt] int64, padded on the left.
        ends: the rows that have ended; what is drawn for them does not matter.
    """

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        samplings: Sequence[SamplingParams],
        input_ids: Tensor,
        mask: Tensor,
        ends: dict[int, _End],
        policy_version: int,
    ) -> None:
        self.num_steps = 0
        self.first_at = 0.0
        self._requests = requests
        self._truncates = any(sampling.truncates for sampling in samplings)
        self._truncated: list[Tensor] = []
        self._mask = mask
        self._ends = ends
        self._policy_version = policy_version
        self._min_new_tokens = torch.tensor([sampling.min_new_tokens for sampling in samplings], device=mask.device)
        self._rows = _sampling_rows(requests, samplings, mask.device)
        self._penalizes = any(sampling.repetition_penalty != 1 for sampling in samplings)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if not self.num_steps:
            self.first_at = time.perf_counter()
        positions = self._mask.sum(-1) + self.num_steps
        rows = self._rows._replace(
            positions=positions,
            may_stop=self.num_steps >= self._min_new_tokens,
            seen=self._seen(input_ids, scores) if self._penalizes else None,
        )
        self.num_steps += 1
        progress.tick()
        drawn = draw(scores.float(), rows, truncates=self._truncates)
        self._check_finite(drawn.log_probs, positions)
        if drawn.truncated_log_probs is not None:
            self._truncated.append(drawn.truncated_log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)

    def truncated_log_probs(self) -> Tensor:
        """Of all that was drawn, [rows, response], or nothing where no row truncates."""
        return torch.stack(self._truncated, dim=1) if self._truncated else self._mask.new_zeros(len(self._requests), 0)

    def _seen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The tokens [rows, vocab] bool that a row holds; padding, at the left of the prompts, is none of them."""
        is_token = torch.ones_like(input_ids, dtype=torch.bool)
        is_token[:, : self._mask.shape[1]] = self._mask.bool()
        counts = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
        return counts.scatter_add_(1, input_ids, is_token.int()) > 0

    def _check_finite(self, log_probs: Tensor, positions: Tensor) -> None:
        bad = [row for row in (~log_probs.isfinite()).nonzero().flatten().tolist() if row not in self._ends]
        if bad:
            raise RolloutError(
                f"The model's logits are not finite for {len(bad)} of {len(self._requests)} sequences, first for request "
                f"{self._requests[bad[0]].request_id!r} at position {int(positions[bad[0]])}. The weights of policy version "
                f"{self._policy_version} or their dtype overflow; look at the last updates' grad_norm."
            )


def _sampling_rows(
    requests: Sequence[RolloutRequest], samplings: Sequence[SamplingParams], device: torch.device
) -> SamplingRows:
    """What stays the same from token to token."""

    def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    num_stops = max(len(sampling.end_token_ids) for sampling in samplings)
    stops = [[*s.end_token_ids, *[-1] * (num_stops - len(s.end_token_ids))] for s in samplings]
    keys = [stream_key(s.seed, r.uid, r.sample_index) for r, s in zip(requests, samplings, strict=True)]
    return SamplingRows(
        keys=torch.tensor(keys, device=device),
        positions=torch.zeros(len(requests), dtype=torch.int64, device=device),
        temperature=column((0.0 if s.greedy else s.temperature for s in samplings), torch.float32),
        top_k=column((s.top_k for s in samplings), torch.int32),
        top_p=column((s.top_p for s in samplings), torch.float32),
        min_p=column((s.min_p for s in samplings), torch.float32),
        repetition_penalty=column((s.repetition_penalty for s in samplings), torch.float32),
        stop_ids=torch.tensor(stops, dtype=torch.int32, device=device).view(len(requests), num_stops),
        may_stop=torch.ones(len(requests), dtype=torch.bool, device=device),
        seen=None,
    )


class _Stop(StoppingCriteria):
    """Ends rows at a stop token, a stop string, their own length or when they are aborted; remembers where and why."""

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        samplings: Sequence[SamplingParams],
        tokenizer: Any,
        aborted: Callable[[], set[str]],
        width: int,
    ) -> None:
        self._rows = {request.request_id: row for row, request in enumerate(requests)}
        self._samplings = samplings
        self._strings = [StopStrings(tokenizer, s.stop, s.min_new_tokens) if s.stop else None for s in samplings]
        self._aborted = aborted
        self._width = width
        self.ends: dict[int, _End] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        length = input_ids.shape[1] - self._width
        for row, token in enumerate(input_ids[:, -1].tolist()):
            end = None if row in self.ends else self._end(row, token, length)
            if end is not None:
                self.ends[row] = end
        for request_id in self._aborted() & self._rows.keys():
            self.ends.setdefault(self._rows[request_id], _End("abort", length, None))
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        done[list(self.ends)] = True
        return done.to(input_ids.device)

    def _end(self, row: int, token: int, length: int) -> _End | None:
        """How its newest token ends a row, if it does."""
        sampling, strings = self._samplings[row], self._strings[row]
        match = strings.feed([token]) if strings is not None else None
        if match is not None:
            return _End("stop", length, match.stop)
        if token in sampling.end_token_ids:
            return _End("stop", length, token)
        return _End("length", length, None) if length == sampling.max_new_tokens else None
