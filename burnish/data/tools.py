"""The schemas of tools that prompts show (``data.tool_config_path``)."""

from typing import Any

import yaml

from burnish.utils import local_paths, storage
from burnish.utils.errors import ConfigError, StorageError


def load_tools(path: str | None) -> list[dict[str, Any]]:
    """The schemas in a YAML or JSON file: a list of them, or ``tools:`` with a list whose entries are schemas or have one as
    ``tool_schema`` (what runs the tool stands beside it then, and is not read here).

    Raises:
        ConfigError: the file cannot be read, or holds no such list.
    """
    if path is None:
        return []
    try:
        content = yaml.safe_load(local_paths.expanded(storage.localize(path)).read_text(encoding="utf-8"))
    except StorageError as error:
        raise ConfigError(f"data.tool_config_path: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"data.tool_config_path={path}: the file cannot be read: {error}.") from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"data.tool_config_path={path}: the file holds no list of tools, nor one under 'tools'.")
    return [_schema(entry, number, path) for number, entry in enumerate(entries)]


def _schema(entry: Any, number: int, path: str) -> dict[str, Any]:
    schema = entry.get("tool_schema", entry) if isinstance(entry, dict) else entry
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"data.tool_config_path={path}: tool {number} has no schema with the name of a function, as "
            f"{{type: function, function: {{name: ..., description: ..., parameters: ...}}}}."
        )
    return schema
