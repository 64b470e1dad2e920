"""One row of a file to one row of the dataset: columns found, checked and named as the batch names them."""

import ast
import re
from typing import Any

from burnish.config.data import DataConfig
from burnish.data.problems import RowError, describe
from burnish.data.readers import Row, parse_json
from burnish.protocol import BATCH_KEYS

UNKNOWN_SOURCE = "unknown"

# Columns with a meaning of their own pass under their name; any other that is named like a key of the batch is renamed.
_MEANT = frozenset({"data_source", "reward_model", "extra_info"})
_RESERVED = (frozenset(BATCH_KEYS) | {"index"}) - _MEANT
_LIKELY_PROMPTS = ("question", "problem", "messages", "instruction", "input", "query", "text", "prompt")
_LIKELY_ANSWERS = ("answer", "ground_truth", "solution", "target", "final_answer", "label", "output")
_PROMPT = "a text, or a list of messages with 'role' and 'content'"
# Columns of images and sounds, and what stands in a prompt where one of them belongs, as verl's data sets have it.
_MEDIA = {"images": "<image>", "videos": "<video>", "audios": "<audio>"}
# A list of messages as JSON or as Python prints it, which a text that is meant as a text does not begin like.
LIKE_MESSAGES = re.compile(r"\s*(\[\s*)?\{\s*['\"](role|content)['\"]\s*:")


def read_columns(row: Row, config: DataConfig) -> dict[str, Any]:
    """The columns of a row: ``raw_prompt``, ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info``,
    and the rest.

    - The prompt is the column that ``data.prompt_key`` names: a text, a list of messages, or a text that is a list of
      messages in JSON. ``data.system_prompt`` goes before messages that have none.
    - The ground truth is ``reward_model.ground_truth``, else the column ``ground_truth``; with ``data.answer_key`` it is
      that column, whatever else there is.
    - ``reward_model`` and ``extra_info`` are objects or JSON strings of objects; absent, they are empty.
    - ``data_source`` is the column of ``data.reward_fn_key``, else ``data.default_data_source``, else "unknown".
    - ``tools`` is a list of JSON schemas or a JSON string of one.
    - A column named like a key of the batch ("uid", "responses", ...) is kept as ``row/<name>``.

    Raises:
        RowError: a column is missing or of the wrong type; names the column and the way out.
    """
    taken = {config.prompt_key, config.answer_key}
    columns = {f"row/{name}" if name in _RESERVED else name: row[name] for name in row if name not in taken}
    prompt = _read_prompt(row, config)
    _check_text_alone(row, prompt, config.prompt_key)
    columns["raw_prompt"] = _with_system(prompt, config.system_prompt)
    columns["data_source"] = _read_source(row, config)
    reward_model = _read_object(row, "reward_model")
    if config.answer_key is not None:
        reward_model["ground_truth"] = _read_answer(row, config.answer_key)
    elif "ground_truth" not in reward_model:
        reward_model["ground_truth"] = columns.pop("ground_truth", None)
    columns["reward_model"] = reward_model
    columns["extra_info"] = _read_object(row, "extra_info")
    if row.get("tools") is not None:
        columns["tools"] = read_tools(row["tools"], "tools")
    return columns


