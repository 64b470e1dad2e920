"""What a request may hold: the fields of OpenAI's API that burnish has, and burnish's own beside them."""

import difflib
import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from burnish.rollout.server.errors import ApiError

# Bounds that keep one client from stalling the others.
MAX_CHOICES = 4096
MAX_STOPS = 64
_MAX_STOP_LENGTH = 1024

_Integer64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Options):
    """``stream_options``."""

    include_usage: bool | None = None


class ApiRequest(_Options):
    """What both endpoints take. None: the client left it out, or sent null."""

    # Fields of OpenAI's API that burnish does nothing about, and the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }
    # Fields that only OpenAI's own accounting reads.
    ignored: ClassVar[tuple[str, ...]] = ("prompt_cache_key", "safety_identifier", "user")

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: _Integer64 | None = None
    stop: list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]] | None = Field(
        None, max_length=MAX_STOPS
    )
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def num_samples(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probs."""
        raise NotImplementedError

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """The field that bounds the response, and its value."""
        return "max_tokens", self.max_tokens

    def check(self) -> None:
        """What no single field shows.

        Raises:
            ApiError: two fields contradict each other, or ask for what the engine does not give.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options belongs to stream=true.", param="stream_options")


class CompletionRequest(ApiRequest):
    """``POST /v1/completions``."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = ApiRequest.neutral | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Any = None
    """Text, token ids, or a list of either."""
    logprobs: int | None = Field(None, ge=0)

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probs."""
        return self.logprobs is not None

    def check(self) -> None:
        """See `ApiRequest.check`."""
        super().check()
        if self.logprobs:
            raise ApiError(
                f"logprobs={self.logprobs} asks for the log-probs of other tokens than the sampled ones, which the engine "
                f"does not keep; logprobs=0 gives those of the sampled ones.",
                param="logprobs",
            )


class ChatRequest(ApiRequest):
    """``POST /v1/chat/completions``."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = ApiRequest.neutral | {
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
    }

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probs."""
        return bool(self.logprobs)

    @property
    def max_tokens_field(self) -> tuple[str, int | None]:
        """The field that bounds the response, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def check(self) -> None:
        """See `ApiRequest.check`."""
        super().check()
        if self.top_logprobs:
            raise ApiError(
                f"top_logprobs={self.top_logprobs} asks for the log-probs of other tokens than the sampled ones, which the "
                f"engine does not keep; logprobs=true alone gives those of the sampled ones.",
                param="top_logprobs",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                f"tool_choice={json.dumps(self.tool_choice)[:80]}: the server forces no call of a tool; there is none and "
                f"auto.",
                param="tool_choice",
            )
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise ApiError("Give either messages or prompt_token_ids.", param="messages")
        if self.prompt_token_ids is not None and (self.tools or self.chat_template_kwargs):
            raise ApiError(
                "With prompt_token_ids there is nothing to render, so tools and chat_template_kwargs have no effect; leave "
                "them out.",
                param="tools" if self.tools else "chat_template_kwargs",
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} are two names of one "
                f"bound; give one of them.",
                param="max_tokens",
            )


AnyRequest = TypeVar("AnyRequest", bound=ApiRequest)


def parse_request(kind: type[AnyRequest], body: Any) -> AnyRequest:
    """The request in a body's JSON.

    Raises:
        ApiError: says which field is wrong, and how.
    """
    if not isinstance(body, dict):
        raise ApiError(f"The body must be a JSON object, not {type(body).__name__}.")
    fields = dict(body)
    for name in kind.ignored:
        fields.pop(name, None)
    for name, values in kind.neutral.items():
        value = fields.pop(name, None)
        if value is not None and value not in values:
            raise ApiError(
                f"{name}={json.dumps(value)[:80]} is not supported; leave it out, or set {json.dumps(values[0])}.",
                param=name,
            )
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_sentence(error, kind) from error
    request.check()
    return request


def _as_sentence(error: ValidationError, kind: type[ApiRequest]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), kind.model_fields, n=1)
        hint = f" Did you mean {near[0]}?" if near else " docs/serve.md lists the fields."
        return ApiError(f"The server does not know the field {param}.{hint}", param=param)
    rule = first["msg"].replace("Input ", "the value ", 1)
    return ApiError(f"{param}={json.dumps(first['input'], default=str)[:80]}: {rule}.", param=param)
