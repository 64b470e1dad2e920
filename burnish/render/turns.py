"""What a chat template writes for one assistant's turn: behind which prompt, and where it ends."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from burnish.render.prefixes import SEEN_BY_TEMPLATES, Prefixes, prefixes_of, seen_by_templates
from burnish.render.prompt import (
    REASONING_KEYS,
    Messages,
    applies_its_template,
    check_template_kwargs,
    render_text,
    with_argument_texts,
)
from burnish.render.spans import Span
from burnish.utils.errors import DataError, ModelError
from burnish.utils.foreign_code import Caught

_PROBE = "42 it is"
# Texts of beginnings that cost less to render than to watch a template for.
_FEW = 8
# What is none of the template's variables, whatever it would do.
_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A thought that the prompt opens, or has opened and closed again: the model's turn begins behind it.
_THOUGHT_IN_PROMPT = re.compile(r"<think>(?P<space>\s*)(?P<closed></think>\s*)?\Z")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as the template writes it.

    Attributes:
        text: all of it.
        marks: the places that the template marks as generated, [begin, end) in characters; None: it marks nothing.
    """

    text: str
    marks: tuple[Span, ...] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, as generation would have seen and given it.

    Attributes:
        number: of its message.
        written: the conversation up to it.
        begin: where the prompt ends, in ``written.text``.
        end: where the answer ends, with the token that ends a turn.
        end_token: the place of that token; None: the template writes none.
        thought_begin: where the thought begins that the prompt opens; ``begin`` where it opens none.
    """

    number: int
    written: Written
    begin: int
    end: int
    end_token: Span | None
    thought_begin: int

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return self.written.text[: self.end]


class History:
    """A conversation, asked for the texts of its beginnings: after some, all come from one rendering where they can (see
    `burnish.render.prefixes`)."""

    def __init__(self, reader: "TurnReader", messages: Messages, tools: Sequence[Any] | None) -> None:
        self.messages = messages
        self._reader = reader
        self._tools = tools
        self._num_asked = 0
        self._found: dict[bool, Prefixes | None] = {}
        self._marks: tuple[Span, ...] | None = None

    def write(self, number: int, *, prompt: bool = False) -> Written:
        """The first ``number`` messages as text; with ``prompt`` up to where the assistant goes on.

        Raises:
            DataError: the template refuses them or fails.
        """
        self._num_asked += 1
        prefixes = self._prefixes(prompt) if self._num_asked > _FEW else None
        if prefixes is None or number in prefixes.unproven:
            return self._reader.write(self.messages[:number], self._tools, prompt=prompt)
        marks = None if prompt or self._marks is None else prefixes.marks(number, self._marks)
        return Written(prefixes.of(number), marks)

    def differs_without_first(self) -> bool:
        """Whether the first message makes any difference to the second."""
        other = self.messages[1:2]
        return not other or self.write(2).text != self._reader.write(other, self._tools).text

    def _prefixes(self, prompt: bool) -> Prefixes | None:
        if prompt not in self._found:
            # A template that fails on the whole conversation may do on some beginnings alone, which say so themselves.
            with Caught() as caught:
                self._found[prompt] = self._read_prefixes(prompt)
            if caught.error is not None:
                self._found[prompt] = None
        return self._found[prompt]

    def _read_prefixes(self, prompt: bool) -> Prefixes | None:
        prefixes = self._reader.prefixes(self.messages, self._tools, prompt=prompt)
        if prefixes is None:
            return None
        whole = self._reader.write(self.messages, self._tools, prompt=prompt)
        if whole.text != prefixes.text or list(whole.marks or ()) != sorted(whole.marks or ()):
            return None
        if not prompt:
            self._marks = whole.marks
        return prefixes


class TurnReader:
    """A chat template, asked for the turns of conversations.

    Args:
        chat_template_kwargs: further variables of the template.

    Raises:
        ModelError: the tokenizer has no chat template.
        ConfigError: a variable is one that burnish sets itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"The rows are conversations, and the tokenizer {tokenizer.name_or_path!r} has no chat template. Give one as "
                f"model.custom_chat_template, or rows with a prompt and a response as plain text (data.prompt_key and "
                f"data.response_key)."
            )
        check_template_kwargs(chat_template_kwargs)
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs)
        self._end, self._tail, self._special = self._learn_end()

    @property
    def ends_turns(self) -> bool:
        """Whether a token that ends a turn stands behind an answer."""
        return not self._tail

    def write(self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False) -> Written:
        """The conversation as text; with ``prompt`` up to where the assistant goes on.

        Raises:
            DataError: the template refuses it or fails.
        """
        try:
            if prompt or not self._marks(tools):
                return Written(
                    render_text(
                        messages,
                        self._tokenizer,
                        tools=tools,
                        chat_template_kwargs=self._kwargs,
                        add_generation_prompt=prompt,
                    )
                )
            return self._write_marked(messages, tools)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DataError(
                f"The chat template fails on this conversation ({type(error).__name__}: {error}): perhaps it reads a key that a "
                f"message does not have, or one of another type."
            ) from error

    def prefixes(self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool) -> Prefixes | None:
        """The texts of all beginnings of a conversation; None where they have to be rendered one by one.

        Raises:
            Exception: what the template raises.
        """
        if not applies_its_template(self._tokenizer) or _PARAMETERS & set(self._kwargs):
            return None
        seeing = {**self._kwargs, "chat_template": SEEN_BY_TEMPLATES}
        seen = seen_by_templates(render_text(messages, self._tokenizer, tools=tools, chat_template_kwargs=seeing))
        variables = {"documents": None, **self._tokenizer.special_tokens_map, **self._kwargs, "tools": seen[1]}
        return prefixes_of(self._template(tools), seen[0], variables, add_generation_prompt=prompt)

    def turn(self, history: History, number: int) -> Turn:
        """The answer that is message ``number``.

        Raises:
            DataError: the template refuses the conversation, or writes another beginning of the turn than its prompt has and
                what generation would have given cannot be known.
        """
        prompt = history.write(number, prompt=True).text
        written = history.write(number + 1)
        if not written.text.startswith(prompt):
            written = Written(self._as_generated(prompt, written.text, history.messages[number]))
        begin = len(prompt)
        opened = _THOUGHT_IN_PROMPT.search(prompt)
        thought_begin = begin if opened is None else opened.start()
        end_token = self._find_end(written.text, begin)
        if end_token is not None:
            return Turn(number, written, begin, end_token[1], end_token, thought_begin)
        end = len(written.text)
        if written.text.endswith(self._tail):
            end = max(begin, end - len(self._tail))
        return Turn(number, written, begin, end, None, thought_begin)

    def _learn_end(self) -> tuple[str | None, str, tuple[str, ...]]:
        """The token that ends a plain answer, what stands behind one where there is no such token, and all special tokens."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in tokens if token.special and str(token).strip()}
        special |= {str(self._tokenizer.eos_token)} if self._tokenizer.eos_token else set()
        last, inner = self._behind_probe([]), self._behind_probe([{"role": "user", "content": "And after that?"}])
        if last is None:
            return None, "", tuple(special)
        if not any(text in last for text in special):
            # Where no special token stands behind an answer, one that is a token of its own may.
            special |= {str(token) for token in tokens if str(token).strip() and str(token) in last}
        found = _tokens_in(last, special)
        if not found:
            return None, last, tuple(special)
        # What stands there at the end of a conversation alone ends no turn, unless nothing else does.
        kept = [token for place, token in found if (inner or "").startswith(last[: place + len(token)])]
        return (kept[-1] if kept else found[0][1]), "", tuple(special)

    def _behind_probe(self, more: Messages) -> str | None:
        """What stands behind a plain answer; None where the template does not write one."""
        turns = [{"role": "user", "content": "Which number comes after 41?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.write([*turns, *more], None).text
        except DataError:
            return None
        return text.rpartition(_PROBE)[2] if _PROBE in text else None

    def _marks(self, tools: Sequence[Any] | None) -> bool:
        return _MARKED.search(self._template(tools)) is not None

    def _template(self, tools: Sequence[Any] | None) -> str:
        return str(self._tokenizer.get_chat_template(None, list(tools) if tools else None))

    def _write_marked(self, messages: Messages, tools: Sequence[Any] | None) -> Written:
        text = render_text(
            messages, self._tokenizer, tools=tools, chat_template_kwargs=self._kwargs, add_generation_prompt=False
        )
        arguments: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "chat_template": self._template(tools),
            "return_assistant_tokens_mask": True,
            **self._tokenizer.special_tokens_map,
            **self._kwargs,
        }
        rendered: Any  # its declared type is another than what it returns
        try:
            rendered = render_jinja_template([messages], **arguments)
        except TypeError:
            rendered = render_jinja_template([with_argument_texts(messages)], **arguments)
        texts, marks = rendered
        if list(texts) != [text]:
            raise DataError(
                "The chat template writes another text when it is asked for the places that it marks as generated."
            )
        return Written(text, tuple((int(begin), int(end)) for begin, end in marks[0]))

    def _find_end(self, text: str, begin: int) -> Span | None:
        """The token that ends the turn: of the special tokens that close the text, the first that ends plain answers, else the
        first that is the end-of-sequence token, else the last (some templates end calls of tools with another token)."""
        found: list[tuple[int, str]] = []
        rest = text.rstrip()
        while self._special and rest.endswith(self._special):
            token = max((token for token in self._special if rest.endswith(token)), key=len)
            if len(rest) - len(token) < begin:
                break
            found.append((len(rest) - len(token), token))
            rest = rest[: -len(token)].rstrip()
        if not found:
            return None
        for end in (self._end, self._tokenizer.eos_token):
            for place, token in reversed(found):
                if token == end:
                    return place, place + len(token)
        place, token = found[0]
        return place, place + len(token)

    def _as_generated(self, prompt: str, text: str, message: Mapping[str, Any]) -> str:
        """The conversation with the turn as the prompt asks for it, where the template writes it otherwise later.

        That is known where all that differs is a thought that the prompt opens (the thought and the answer follow), or
        one that it opens and closes (the answer follows, without a thought).
        """
        opened = _THOUGHT_IN_PROMPT.search(prompt)
        if opened is None or not text.startswith(prompt[: opened.start()]):
            raise DataError(
                "The chat template writes the conversation up to this answer otherwise than the prompt that asks for it, so "
                "what would be learnt is not what generation sees. Give a template whose prompt (add_generation_prompt) is the "
                "beginning of the answered conversation as model.custom_chat_template."
            )
        later = text[opened.start() :]
        if opened["closed"] is not None:
            if _thoughts_of(message):
                raise DataError(
                    "This answer has thoughts, and its prompt ends with an empty thought that is closed (enable_thinking is "
                    "false): generation would never give them. Leave the thoughts out, or enable thinking."
                )
            return prompt + _EMPTY_THOUGHT.sub("", later, count=1)
        if message.get("tool_calls"):
            raise DataError(
                "The prompt of this answer opens a thought, and the chat template writes the answer without one, with calls of "
                "tools behind it: what generation would give is not known. Give a template that keeps thoughts as "
                "model.custom_chat_template."
            )
        thoughts = _thoughts_of(message)
        if not thoughts:
            raise DataError(
                "The prompt of this answer opens a thought (<think>), and the answer has none, so generation would never give "
                "it. Give thoughts, in <think> </think> before the answer or as the message's reasoning_content, or a template "
                "that opens none (model.custom_chat_template)."
            )
        end = self._find_end(later, 0)
        return prompt + thoughts.removeprefix(opened["space"]) + ("" if end is None else later[end[0] :])


def _tokens_in(text: str, tokens: Iterable[str]) -> list[tuple[int, str]]:
    """Which of the tokens stand in the text, where first."""
    return sorted((text.find(token), token) for token in tokens if token in text)


def _thoughts_of(message: Mapping[str, Any]) -> str:
    """What follows ``<think>``: the thought, its closing and the answer; "" where the message has no thought."""
    content = str(message["content"])
    if "</think>" in content:
        return content.lstrip().removeprefix("<think>") if content.lstrip().startswith("<think>") else content
    reasoning = reasoning_of(message)
    return f"{reasoning}\n</think>\n\n{content}" if reasoning else ""


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The thought that a message has beside its content, under one of the names that templates know; "" where it has none."""
    return next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "").strip("\n")