def _read_prompt(row: Row, config: DataConfig) -> str | list[Any]:
    key = config.prompt_key
    if key not in row:
        likely = next((name for name in _LIKELY_PROMPTS if name in row), "<column>")
        answers = [name for name in _LIKELY_ANSWERS if name in row]
        answer = f" data.answer_key={answers[0]}" if answers and "reward_model" not in row else ""
        raise RowError(
            f"there is no column {key!r}, which data.prompt_key names. Columns present: {', '.join(row) or 'none'}. Set "
            f"data.prompt_key to the one that holds the prompt (data.prompt_key={likely}{answer}).",
            column=key,
            seen=f"columns {', '.join(row) or 'none'}",
            expected=_PROMPT,
        )
    prompt = row[key]
    if prompt is None:
        raise RowError(
            f"column {key!r} is empty (null): there is no prompt. Give it one, or leave the row out.",
            column=key,
            seen="nothing (null)",
            expected=_PROMPT,
        )
    if isinstance(prompt, dict):
        prompt = [prompt] if "role" in prompt and "content" in prompt else prompt
    if isinstance(prompt, str) and LIKE_MESSAGES.match(prompt):
        prompt = parse_messages(prompt, key)
    if not isinstance(prompt, str | list):
        raise RowError(
            f"column {key!r} is {describe(prompt)}; a prompt is a text or a list of messages with 'role' and 'content'.",
            column=key,
            seen=describe(prompt),
            expected=_PROMPT,
        )
    return prompt


def _check_text_alone(row: Row, prompt: str | list[Any], key: str) -> None:
    """The prompt is not about an image, which nobody would see."""
    for column, mark in _MEDIA.items():
        if row.get(column) and mark in str(prompt):
            raise RowError(
                f"column {key!r} has the mark {mark} for what is in column {column!r}; prompts are text here, and images, videos "
                f"and sounds are not shown to a model. Leave such rows out.",
                column=key,
                seen=f"a prompt with {mark} and column {column!r}",
                expected=_PROMPT,
            )


def parse_messages(text: str, key: str) -> Any:
    """Messages that were stored as text in column ``key``, in JSON or as Python prints them (tables are written so)."""
    try:
        value = parse_json(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
            raise RowError(
                f"column {key!r} is a text that begins like a list of messages ({text[:60]!r}) and is no valid JSON. It is "
                f"not trained on as a text: store the messages as a list, or as valid JSON.",
                column=key,
                seen=f"text ({text[:60]!r})",
                expected=_PROMPT,
            ) from error
    return [value] if isinstance(value, dict) else value


def _with_system(prompt: str | list[Any], system: str | None) -> str | list[Any]:
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages and isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _read_source(row: Row, config: DataConfig) -> str:
    key = config.reward_fn_key
    source = row.get(key)
    if source is None or source == "":
        return config.default_data_source or UNKNOWN_SOURCE
    if not isinstance(source, str):
        raise RowError(
            f"column {key!r} is {describe(source)}, not a text.", column=key, seen=describe(source), expected="a text"
        )
    return source


def _read_answer(row: Row, key: str) -> Any:
    if key in row:
        return row[key]
    likely = next((name for name in _LIKELY_ANSWERS if name in row), "<column>")
    raise RowError(
        f"there is no column {key!r}, which data.answer_key names. Columns present: {', '.join(row) or 'none'}. Set "
        f"data.answer_key to the one that holds the right answer (data.answer_key={likely}), or leave it out where the "
        f"answer is in reward_model.ground_truth.",
        column=key,
        seen=f"columns {', '.join(row) or 'none'}",
        expected="the right answer, of any type",
    )


def _read_object(row: Row, name: str) -> dict[str, Any]:
    value = from_text(row.get(name), name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(
            f"column {name!r} is {describe(value)}, not an object.",
            column=name,
            seen=describe(value),
            expected="an object, or a JSON string of one",
        )
    return dict(value)


def read_tools(value: Any, name: str) -> list[dict[str, Any]]:
    """The schemas in a cell of column ``name``.

    Raises:
        RowError: it is neither a list of objects nor the JSON of one.
    """
    tools = from_text(value, name)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"column {name!r} is {describe(tools)}, not a list of JSON schemas of functions.",
            column=name,
            seen=describe(tools),
            expected="a list of JSON schemas, or a JSON string of one",
        )
    return tools


def from_text(value: Any, name: str) -> Any:
    """The value of a JSON string; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise RowError(
            f"column {name!r} is a text that is not JSON: {error}.",
            column=name,
            seen=f"text ({value[:60]!r})",
            expected="an object or a list, or its JSON string",
        ) from error
