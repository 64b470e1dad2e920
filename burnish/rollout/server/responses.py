"""What a client is sent: one JSON object, or the same in chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from burnish.rollout.base import RolloutRequest
from burnish.rollout.server.detokenize import StreamedText, response_text
from burnish.rollout.server.driver import Progress
from burnish.rollout.server.prompts import ServedModel
from burnish.rollout.server.protocol import ChatRequest, CompletionRequest

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Piece:
    """A part of one choice, or all of it."""

    index: int
    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    offset: int
    """Characters of the tokens before, as single tokens are written."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first: bool = True


class _Layout(Protocol):
    """How one endpoint writes pieces."""

    prefix: str
    object: str
    chunk_object: str

    def body(self, piece: Piece, *, in_chunk: bool) -> Json:
        """The text."""
        ...

    def log_probs(self, piece: Piece, text_of: Callable[[int], str]) -> Json:
        """The log-probs."""
        ...


class _CompletionLayout:
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def body(self, piece: Piece, *, in_chunk: bool) -> Json:
        return {"text": piece.text}

    def log_probs(self, piece: Piece, text_of: Callable[[int], str]) -> Json:
        tokens = [text_of(token) for token in piece.token_ids]
        offsets, offset = [], piece.offset
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": list(piece.log_probs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


class _ChatLayout:
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def body(self, piece: Piece, *, in_chunk: bool) -> Json:
        if not in_chunk:
            return {"message": {"role": "assistant", "content": piece.text}}
        delta = {"role": "assistant"} if piece.first else {}
        return {"delta": {**delta, "content": piece.text} if piece.text or piece.first else delta}

    def log_probs(self, piece: Piece, text_of: Callable[[int], str]) -> Json:
        content = []
        for token_id, log_prob in zip(piece.token_ids, piece.log_probs, strict=True):
            token = text_of(token_id)
            # A piece of a character has bytes that its text does not tell.
            data = None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())
            content.append({"token": token, "logprob": log_prob, "bytes": data, "top_logprobs": []})
        return {"content": content}


@dataclass(slots=True)
class _Choice:
    index: int
    prompt_ids: Sequence[int]
    text: StreamedText
    offset: int = 0
    first: bool = True


@dataclass(slots=True)
class Answer:
    """The answer to one request, as it grows.

    Args:
        request, model: what was asked, of what.
        request_id: its id at the engine.
        created: Unix time.
        requests: the engine's, in the order of the choices.
    """

    request: CompletionRequest | ChatRequest
    model: ServedModel
    request_id: str
    created: int
    requests: Sequence[RolloutRequest]
    num_completion_tokens: int = field(default=0, init=False)
    _layout: _Layout = field(init=False, repr=False)
    _choices: dict[str, _Choice] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._layout = _ChatLayout() if isinstance(self.request, ChatRequest) else _CompletionLayout()
        stops = self.request.stop or ()
        self._choices = {
            request.request_id: _Choice(index, request.prompt_ids, StreamedText(self.model.decode, stops))
            for index, request in enumerate(self.requests)
        }

    def whole(self, ends: Sequence[Progress]) -> Json:
        """The answer in one piece, from the end of every request."""
        choices = []
        for progress in ends:
            response = progress.response
            assert response is not None
            self.num_completion_tokens += len(response.token_ids)
            text = response_text(
                self.model.decode, response.token_ids, response.stop_reason, ended_by_token=_ended_by_token(progress)
            )
            piece = Piece(
                index=self._choices[progress.request_id].index,
                text=text,
                token_ids=response.token_ids,
                log_probs=response.log_probs,
                offset=0,
                finish_reason=response.finish_reason,
                stop_reason=response.stop_reason,
            )
            choices.append(self._choice(piece, self._choices[progress.request_id], in_chunk=False))
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head(self._layout.object), "choices": choices, "usage": self.usage()}

    def chunks(self, progress: Progress) -> list[Json]:
        """What there is to send of one request's progress: nothing while its text is held back, else one chunk."""
        choice, response = self._choices[progress.request_id], progress.response
        self.num_completion_tokens += len(progress.token_ids)
        if response is None:
            text = choice.text.push(progress.token_ids)
        else:
            text = choice.text.finish(
                progress.token_ids, response.stop_reason, ended_by_token=_ended_by_token(progress)
            )
        piece = Piece(
            index=choice.index,
            text=text,
            token_ids=progress.token_ids,
            log_probs=progress.log_probs,
            offset=choice.offset,
            finish_reason=None if response is None else response.finish_reason,
            stop_reason=None if response is None else response.stop_reason,
            first=choice.first,
        )
        shows_tokens = self.request.return_token_ids or self.request.wants_log_probs
        if not (text or response is not None or (shows_tokens and progress.token_ids)):
            return []
        chunk = self.chunk([self._choice(piece, choice, in_chunk=True)])
        choice.first = False
        return [chunk]

    def usage_chunk(self) -> Json:
        """The last chunk, where the client asked for it."""
        return self.chunk([], usage=self.usage())

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        """A chunk with these choices."""
        options = self.request.stream_options
        shows_usage = options is not None and options.include_usage
        head = self._head(self._layout.chunk_object)
        return {**head, "choices": choices, **({"usage": usage} if shows_usage else {})}

    def usage(self) -> Json:
        """Token counts; a prompt counts once, however many samples it has."""
        num_prompt_tokens = sum(len(request.prompt_ids) for request in self.requests if request.sample_index == 0)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
        }

    def _head(self, kind: str) -> Json:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model.name}

    def _choice(self, piece: Piece, choice: _Choice, *, in_chunk: bool) -> Json:
        log_probs = None
        if self.request.wants_log_probs and (piece.token_ids or not in_chunk):
            text_of = self.model.token_text
            log_probs = self._layout.log_probs(piece, text_of)
            choice.offset += sum(len(text_of(token)) for token in piece.token_ids)
        result = {
            "index": piece.index,
            **self._layout.body(piece, in_chunk=in_chunk),
            "logprobs": log_probs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.request.return_token_ids:
            result["token_ids"] = list(piece.token_ids)
            if piece.first:
                result["prompt_token_ids"] = list(choice.prompt_ids)
        return result


def _ended_by_token(progress: Progress) -> bool:
    """Whether the last token is a stop token: it is among the tokens, and no part of the text."""
    response = progress.response
    return response is not None and response.finish_reason == "stop" and not isinstance(response.stop_reason, str)
