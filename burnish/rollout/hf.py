"""The plain reference engine: transformers' ``generate`` on left-padded batches, log-probs by a forward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.sampler import sample, stream_key


@register_rollout("hf")
class HFRollout:
    """Generates with ``model.generate``, ``max_num_seqs`` requests at a time: slow, the yardstick of `native`.

    Attention, cache and batching are transformers' own; only the draw is ours, so that both engines give the same
    tokens. ``on_finished`` is called when a whole batch of requests is done.

    Args:
        model: a causal LM, loaded by `burnish.model.load` or by transformers; see `NativeRollout` for the rest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        *,
        shares_storage: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shares_storage = shares_storage
        self._model = model
        self._config = config
        self._device = torch.device(device)
        self._lifecycle = Lifecycle(shares_storage=shares_storage)

    @property
    def policy_version(self) -> int:
        """The version of the weights it samples from."""
        return self._lifecycle.policy_version

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        responses: list[RolloutResponse] = []
        with self._lifecycle.generating(requests):
            check_requests(
                requests,
                sampling,
                max_length=max_sequence_length(self._model.config, self._config.max_model_len),
                vocab_size=self._model.get_input_embeddings().weight.shape[0],  # type: ignore[union-attr, index, arg-type]
            )
            aborted: set[str] = set()
            for start in range(0, len(requests), self._config.max_num_seqs):
                batch = requests[start : start + self._config.max_num_seqs]
                with self._plain_inference(), torch.no_grad():
                    finished = self._generate_batch(batch, sampling, aborted)
                for response in finished:
                    responses.append(response)
                    if on_finished is not None:
                        on_finished(response)
        return responses

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """See `BaseRollout.update_weights`."""
        self._lifecycle.update_weights(self._model, stream, version)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        self._lifecycle.abort(request_ids)

    def sleep(self, level: int = 1) -> None:
        """Refuses to generate from now on; no memory outlives a call of ``generate``, so nothing is freed."""
        with self._lifecycle.exclusive("sleep"):
            self._lifecycle.sleep(level)

    def wake_up(self) -> None:
        """Ends ``sleep``."""
        self._lifecycle.wake_up()

    def _generate_batch(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, aborted: set[str]
    ) -> list[RolloutResponse]:
        input_ids, mask = self._pad_left(requests)
        width = input_ids.shape[1]

        def update_aborted() -> set[str]:
            aborted.update(self._lifecycle.take_aborts())
            return aborted

        draw = _SeededDraw(requests, sampling, mask.sum(-1), width)
        stop = _Stop([request.request_id for request in requests], sampling, update_aborted, width)
        sequences = self._model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens, do_sample=False, pad_token_id=0, use_cache=True
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([stop]),
        )
        log_probs = self._log_probs(sequences, mask, sampling.policy_temperature)
        responses = []
        for row, request in enumerate(requests):
            reason, length = stop.ends.get(row, ("length", sampling.max_new_tokens))
            token_ids, values = sequences[row, width : width + length], log_probs[row, :length]
            version = self.policy_version
            responses.append(RolloutResponse(request.request_id, token_ids.tolist(), values.tolist(), reason, version))
        return responses

    def _pad_left(self, requests: Sequence[RolloutRequest]) -> tuple[Tensor, Tensor]:
        """Prompts and their mask, [rows, longest prompt] int64."""
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        ids = [[0] * pad + list(request.prompt_ids) for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _log_probs(self, sequences: Tensor, prompt_mask: Tensor, temperature: float) -> Tensor:
        """Log-probs [rows, response] of the generated tokens, by one forward over prompt and response."""
        width = prompt_mask.shape[1]
        mask = torch.cat([prompt_mask, torch.ones_like(sequences[:, width:])], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = self._model(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False)
        logits = output.logits[:, width - 1 : -1].float() / temperature
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


class _SeededDraw(LogitsProcessor):
    """Draws each row's token from its own random stream and leaves ``generate``'s argmax nothing else to take."""

    def __init__(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, prompt_lengths: Tensor, width: int
    ) -> None:
        keys = [stream_key(sampling.seed, request.uid, request.sample_index) for request in requests]
        self._keys = torch.tensor(keys, device=prompt_lengths.device)
        self._sampling = sampling
        self._prompt_lengths = prompt_lengths
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        positions = self._prompt_lengths + input_ids.shape[1] - self._width
        tokens, _ = sample(scores, self._sampling, self._keys, positions)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)


class _Stop(StoppingCriteria):
    """Ends rows at a stop token or when they are aborted, and remembers where and why."""

    def __init__(
        self, request_ids: list[str], sampling: SamplingParams, aborted: Callable[[], set[str]], width: int
    ) -> None:
        self._rows = {request_id: row for row, request_id in enumerate(request_ids)}
        self._stop_ids = torch.tensor(sampling.end_token_ids, dtype=torch.int64)
        self._aborted = aborted
        self._width = width
        self.ends: dict[int, tuple[FinishReason, int]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        length = input_ids.shape[1] - self._width
        for row in torch.isin(input_ids[:, -1].cpu(), self._stop_ids).nonzero().flatten().tolist():
            self.ends.setdefault(row, ("stop", length))
        for request_id in self._aborted() & self._rows.keys():
            self.ends.setdefault(self._rows[request_id], ("abort", length))
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        done[list(self.ends)] = True
        return done.to(input_ids.device)
