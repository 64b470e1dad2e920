"""One row of a file to a conversation: the messages, or the prompt and the response, in whatever form they are stored."""

from dataclasses import dataclass
from typing import Any

from burnish.config.sft import SFTDataConfig
from burnish.data.problems import RowError, describe
from burnish.data.readers import Row
from burnish.data.rows import LIKE_MESSAGES, UNKNOWN_SOURCE, from_text, parse_messages, read_tools
from burnish.render import LOSS_KEYS

_MESSAGES = "a list of messages with 'role' and 'content'"
_LIKELY_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
_LIKELY_PROMPTS = ("prompt", "question", "instruction", "problem", "input", "query")
_LIKELY_RESPONSES = ("response", "completion", "answer", "output", "solution", "chosen")
# What ShareGPT calls those who speak.
_SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a row says.

    Attributes:
        messages: the conversation; None: the row is a plain prompt and a plain response.
        prompt, response: those.
        tools: schemas of functions.
        enable_thinking: what the row asks of the template; None: nothing.
        data_source: the column of that name (a number as text), else "unknown".
    """

    messages: list[Any] | None
    prompt: str = ""
    response: str = ""
    tools: list[dict[str, Any]]
    enable_thinking: bool | None
    data_source: str

    def as_messages(self, system_prompt: str | None) -> list[Any]:
        """Messages in either case, with ``system_prompt`` before them where they have none."""
        messages = self.messages
        if messages is None:
            messages = [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.response}]
        first = messages[0] if messages else None
        if system_prompt is None or (isinstance(first, dict) and first.get("role") in ("system", "developer")):
            return messages
        return [{"role": "system", "content": system_prompt}, *messages]


def read_conversation(row: Row, config: SFTDataConfig) -> Conversation:
    """The conversation of a row.

    - With ``data.response_key`` it is the prompt (text, or messages) and the response (text, or the assistant's messages) of the
      two columns, of which the response alone is learnt.
    - Without it, it is the messages of the column that ``data.messages_key`` names: a list, or the JSON of one.
    - Messages have ``role`` and ``content``, or ``from`` and ``value`` as ShareGPT has them.

    Raises:
        RowError: a column is missing or of the wrong type; names the column and the way out.
    """
    pair = None if config.response_key is None else _read_pair(row, config.prompt_key or "prompt", config.response_key)
    messages: list[Any] | None = None
    prompt = response = ""
    if pair is None:
        messages = _read_messages(_cell(row, config.messages_key, config), config.messages_key)
    elif isinstance(pair[0], str) and isinstance(pair[1], str):
        prompt, response = pair
    else:
        messages = [*map(_as_context, _turns(pair[0], "user")), *_turns(pair[1], "assistant")]
    tools = row.get(config.tools_key)
    source = row.get("data_source")
    return Conversation(
        messages=messages,
        prompt=prompt,
        response=response,
        tools=read_tools(tools, config.tools_key) if tools else [],
        enable_thinking=_read_flag(row, config.enable_thinking_key),
        data_source=str(source) if isinstance(source, str | int) and source != "" else UNKNOWN_SOURCE,
    )


def _cell(row: Row, key: str, config: SFTDataConfig) -> Any:
    if row.get(key) is not None:
        return row[key]
    raise RowError(
        f"there is no column {key!r}, which data.messages_key names. Columns present: {', '.join(row) or 'none'}."
        f"{_advice(row)}"
        if key not in row
        else f"column {key!r} is empty (null).",
        column=key,
        seen=f"columns {', '.join(row) or 'none'}" if key not in row else "nothing (null)",
        expected=_MESSAGES,
    )


def _advice(row: Row) -> str:
    messages = next((name for name in _LIKELY_MESSAGES if name in row), None)
    if messages is not None:
        return f" Set data.messages_key={messages}."
    prompt = next((name for name in _LIKELY_PROMPTS if name in row), None)
    response = next((name for name in _LIKELY_RESPONSES if name in row), None)
    if prompt is not None and response is not None:
        return f" Set data.prompt_key={prompt} data.response_key={response}."
    return " Set data.messages_key to the one that holds messages, or data.prompt_key and data.response_key to two."


def _read_pair(row: Row, prompt_key: str, response_key: str) -> tuple[Any, Any]:
    values = []
    for name, key in (("prompt_key", prompt_key), ("response_key", response_key)):
        value = _inside(row, key)
        if value is None:
            what = f"column {key!r} is empty (null)" if key in row else f"there is no column {key!r}"
            raise RowError(
                f"{what}, which data.{name} names. Columns present: {', '.join(row) or 'none'}.",
                column=key,
                seen="nothing (null)" if key in row else f"columns {', '.join(row) or 'none'}",
                expected=f"a text, or {_MESSAGES}",
            )
        if isinstance(value, str) and LIKE_MESSAGES.match(value):
            value = parse_messages(value, key)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, str | list):
            raise RowError(
                f"column {key!r} (data.{name}) is {describe(value)}, neither a text nor {_MESSAGES}. Store it as the text that "
                f"the model is to read or write.",
                column=key,
                seen=describe(value),
                expected=f"a text, or {_MESSAGES}",
            )
        values.append(value if isinstance(value, str) else _read_messages(value, key))
    roles = [message.get("role") for message in values[1] if isinstance(message, dict)] if values[1] else []
    if not isinstance(values[1], str) and roles and roles[0] != "assistant":
        raise RowError(
            f"column {response_key!r} (data.response_key) begins with a message of role {roles[0]!r}; a response is the "
            f"assistant's.",
            column=response_key,
            seen=f"role {roles[0]!r}",
            expected="a text, or messages that begin with the assistant's",
        )
    return values[0], values[1]


def _inside(row: Row, key: str) -> Any:
    """The column ``key``, or as ``extra_info.question`` an entry of the object (or its JSON) that a column holds; None: there is
    none."""
    if key in row:
        return row[key]
    column, dot, name = key.partition(".")
    value = from_text(row.get(column), column) if dot else None
    return value.get(name) if isinstance(value, dict) else None


def _turns(part: Any, role: str) -> list[Any]:
    return [{"role": role, "content": part}] if isinstance(part, str) else list(part)


def _as_context(message: Any) -> Any:
    """A message of a prompt: an answer in it is not learnt, unless it asks for that itself."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    asks = any(message.get(key) is not None for key in LOSS_KEYS)
    return message if asks else {**message, "loss": False}


def _read_messages(value: Any, key: str) -> list[Any]:
    if isinstance(value, str) and LIKE_MESSAGES.match(value):
        value = parse_messages(value, key)
    if not isinstance(value, list):
        raise RowError(
            f"column {key!r} is {describe(value)}, not {_MESSAGES}. Where it is an answer or a question as text, set "
            f"data.prompt_key and data.response_key.",
            column=key,
            seen=describe(value),
            expected=_MESSAGES,
        )
    if any(isinstance(message, dict) and "from" in message and "role" not in message for message in value):
        return [_from_sharegpt(message, number, key) for number, message in enumerate(value)]
    return value


def _from_sharegpt(message: Any, number: int, key: str) -> dict[str, Any]:
    """``from`` and ``value`` as ``role`` and ``content``; what else the message has stays."""
    speaker = message.get("from") if isinstance(message, dict) else None
    if not isinstance(speaker, str) or "value" not in message:
        raise RowError(
            f"column {key!r}: message {number} has no 'from' and 'value', and others have: {describe(message)}.",
            column=key,
            seen=describe(message),
            expected="an object with 'from' and 'value'",
        )
    role = _SPEAKERS.get(speaker.lower())
    if role is None:
        calls = (
            " A call of a function is a message of role 'assistant' with 'tool_calls' in the form that chat templates read: "
            "store the conversations as messages with 'role' and 'content'."
            if "function" in speaker.lower()
            else ""
        )
        raise RowError(
            f"column {key!r}: message {number} is from {speaker!r}; read are {', '.join(_SPEAKERS)}.{calls}",
            column=key,
            seen=f"from {speaker!r}",
            expected=", ".join(_SPEAKERS),
        )
    rest = {name: entry for name, entry in message.items() if name not in ("from", "value")}
    return {"role": role, "content": message["value"], **rest}


def _read_flag(row: Row, key: str) -> bool | None:
    value = row.get(key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"  # a cell of a CSV file
    if value is None or isinstance(value, bool):
        return value
    raise RowError(
        f"column {key!r} is {describe(value)}, not true or false.",
        column=key,
        seen=describe(value),
        expected="true or false",
    )
