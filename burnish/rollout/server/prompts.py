"""From a request of the API to what the engine is asked: prompt ids and sampling parameters."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.render import encode_text, render
from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.server.detokenize import decoder, token_text
from burnish.rollout.server.errors import ApiError
from burnish.rollout.server.protocol import MAX_CHOICES, ApiRequest, ChatRequest, CompletionRequest
from burnish.rollout.stopping import token_bytes
from burnish.utils.errors import BurnishError, RolloutError

# Beyond these, fp32 arithmetic on logits overflows, which would end the engine for everyone.
_TEMPERATURES = (1e-4, 1e3)
_REPETITION_PENALTIES = (1e-2, 1e2)
# What a template that is given the wrong kind of value raises; jinja2's own errors are sentences already.
_TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
_OWN_TEMPLATE_ARGUMENTS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    """As clients call it."""
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    eos_token_ids: tuple[int, ...]
    max_length: int
    """Tokens of prompt and response together."""
    vocab_size: int
    """Rows of the embedding."""
    decode: Callable[[Sequence[int]], str] = field(init=False, repr=False)
    """The text of tokens: see `decoder`."""
    token_text: Callable[[int], str] = field(init=False, repr=False)
    """The text of one token: see `burnish.rollout.server.detokenize.token_text`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", decoder(self.tokenizer))
        object.__setattr__(self, "token_text", token_text(self.tokenizer))
        # The first call may change settings of the tokenizer, which must not happen while another thread decodes.
        encode_text("", self.tokenizer)


def engine_requests(
    request: CompletionRequest | ChatRequest, model: ServedModel, request_id: str
) -> list[RolloutRequest]:
    """One for each choice, the samples of the first prompt first.

    Equal requests with equal seeds get equal answers, whatever else the engine does: the random streams are named by the
    seed and by the number of the prompt and of the sample in the request.

    Raises:
        ApiError: a prompt or a value that cannot be served.
    """
    prompts = _chat_prompts(request, model) if isinstance(request, ChatRequest) else _prompts(request, model)
    if len(prompts) * request.num_samples > MAX_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts times n={request.num_samples} are more than {MAX_CHOICES} choices; split the request.",
            param="n",
        )
    seed = secrets.randbits(63) if request.seed is None else request.seed
    requests = []
    for number, prompt_ids in enumerate(prompts):
        sampling = _sampling(request, model, len(prompt_ids), seed)
        requests += [
            RolloutRequest(f"{request_id}-{number}-{sample}", prompt_ids, str(number), sample, sampling)
            for sample in range(request.num_samples)
        ]
    return requests


def _prompts(request: CompletionRequest, model: ServedModel) -> list[list[int]]:
    prompt = request.prompt
    if prompt is None:
        raise ApiError("The request has no prompt.", param="prompt")
    if isinstance(prompt, list) and prompt and not _is_ids(prompt):
        # The bound is checked before the work.
        if len(prompt) > MAX_CHOICES:
            raise ApiError(f"{len(prompt)} prompts are more than {MAX_CHOICES}; split the request.", param="prompt")
        return [_prompt(entry, f"Prompt {number}", model) for number, entry in enumerate(prompt)]
    return [_prompt(prompt, "The prompt", model)]


