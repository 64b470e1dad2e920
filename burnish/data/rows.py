"""One row of a file to one row of the dataset: columns found, checked and named as the batch names them."""

import json
from typing import Any

import numpy as np

from burnish.data.files import Row
from burnish.protocol import BATCH_KEYS
from burnish.utils.errors import DataError

UNKNOWN_SOURCE = "unknown"

# Columns with a meaning of their own pass under their name; any other that is named like a key of the batch is renamed.
_MEANT = frozenset({"data_source", "reward_model", "extra_info"})
_RESERVED = (frozenset(BATCH_KEYS) | {"index"}) - _MEANT
_LIKELY_PROMPTS = ("question", "problem", "messages", "instruction", "input", "query", "text", "prompt")


def read_columns(row: Row, location: str, *, prompt_key: str, source_key: str) -> dict[str, Any]:
    """The columns of a row: ``raw_prompt``, ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info``,
    and the rest.

    - ``reward_model`` and ``extra_info`` are objects or JSON strings of objects; absent, they are empty. A column
      ``ground_truth`` stands in for ``reward_model.ground_truth``.
    - ``data_source`` is "unknown" where it is absent, null or empty.
    - A column named like a key of the batch ("uid", "responses", ...) is kept as ``row/<name>``.

    Args:
        location: the row's place in words, for messages.
        prompt_key: the column of the prompt (``data.prompt_key``).
        source_key: the column that names the reward function (``data.reward_fn_key``).

    Raises:
        DataError: a column is missing or of the wrong type; names the place, the column and the way out.
    """
    columns = {f"row/{name}" if name in _RESERVED else name: value for name, value in row.items() if name != prompt_key}
    columns["raw_prompt"] = _read_prompt(row, location, prompt_key)
    columns["data_source"] = _read_source(row, location, source_key)
    reward_model = _read_object(row, location, "reward_model")
    if "ground_truth" not in reward_model:
        reward_model["ground_truth"] = columns.pop("ground_truth", None)
    columns["reward_model"] = reward_model
    columns["extra_info"] = _read_object(row, location, "extra_info")
    return columns


def to_plain(value: Any) -> Any:
    """``value`` with NumPy arrays as lists and NumPy scalars as Python's, at any depth (rows that come from memory)."""
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [to_plain(entry) for entry in value]
    return value


def _read_prompt(row: Row, location: str, prompt_key: str) -> str | list[Any]:
    if prompt_key not in row:
        likely = next((name for name in _LIKELY_PROMPTS if name in row), "<column>")
        raise DataError(
            f"{location}: there is no column {prompt_key!r}, which data.prompt_key names. Columns present: "
            f"{', '.join(row) or 'none'}. Set data.prompt_key to the one that holds the prompt "
            f"(data.prompt_key={likely})."
        )
    prompt = row[prompt_key]
    if not isinstance(prompt, (str, list)):
        raise DataError(
            f"{location}: column {prompt_key!r} is {type(prompt).__name__} ({prompt!r:.80}); a prompt is a text or a "
            f"list of messages with 'role' and 'content'."
        )
    return prompt


def _read_source(row: Row, location: str, source_key: str) -> str:
    source = row.get(source_key)
    if source is None or source == "":
        return UNKNOWN_SOURCE
    if not isinstance(source, str):
        raise DataError(f"{location}: column {source_key!r} is {type(source).__name__} ({source!r:.80}), not a text.")
    return source


def _read_object(row: Row, location: str, name: str) -> dict[str, Any]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{location}: column {name!r} is a text that is not JSON: {error}.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{location}: column {name!r} is {type(value).__name__} ({value!r:.80}), not an object.")
    return dict(value)
