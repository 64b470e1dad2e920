"""Rendered data sets on disk, found again by the content of everything that they are made of."""

import datetime
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import PreTrainedTokenizerBase

from burnish.config.data_names import HubName
from burnish.data import hub
from burnish.data.files import Source
from burnish.data.prepare import PreparedRow, RowPreparer
from burnish.data.problems import Place
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError
from burnish.utils.json_lines import replacing

logger = logging.getLogger(__name__)

# Raised whenever rows come out differently than before, for other reasons than the keys below.
_VERSION = 3
_KEYS = (
    "prompt_key",
    "answer_key",
    "system_prompt",
    "reward_fn_key",
    "default_data_source",
    "max_prompt_length",
    "apply_chat_template_kwargs",
)


def cache_file(preparer: RowPreparer, sources: Sequence[Source], *, split: str, max_samples: int) -> Path:
    """The file of a data set of prompts in ``data.cache_dir``; see `file_of`."""
    config = preparer.config
    facts = {
        "version": _VERSION,
        "max_samples": max_samples,
        "policy": preparer.policy,
        "tools": preparer.tools,
        **{key: getattr(config, key) for key in _KEYS},
    }
    return file_of(str(config.cache_dir), sources, facts, preparer.tokenizer, split=split)


def file_of(
    folder: str,
    sources: Sequence[Source],
    facts: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
) -> Path:
    """The file of a data set: its name is a hash of the sources' bytes and places, the tokenizer, and the ``facts`` that the
    rows depend on beside these."""
    all_facts = {
        **facts,
        "transformers": transformers.__version__,
        "split": split,
        # A template that writes the date renders other ids tomorrow.
        "date": str(datetime.date.today()) if "strftime_now" in str(tokenizer.chat_template) else None,
        "sources": [str(source.absolute() if isinstance(source, Path) else source) for source in sources],
    }
    digest = hashlib.sha256(json.dumps(all_facts, sort_keys=True, default=str).encode())
    digest.update(_tokenizer_bytes(tokenizer))
    for source in sources:
        if isinstance(source, HubName) or (isinstance(source, Path) and source.is_dir()):
            digest.update(hub.fingerprint(source, split).encode())
            continue
        with source.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return local_paths.expanded(folder) / f"{digest.hexdigest()[:40]}.burnish-rows"


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    facts = [type(tokenizer).__name__, str(tokenizer.chat_template), str(tokenizer.init_kwargs), vocabulary]
    return "\0".join(facts).encode("utf-8", "surrogatepass")


def load(file: Path) -> list[PreparedRow] | None:
    """The rows of a cache file of prompts; None where there is none, or a damaged one, which is told and made anew."""
    found = read_table(file)
    if found is None:
        return None
    rows, ids = found
    prepared, start = [], 0
    for place, columns, num_ids, length, was_templated, is_empty in rows:
        kept = None
        if num_ids is not None:
            kept, start = ids[start : start + num_ids], start + num_ids
        prepared.append(
            PreparedRow(
                place=Place(*place),
                columns=columns,
                ids=kept,
                length=length,
                was_templated=was_templated,
                is_empty=is_empty,
            )
        )
    return prepared


def read_table(file: Path) -> tuple[list[Any], np.ndarray] | None:
    """What `write_table` wrote; None where there is nothing, or a damaged file, which is told."""
    try:
        data = file.read_bytes()
    except OSError:
        # Whether the folder can be used at all is told by `write_table`.
        return None
    digest, _, content = data.partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        logger.warning("%s (data.cache_dir) is damaged; the data set is rendered anew.", file)
        return None
    size, _, rest = content.partition(b"\n")
    return json.loads(rest[: int(size)]), np.frombuffer(rest[int(size) :], dtype=np.int32)


def save(file: Path, rows: Sequence[PreparedRow]) -> None:
    """Writes a cache file of prompts, as `write_table` does."""
    table: list[Any] = []
    ids = []
    for row in rows:
        num_ids = None if row.ids is None else len(row.ids)
        table.append([row.place, row.columns, num_ids, row.length, row.was_templated, row.is_empty])
        if row.ids is not None:
            ids.append(row.ids)
    write_table(file, table, ids)


def write_table(file: Path, table: Sequence[Any], ids: Sequence[np.ndarray]) -> None:
    """Writes rows of JSON's types and int32 arrays behind each other, whole or not at all; a folder that cannot be written is
    told and does no harm."""
    text = json.dumps(table, ensure_ascii=False).encode()
    numbers = (np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)).tobytes()
    content = str(len(text)).encode() + b"\n" + text + numbers
    try:
        with replacing(file) as temporary:
            temporary.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    except ConfigError:
        # Another process is writing the same rows just now.
        return
    except OSError as error:
        logger.warning("data.cache_dir=%s: the rendered data set cannot be kept: %s.", file.parent, error)
