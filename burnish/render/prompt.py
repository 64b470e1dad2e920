"""From messages to prompt ids: the one function that the length filter, the rollout and all others share."""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.utils.errors import ConfigError, DataError, ModelError

Messages = list[dict[str, Any]]

# Under which key of a message its thoughts are, by template.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_OWN_ARGUMENTS = ("tokenize", "return_dict", "add_generation_prompt", "conversation", "tools", "chat_template")

# Characters tokenized at once: what a tokenizer returns is a hundred times as large for a moment.
_MOST_AT_ONCE = 1_000_000

Composed = str | list[int]
"""A prompt's text; its ids where the tokenizer has a way of its own from messages or texts to ids."""


def render(
    messages: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Prompt ids of a conversation.

    ========== ============================== =================================================================
    ``messages`` tokenizer with chat template  tokenizer without
    ========== ============================== =================================================================
    messages   the template                   ModelError
    str        one user message               the text's ids as the tokenizer makes them (with its begin token),
                                              less an end-of-sequence token that it appends
    ========== ============================== =================================================================

    A string that was templated already is templated again: see `looks_templated`.

    Args:
        tools: functions or JSON schemas that the template shows to the model.
        chat_template_kwargs: further variables of the template (``data.apply_chat_template_kwargs``).
        add_generation_prompt: end with the start of an assistant's turn.

    Raises:
        DataError: a message is malformed, the template refuses the conversation, or nothing is left of it.
        ModelError: messages are given and the tokenizer has no chat template.
    """
    composed = compose(
        messages,
        tokenizer,
        tools=tools,
        chat_template_kwargs=chat_template_kwargs,
        add_generation_prompt=add_generation_prompt,
    )
    (ids,) = encode_composed([composed], tokenizer)
    return checked_ids(ids, messages)


def compose(
    messages: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Composed:
    """The first half of `render`, with the same arguments and errors; `encode_composed` and `checked_ids` are the rest."""
    if isinstance(messages, str) and not tokenizer.chat_template:
        return messages if _is_plain(tokenizer) else encode_text(messages, tokenizer)
    return _apply_template(
        normalize_messages(messages), tokenizer, tools, dict(chat_template_kwargs or {}), add_generation_prompt
    )


def encode_composed(prompts: Sequence[Composed], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of composed prompts: the same as one by one, and many at once take all cores."""
    # Where there is a template, it alone writes special tokens.
    is_templated = bool(tokenizer.chat_template)
    ids: list[list[int]] = []
    for texts in _portions([prompt for prompt in prompts if isinstance(prompt, str)]):
        encoded: Any = tokenizer(
            texts, add_special_tokens=not is_templated, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        ids += encoded if is_templated else map(partial(_without_end, tokenizer=tokenizer), encoded, texts)
    following = iter(ids)
    return [next(following) if isinstance(prompt, str) else prompt for prompt in prompts]


def checked_ids(ids: list[int], messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids of a prompt.

    Raises:
        DataError: there are none.
    """
    if not ids:
        raise DataError(
            f"The prompt {messages!r:.200} has no tokens: a model needs at least one to go on from. Give it a text, or leave "
            f"it out."
        )
    return ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The text's ids as the tokenizer makes them (with its begin token), less an end-of-sequence token that it appends."""
    return _without_end(list(tokenizer(text)["input_ids"]), text, tokenizer=tokenizer)


def normalize_messages(messages: str | Sequence[Mapping[str, Any]]) -> Messages:
    """Messages as a fresh list of dicts; a string becomes one user message, text parts of a content become one text.

    Raises:
        DataError: it is no conversation; says which message and why.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise DataError(f"A prompt is a string or a list of messages, not {_describe(messages)}.")
    if not messages:
        raise DataError("The list of messages is empty.")
    return [_normalize_message(message, number) for number, message in enumerate(messages)]


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: white space, control characters, spaces of no width."""
    return all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def is_empty_message(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing: no text but white space, no call of a tool, no thought."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    said = [content, *(message.get(key) for key in REASONING_KEYS)]
    return not message.get("tool_calls") and all(is_blank(str(text)) for text in said if text is not None)


def is_empty_prompt(messages: str | Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt asks nothing: a text of white space alone, or messages that say nothing beside the system's.

    A chat template writes its own tokens around nothing too, so the ids do not tell.
    """
    if isinstance(messages, str):
        return is_blank(messages)
    asked = [message for message in messages if message.get("role") not in ("system", "developer")]
    return all(map(is_empty_message, asked or messages))


def template_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that the chat template writes around a user's message, as text; none without a template."""
    if not tokenizer.chat_template:
        return ()
    probe = render_text([{"role": "user", "content": "x"}], tokenizer)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(token for token in special if token in probe))


def looks_templated(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``text`` holds a special token that the chat template writes: then it was templated before."""
    return any(marker in text for marker in template_markers(tokenizer))


def render_text(
    messages: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text that `render` turns into ids, for showing, for tests of a template, and where places in it are looked for."""
    if isinstance(messages, str) and not tokenizer.chat_template:
        return messages
    return str(
        _call_template(
            normalize_messages(messages),
            tokenizer,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **dict(chat_template_kwargs or {}),
        )
    )


def shows_tools(
    messages: str | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the template has a place for schemas of tools: whether the text is another one with them than without."""
    with_tools = render_text(messages, tokenizer, tools=tools, chat_template_kwargs=chat_template_kwargs)
    return with_tools != render_text(messages, tokenizer, chat_template_kwargs=chat_template_kwargs)


def check_template_kwargs(chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError where variables of the template are arguments that burnish gives itself."""
    taken = [key for key in _OWN_ARGUMENTS if key in chat_template_kwargs]
    if taken:
        raise ConfigError(f"data.apply_chat_template_kwargs may not hold {', '.join(taken)}: burnish sets it itself.")


def _without_end(ids: list[int], text: str, *, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Some tokenizers close every text; a prompt that ends so asks the model to go on after the end."""
    closed = bool(ids) and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if closed else ids


def applies_its_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `apply_chat_template` is the library's: the template's text, tokenized."""
    method = getattr(tokenizer.apply_chat_template, "__func__", None)
    return method is PreTrainedTokenizerBase.apply_chat_template


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether nothing but the tokenizers library makes texts ids, so that they do not depend on the texts beside them."""
    return (
        applies_its_template(tokenizer)
        and type(tokenizer).__call__ is PreTrainedTokenizerBase.__call__
        and getattr(tokenizer._encode_plus, "__func__", None) is PreTrainedTokenizerFast._encode_plus
    )


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, in lists of about `_MOST_AT_ONCE` characters."""
    portion: list[str] = []
    length = 0
    for text in texts:
        if portion and length + len(text) > _MOST_AT_ONCE:
            yield portion
            portion, length = [], 0
        portion.append(text)
        length += len(text)
    if portion:
        yield portion


def _apply_template(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any] | None,
    chat_template_kwargs: dict[str, Any],
    add_generation_prompt: bool,
) -> Composed:
    if not tokenizer.chat_template:
        raise ModelError(
            f"The prompt is a list of messages, and the tokenizer {tokenizer.name_or_path!r} has no chat template. "
            f"Give one as actor_rollout_ref.model.custom_chat_template, or make the prompts plain strings."
        )
    check_template_kwargs(chat_template_kwargs)
    how = {"tokenize": False} if _is_plain(tokenizer) else {"tokenize": True, "return_dict": True}
    made = _call_template(
        messages,
        tokenizer,
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        **how,
        **chat_template_kwargs,
    )
    return str(made) if _is_plain(tokenizer) else list(made["input_ids"])


def _call_template(messages: Messages, tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> Any:
    """`apply_chat_template`. Most templates want the arguments of a tool call as an object; to those that fail on one they are
    given as the JSON text that it is."""
    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
    except TemplateError as error:
        raise DataError(f"The chat template refuses this conversation: {error}.") from error
    return _call_template(with_argument_texts(messages), tokenizer, **arguments)


def with_argument_texts(messages: Messages) -> Messages:
    """The messages with the arguments of tool calls as JSON texts.

    Raises:
        TypeError: they are texts already: a template that fails on them fails for another reason.
    """
    changed = False

    def texts(call: Any) -> Any:
        nonlocal changed
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": texts(call["function"])}
        if not isinstance(call.get("arguments"), Mapping):
            return call
        changed = True
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    made = [
        {**message, "tool_calls": [texts(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
    if not changed:
        raise TypeError("the template fails on a tool call whose arguments are no object")
    return made


def _normalize_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"Message {number} is {_describe(message)}, not an object with 'role' and 'content'.")
    if not isinstance(message.get("role"), str):
        raise DataError(f"Message {number} has no 'role' that is a string; its keys are {sorted(map(str, message))}.")
    content = message.get("content")
    if isinstance(content, list):
        content = _join_text_parts(content, number)
    # A template may read the content of every message, so one that only calls tools gets an empty text.
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"Message {number} ({message['role']}) has {_describe(content)} as 'content', not a text.")
    normalized = {**message, "content": content}
    if message.get("tool_calls"):
        normalized["tool_calls"] = _with_argument_objects(message["tool_calls"], number)
    return normalized


def _with_argument_objects(calls: Any, number: int) -> list[Any]:
    """Tool calls with their arguments as objects: templates write them as JSON, and would quote a text of JSON once more."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"Message {number} has {_describe(calls)} as 'tool_calls', not a list of calls.")
    return [_with_argument_object(call) for call in calls]


def _with_argument_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_argument_object(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except ValueError:
        return call  # No JSON: the template shows what is there.
    return {**call, "arguments": value} if isinstance(value, dict) else call


def _join_text_parts(parts: list[Any], number: int) -> str:
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"Message {number} has a content part of type {kind!r}; only text parts can be rendered.")
    return "".join(part["text"] for part in parts)


def _describe(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} ({value!r:.80})"
