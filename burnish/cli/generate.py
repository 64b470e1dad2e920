"""``burnish generate``: responses of a model or a checkpoint (docs/evaluate.md)."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from burnish.cli.progress import progress
from burnish.trainer.offline.generate import Asking, prepare, rows_of
from burnish.trainer.offline.settings import AskOptions
from burnish.trainer.start_checks import check_folder
from burnish.utils import local_paths
from burnish.utils.console import console
from burnish.utils.errors import ConfigError
from burnish.utils.json_lines import encode_line, write_atomically


def run_generate(model: str, options: AskOptions, out: str | None, *, as_json: bool) -> int:
    """Generates; 0.

    Args:
        out: file of the responses, a line each; None: standard output.
        as_json: lines of JSON on standard output, too, instead of texts.

    Raises:
        ConfigError, DataError, ModelError: a wrong request; nothing was generated.
        RolloutError: the engine cannot start, or cannot serve a prompt.
    """
    path = None if out is None else check_out(out, options.data)
    asked = prepare(model, options)
    with progress() as on_progress, Asking(asked) as asking:
        rows = (
            row
            for batch in asking.batches(lambda done, total: on_progress(asked.source.name, done, total))
            for row in rows_of(batch, asked.tokenizer, asked.config)
        )
        if path is not None:
            write_atomically(path, rows)
        else:
            _print(rows, asked.n, as_json=as_json)
    if path is not None:
        console.print(f"{asked.num_responses} responses to {len(asked.dataset)} prompts: {path}", soft_wrap=True)
    return 0


def check_out(out: str, data: Any) -> Path:
    """The file to write.

    Raises:
        ConfigError: it is one of the files that are read, a folder, no file for lines of JSON, or where none can be written.
    """
    path = local_paths.named("--out", out).absolute()
    if path.is_dir():
        raise ConfigError(f"--out={out}: this is a folder. Name a file, as responses.jsonl.")
    if not path.name.endswith((".jsonl", ".json")):
        raise ConfigError(f"--out={out}: responses are written as lines of JSON; name a file .jsonl.")
    if any(_reads(str(source), path) for source in data):
        raise ConfigError(f"--out={out}: this is one of the files that are read. Name another.")
    check_folder("--out", str(path.parent))
    return path


def _reads(source: str, file: Path) -> bool:
    """Whether ``file`` is there and is among the data that ``source``, a file, a folder or a pattern, names."""
    named, place = local_paths.expanded(source).absolute(), file.resolve()
    if file.absolute() == named or place == named.resolve():
        return True
    return file.exists() and (named.resolve() in place.parents or fnmatch(str(file), str(named)))


def _print(rows: Iterator[dict[str, Any]], n: int, *, as_json: bool) -> None:
    """On standard output as it is: other programs read it."""
    for row in rows:
        if as_json:
            console.file.write(encode_line(row).decode("utf-8"))
            continue
        if row["sample_index"] == 0:
            console.print(_prompt(row), style="bold")
        number = "" if n == 1 else f"[{row['sample_index']}] "
        cut = " [cut at --max-tokens]" if row["finish_reason"] == "length" else ""
        console.print(f"{number}{row['response']}{cut}", soft_wrap=True)


def _prompt(row: dict[str, Any]) -> str:
    """The last message of a row's prompt."""
    prompt = next((row[key] for key in ("prompt", *row) if isinstance(row.get(key), str | list)), "")
    return str(prompt[-1].get("content", "")) if isinstance(prompt, list) and prompt else str(prompt)
