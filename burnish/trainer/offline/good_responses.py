"""Responses that scored well as conversations to learn from: rejection sampling, the data of a cold start."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from burnish.config import DataConfig
from burnish.config.data_names import named_sets
from burnish.data.files import read_source, sound, sources_of
from burnish.data.rows import read_columns
from burnish.render import load_tokenizer, normalize_messages
from burnish.trainer.rollout_store.layout import SAMPLES_FOLDER, steps, texts_path
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.json_lines import read_lines

_UID = re.compile(r"epoch\d+-(?:round\d+-)?(?P<index>\d+)(?:#\d+)?")


@dataclass
class Taken:
    """What became of the responses.

    Attributes:
        rows: conversations, the best of a prompt first.
        counts: responses by what became of them: "taken", "low" (their score), "cut" (at the length limit: they have no end),
            "invalid" (the reward failed), "empty", "double", "more" than are wanted of a prompt.
        num_prompts: prompts that have a conversation now.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_prompts: int = 0


def take_responses(
    source: str, *, min_score: float | None, max_per_prompt: int | None = None, prompt_key: str = "prompt"
) -> Taken:
    """The responses of a file that ``burnish generate`` or ``burnish eval`` wrote (``--out``), or of a run's rollouts.

    Args:
        source: the file, or the run's folder.
        min_score: the least score; None: scores are not looked at.
        max_per_prompt: the best so many of each prompt; None: all that differ.
        prompt_key: column with the prompts in a file.

    Raises:
        ConfigError: there is no such file or run, or the run keeps no rollouts.
        DataError: a line has no prompt or response, no response has a score, or the run's data are others by now.
    """
    path = local_paths.expanded(source)
    if local_paths.is_dir(path):
        rows = _rows_of_run(path)
    elif local_paths.is_file(path):
        rows = _rows_of_file(path, prompt_key)
    else:
        raise ConfigError(
            f"{source}: there is no such file or folder. Name what burnish generate or burnish eval wrote (--out), or the "
            f"folder of a run."
        )
    taken, num_scored = Taken(), 0
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        num_scored += row["score"] is not None
        outcome = _outcome(row, min_score)
        if outcome is not None:
            taken.counts[outcome] += 1
            continue
        by_prompt.setdefault(repr((row["prompt"], row.get("tools"))), []).append(row)
    if min_score is not None and not num_scored:
        raise DataError(
            f"{source}: no response has a score, so --min-score={min_score:g} cannot be asked for. Score them with burnish eval, "
            f"or leave --min-score out."
        )
    for found in by_prompt.values():
        _take(found, max_per_prompt, taken)
    return taken


def _outcome(row: dict[str, Any], min_score: float | None) -> str | None:
    """Why a response is not wanted; None where it is."""
    if row.get("valid") is False:
        return "invalid"
    if row.get("finish_reason") in ("length", "abort"):
        return "cut"
    if not row["response"].strip():
        return "empty"
    if min_score is not None and (row["score"] is None or row["score"] < min_score):
        return "low"
    return None


def _take(found: list[dict[str, Any]], limit: int | None, taken: Taken) -> None:
    """Of one prompt, the best first; those alike once."""
    seen: set[str] = set()
    for row in sorted(found, key=lambda row: -(row["score"] or 0.0)):
        if row["response"] in seen:
            taken.counts["double"] += 1
            continue
        if limit is not None and len(seen) >= limit:
            taken.counts["more"] += 1
            continue
        seen.add(row["response"])
        taken.counts["taken"] += 1
        conversation = [*normalize_messages(row["prompt"]), {"role": "assistant", "content": row["response"]}]
        made = {"messages": conversation, "data_source": row.get("data_source") or "unknown"}
        made |= {key: row[key] for key in ("tools", "score") if row.get(key) is not None}
        taken.rows.append(made)
    taken.num_prompts += bool(seen)


def _rows_of_file(path: Path, prompt_key: str) -> Iterator[dict[str, Any]]:
    for place, row in sound(read_source(path)):
        for key in (prompt_key, "response"):
            if row.get(key) is None:
                way = " (--prompt-key names another column)" if key == prompt_key else ""
                raise DataError(f"{place}: there is no {key!r}{way}; it has {', '.join(row) or 'nothing'}.")
        yield {**row, "prompt": row[prompt_key], "response": str(row["response"]), "score": _number(row.get("score"))}


def _rows_of_run(folder: Path) -> Iterator[dict[str, Any]]:
    """The rollouts with the prompts as the run's data have them: what is kept of a prompt is its rendered text."""
    tree = _config_of(folder)
    dumps = local_paths.expanded(str((tree.get("trainer") or {}).get("rollout_data_dir") or folder / SAMPLES_FOLDER))
    kept = steps(dumps)
    if not kept:
        raise ConfigError(
            f"{folder}: the run keeps no rollouts ({dumps}). Set trainer.rollout_data_dir to keep those of every step, or write "
            f"responses with burnish eval --out."
        )
    model = (tree.get("actor_rollout_ref") or {}).get("model") or {}
    tokenizer = load_tokenizer(
        str(model.get("tokenizer_path") or model.get("path")), trust_remote_code=bool(model.get("trust_remote_code"))
    )
    special = tuple(token for token in tokenizer.all_special_tokens if token)
    prompts = _prompts_of_run(folder, tree)
    for step in kept:
        for row in read_lines(texts_path(dumps, step)):
            match = _UID.fullmatch(str(row.get("uid")))
            columns = prompts.get(int(match["index"])) if match else None
            said = columns["raw_prompt"] if columns else None
            last = said if isinstance(said, str) else said[-1].get("content") if said else None
            if columns is None or (isinstance(last, str) and last.strip() not in row["prompt"]):
                raise DataError(
                    f"{texts_path(dumps, step)}: the prompt of {row.get('uid')} is not in the run's training data "
                    f"(data.train_files); they are others by now, or another working folder."
                )
            text = str(row["response"]).rstrip()
            while text.endswith(special):
                text = text[: -len(max((token for token in special if text.endswith(token)), key=len))].rstrip()
            yield {
                **row,
                "prompt": said,
                "response": text,
                "score": _number(row.get("score")),
                "tools": columns.get("tools"),
            }


def _prompts_of_run(folder: Path, tree: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The columns of the training rows by their number, read as the run read them."""
    values = tree.get("data") or {}
    if (values.get("custom_cls") or {}).get("path"):
        raise ConfigError(
            f"{folder}: the run read its data by a class of its own (data.custom_cls); use burnish eval --out."
        )
    known = {one.name for one in fields(DataConfig)} - {"custom_cls", "sampler"}
    config = DataConfig(**{name: value for name, value in values.items() if name in known})
    files = [name for names in named_sets(config.train_files).values() for name in names]
    rows: Iterable[Any] = (row for source in sources_of(files) for row in sound(read_source(source)))
    if config.train_max_samples >= 0:
        rows = islice(rows, config.train_max_samples)
    return {number: read_columns(row, config) for number, (_, row) in enumerate(rows)}


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder}: this is no folder of a run, its config.yaml cannot be read: {error}.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: this is no configuration of a run.")
    return tree


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
