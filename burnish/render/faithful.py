"""Whether a chat template wrote what the messages hold. A template leaves out what it has no place for, without a word: whole
messages of tools, calls, thoughts, the text of every message if it expects lists of parts."""

from collections.abc import Mapping
from typing import Any

from burnish.render.turns import History, Turn, reasoning_of
from burnish.utils.errors import DataError

_TEMPLATE = "as model.custom_chat_template"


def check_answer(message: Mapping[str, Any], turn: Turn) -> int:
    """How many parts of a learnt answer the template did not write: its thoughts, the text beside its calls of tools.

    Raises:
        DataError: it wrote no text of the answer or not its calls, or a thought of its own before the answer's.
    """
    written, content = turn.written.text[turn.thought_begin : turn.end], str(message["content"])
    thought, closed, said = content.rpartition("</think>")
    calls = message.get("tool_calls") or []
    unwritten = 0
    if said.strip() and said.strip() not in written:
        if not calls:
            raise DataError(
                f"The chat template does not write the text of message {turn.number} (assistant), {said.strip()[:60]!r}, as it "
                f"is: what is learnt would not be what the row says. Give a template that does, {_TEMPLATE}."
            )
        unwritten += 1
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise DataError(f"Message {turn.number} has a tool call without the name of a function: {call!r:.100}.")
        if name not in written:
            raise DataError(
                f"The chat template does not write the tool call of message {turn.number} ({name}), so it would not be learnt. "
                f"Give a template that writes tool calls, {_TEMPLATE}, or leave the row out."
            )
    if closed and written.count("</think>") > content.count("</think>"):
        raise DataError(
            f"The chat template writes a thought of its own before the one in the text of message {turn.number}. Give the "
            f"thought as the message's reasoning_content instead of <think> in its content."
        )
    thoughts = (thought.rpartition("<think>")[2] if closed else reasoning_of(message)).strip()
    return unwritten + (bool(thoughts) and thoughts not in written)


def check_history(history: History, number: int, text: str) -> None:
    """Raises DataError where one of the messages before the last learnt answer, which is ``number``, is missing in what the
    template wrote.

    Args:
        text: the prompt that the template made of them.
    """
    for place, message in enumerate(history.messages[:number]):
        said, role = str(message["content"]).rpartition("</think>")[2].strip(), message["role"]
        if not said or (message.get("tool_calls") and role == "assistant"):
            continue  # Some templates drop the text beside calls.
        if role in ("user", "assistant", "system") and said in text:
            continue
        # Words are taken out of system messages, results of tools written as JSON.
        if role not in ("user", "assistant") and _changes_text(history, place, number):
            continue
        known = role in ("user", "assistant", "system", "tool")
        advice = f"Give a template that does, {_TEMPLATE}." if known else "Give it a role that the template knows."
        raise DataError(
            f"The chat template does not write message {place} ({role}), {said[:60]!r}, as it is: the model would answer "
            f"something else than the row says. {advice}"
        )


def _changes_text(history: History, place: int, number: int) -> bool:
    """Whether message ``place`` makes any difference among the first ``number``."""
    if place == 0:
        return number == 1 or history.differs_without_first()
    return history.write(place + 1).text != history.write(place).text