def _prompt(prompt: Any, name: str, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        ids = encode_text(prompt, model.tokenizer)
    elif isinstance(prompt, list) and _is_ids(prompt):
        ids = prompt
    else:
        raise ApiError(
            f"{name} is {json.dumps(prompt)[:80]}, but a prompt is a text or a list of token ids.", param="prompt"
        )
    return _checked(ids, name, "prompt", model)


def _is_ids(prompt: list[Any]) -> bool:
    return all(type(entry) is int for entry in prompt)


def _chat_prompts(request: ChatRequest, model: ServedModel) -> list[list[int]]:
    if request.prompt_token_ids is not None:
        return [_checked(request.prompt_token_ids, "The prompt", "prompt_token_ids", model)]
    messages, kwargs = request.messages or [], request.chat_template_kwargs or {}
    if not model.tokenizer.chat_template:
        raise ApiError(
            f"The model {model.name} has no chat template: use /v1/completions, or start the server with --chat-template."
        )
    if taken := [name for name in _OWN_TEMPLATE_ARGUMENTS if name in kwargs]:
        raise ApiError(
            f"chat_template_kwargs may not hold {', '.join(taken)}: the server sets it.", param="chat_template_kwargs"
        )
    tools = None if request.tool_choice == "none" else request.tools
    try:
        ids = render(_with_parsed_arguments(messages), model.tokenizer, tools=tools, chat_template_kwargs=kwargs)
    except BurnishError as error:
        raise ApiError(str(error), param="messages") from error
    except _TEMPLATE_ERRORS as error:
        raise ApiError(
            f"The chat template cannot render these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return [_checked(ids, "The prompt", "messages", model)]


def _with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI writes the arguments of a tool call as JSON in a string; chat templates want the object."""
    return [
        {**message, "tool_calls": [_with_parsed_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # What a model wrote may be broken, and it is shown what it wrote.
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _checked(ids: list[int], name: str, param: str, model: ServedModel) -> list[int]:
    if not ids:
        raise ApiError(f"{name} is empty; a model needs at least one token to go on from.", param=param)
    if len(ids) >= model.max_length:
        raise ApiError(
            f"{name} has {len(ids)} tokens, but the model holds {model.max_length} of prompt and response together. "
            f"Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    if wrong := _outside(ids, model.vocab_size):
        raise ApiError(f"{name} holds token id {wrong[0]}, but the model has {model.vocab_size} tokens.", param=param)
    return ids


def _outside(ids: Sequence[int], vocab_size: int) -> list[int]:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return []
    return [token for token in ids if not 0 <= token < vocab_size]


def _sampling(request: ApiRequest, model: ServedModel, prompt_length: int, seed: int) -> SamplingParams:
    name, max_tokens = request.max_tokens_field
    room = model.max_length - prompt_length
    if max_tokens is not None and max_tokens > room:
        raise ApiError(
            f"The prompt's {prompt_length} tokens and {name}={max_tokens} are {prompt_length + max_tokens} together, but the "
            f"model holds {model.max_length}. Shorten the prompt or lower {name} to {room}.",
            param=name,
            code="context_length_exceeded",
        )
    max_new_tokens = room if max_tokens is None else max_tokens
    min_tokens = request.min_tokens or 0
    if min_tokens > max_new_tokens:
        bound = f"{name}={max_tokens}" if max_tokens is not None else f"the {room} tokens that the prompt leaves"
        raise ApiError(f"min_tokens={min_tokens} is more than {bound}.", param="min_tokens")
    stop_token_ids = request.stop_token_ids or []
    if wrong := _outside(stop_token_ids, model.vocab_size):
        raise ApiError(
            f"stop_token_ids holds {wrong[0]}, but the model has {model.vocab_size} tokens.", param="stop_token_ids"
        )
    temperature = _within("temperature", request.temperature, 1.0, _TEMPERATURES, zero="; 0 decodes greedily")
    penalty = _within("repetition_penalty", request.repetition_penalty, 1.0, _REPETITION_PENALTIES)
    top_k = -1 if request.top_k is None or request.top_k >= model.vocab_size else request.top_k
    try:
        if request.stop:
            token_bytes(model.tokenizer)  # Not every tokenizer's tokens can be searched for strings.
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=top_k,
            min_p=request.min_p or 0.0,
            repetition_penalty=penalty,
            min_new_tokens=min_tokens,
            ignore_eos=bool(request.ignore_eos),
            eos_token_ids=model.eos_token_ids,
            stop_token_ids=tuple(stop_token_ids),
            stop=tuple(request.stop or ()),
            seed=seed,
        )
    except RolloutError as error:
        raise ApiError(str(error)) from error


def _within(name: str, value: float | None, default: float, bounds: tuple[float, float], zero: str = "") -> float:
    if value is None or (zero and value == 0):
        return default if value is None else 0.0
    if not bounds[0] <= value <= bounds[1]:
        raise ApiError(f"{name}={value} must be between {bounds[0]:g} and {bounds[1]:g}{zero}.", param=name)
    return value
