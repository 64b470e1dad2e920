"""The model's two calls: prefill chunks of prompts, and a window of decode steps of every running row."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.model.attention import AttentionContext
from burnish.model.head import head_logits, logit_transform
from burnish.model.lora import adapter_layers
from burnish.model.policy import backbone_of
from burnish.rollout.native.contexts import DecodeContext, PrefillContext
from burnish.rollout.native.fast import FastForward
from burnish.rollout.native.graphs import DecodeGraphs, Variant
from burnish.rollout.native.kernels.advance import advance
from burnish.rollout.native.paged_cache import PagedCache
from burnish.rollout.native.prepacked_linear import JointLinear, PrepackedLinears
from burnish.rollout.native.rows import DecodeState
from burnish.rollout.native.sampler import Draw, SamplingRows, draw
from burnish.rollout.native.scheduler import PrefillChunk

logger = logging.getLogger("burnish.rollout")

# Elements of one chunk of fp32 logits. On a GPU 128 MiB: it stays allocated for the captured graphs while others train.
_LOGIT_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 25}


class ModelRunner:
    """Runs a model that `burnish.model.load` prepared.

    Llama, Qwen2, Qwen3 and Mistral take the fast path (`FastForward`), every other family its own Hugging Face modules;
    both attend through the same contexts.

    Args:
        max_length: tokens of the longest sequence; None is what the model's configuration says.
        universal: takes the Hugging Face modules also where the fast path would do.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, max_length: int | None = None, universal: bool = False
    ) -> None:
        self.model = model
        self.device = device
        self._transform = logit_transform(model.config)
        fast = FastForward.supports(model) and not universal
        self._fast = FastForward(model, max_length) if fast else None
        self._head = JointLinear([model.get_output_embeddings()])
        self.linears = PrepackedLinears([*(self._fast.products if self._fast is not None else ()), self._head])
        """The copies of the weights of its products."""

    @property
    def is_fast(self) -> bool:
        """Whether the model takes the fast path."""
        return self._fast is not None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index, arg-type, return-value]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Without gradients and dropout; each module's training flag is put back afterwards.

        Not ``inference_mode``: tensors that a module makes and keeps must stay usable in training.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def prefill(self, cache: PagedCache, chunks: Sequence[PrefillChunk]) -> None:
        """Writes the chunks' keys and values into their blocks."""
        self.linears.begin_pass()
        context = PrefillContext(cache, chunks)
        if self._fast is not None:
            self._fast.fill(context.input_ids, context.positions, context)
        else:
            self._hidden(context.input_ids[None], context.positions[None], context)

    def decode_step(
        self, cache: PagedCache, state: DecodeState, num_rows: int, truncates: bool, penalises: bool
    ) -> None:
        """One more token for each running row among the first ``num_rows``, from its newest token to the next in ``state``.

        Nothing here looks at the device, so the call can be captured.

        Args:
            truncates: some row draws from another distribution than its softmax.
            penalises: some row has a repetition penalty.
        """
        self.linears.begin_pass()
        lengths = state.lengths[:num_rows]
        context = DecodeContext(cache, lengths, state.block_tables[:num_rows])
        hidden = self._hidden(state.tokens[:num_rows, None], lengths[:, None], context)
        rows = SamplingRows(
            keys=state.keys[:num_rows],
            # The place of the token to be drawn in its sequence, prompt included: a response that was cut and goes on
            # with its first part as prompt draws the numbers that it would have drawn.
            positions=lengths.long() + 1,
            temperature=state.temperature[:num_rows],
            top_k=state.top_k[:num_rows],
            top_p=state.top_p[:num_rows],
            min_p=state.min_p[:num_rows],
            repetition_penalty=state.repetition_penalty[:num_rows],
            stop_ids=state.stop_ids[:num_rows],
            may_stop=state.min_remaining[:num_rows] <= 0,
            seen=state.seen[:num_rows] if penalises and state.seen is not None else None,
        )
        advance(state, num_rows, self._draw(hidden, rows, truncates))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of states [rows, hidden], by the head that training uses.

        On a GPU the model's own head would round them to its dtype: in bf16 by up to 0.06 for a logit of 20, on every
        token that is then compared with its log-prob in training.
        """
        head: Any = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return head_logits(hidden, head.weight, bias, self._transform, prepacked=self._head.prepacked)

    def _draw(self, hidden: Tensor, rows: SamplingRows, truncates: bool) -> Draw:
        """In chunks of rows, so that the logits of all rows never exist at once."""
        vocab = self.model.get_output_embeddings().weight.shape[0]  # type: ignore[union-attr, index, arg-type]
        chunk = max(1, _LOGIT_ELEMENTS[self.device.type] // vocab)
        draws = []
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            part_rows = SamplingRows(*(None if field is None else field[part] for field in rows))  # type: ignore[arg-type]
            draws.append(draw(self.logits(hidden[part]), part_rows, truncates=truncates))
        if len(draws) == 1:
            return draws[0]
        columns = zip(*draws, strict=True)
        return Draw(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        """[tokens, hidden] of ids and positions [batch, tokens], in the order of the tokens."""
        if self._fast is not None:
            return self._fast(input_ids.flatten(), position_ids.flatten(), context)
        output = backbone_of(self.model)(
            input_ids=input_ids, position_ids=position_ids, attention_context=context, use_cache=False
        )
        return output[0].flatten(0, 1)


class DecodeRunner:
    """Windows of decode steps: captured graphs on a GPU, plain calls elsewhere."""

    def __init__(self, runner: ModelRunner, cache: PagedCache, state: DecodeState, sizes: Sequence[int] | None) -> None:
        self._runner, self.cache, self.state = runner, cache, state
        self.graphs: DecodeGraphs | None = None
        self._addresses = tuple(parameter.data_ptr() for parameter in runner.model.parameters())
        if sizes is not None:
            name, adapters = type(runner.model).__name__, [layer for _, layer in adapter_layers(runner.model)]

            def adapters_enabled() -> bool:
                return any(not layer.disable_adapters for layer in adapters)

            self.graphs = DecodeGraphs(self._step, state.make_idle, sizes, name, mode=adapters_enabled)

    def follow_weights(self) -> None:
        """Forgets the graphs if the weights have moved since they were captured."""
        addresses = tuple(parameter.data_ptr() for parameter in self._runner.model.parameters())
        if self.graphs is not None and addresses != self._addresses:
            logger.info("The policy's weights have moved, so decode steps are captured again.")
            self.graphs.clear()
        self._addresses = addresses

    def padded(self, num_rows: int) -> int:
        """Rows that a step computes for ``num_rows``."""
        return num_rows if self.graphs is None else self.graphs.size_for(num_rows)

    def hold_stops(self, count: int) -> None:
        """Makes room for ``count`` stop tokens a row."""
        if count > self.state.stop_ids.shape[1]:
            self.state.stop_ids = self.state.stop_ids.new_full((self.state.num_rows, count), -1)
            if self.graphs is not None:
                self.graphs.clear()

    def ready(self, variant: Variant) -> None:
        """Makes sure that `run` can; the state is idle afterwards where it had to capture."""
        if self.graphs is not None:
            self.graphs.ready(variant)

    def run(self, variant: Variant, steps: int) -> None:
        """``steps`` steps of the uploaded state."""
        if self.graphs is not None:
            self.graphs.run(variant, steps)
            return
        for _ in range(steps):
            self._step(*variant)

    def _step(self, num_rows: int, truncates: bool, penalises: bool) -> None:
        self._runner.decode_step(self.cache, self.state, num_rows, truncates, penalises)


def first_non_finite(model: PreTrainedModel, input_ids: Sequence[int], context: AttentionContext) -> str | None:
    """Which tensor of the model is the first that is not finite when it reads ``input_ids``: a weight or a module's output."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name}"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if not found and any(isinstance(t, Tensor) and not bool(torch.isfinite(t).all()) for t in tensors):
                found.append(f"the output of {name}")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        ids = torch.tensor([list(input_ids)], device=model.device)
        positions = torch.arange(ids.shape[1], device=model.device)[None]
        with torch.no_grad():
            backbone_of(model)(input_ids=ids, position_ids=positions, attention_context=context, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
