"""Rendered conversations on disk; see `burnish.data.cache`."""

from collections.abc import Sequence
from pathlib import Path

from burnish.data.cache import file_of, read_table, write_table
from burnish.data.files import Source
from burnish.data.problems import Place
from burnish.data.sft_prepare import ConversationPreparer, PreparedConversation, PreparedSequence

# Raised whenever rows come out differently than before, for other reasons than the keys below.
_VERSION = 3
_KEYS = (
    "messages_key",
    "prompt_key",
    "response_key",
    "tools_key",
    "enable_thinking_key",
    "system_prompt",
    "apply_chat_template_kwargs",
    "train_on",
    "ignore_input_ids_mismatch",
    "max_length",
    "truncation",
)


def cache_file(preparer: ConversationPreparer, sources: Sequence[Source], *, split: str, max_samples: int) -> Path:
    """The file of a data set of conversations in ``data.cache_dir``."""
    config = preparer.config
    facts = {
        "kind": "conversations",
        "version": _VERSION,
        "max_samples": max_samples,
        **{key: getattr(config, key) for key in _KEYS},
    }
    return file_of(str(config.cache_dir), sources, facts, preparer.tokenizer, split=split)


def load(file: Path) -> list[PreparedConversation] | None:
    """The rows of a cache file; None where there is none, or a damaged one, which is told and made anew."""
    found = read_table(file)
    if found is None:
        return None
    rows, ids = found
    prepared, start = [], 0
    for place, source, notes, sequences in rows:
        made = []
        for num_ids, length, spans in sequences:
            kept, start = ids[start : start + num_ids], start + num_ids
            made.append(PreparedSequence(ids=kept, spans=[(begin, end) for begin, end in spans], length=length))
        prepared.append(PreparedConversation(place=Place(*place), data_source=source, sequences=made, notes=notes))
    return prepared


def save(file: Path, rows: Sequence[PreparedConversation]) -> None:
    """Writes a cache file, whole or not at all; a folder that cannot be written is told and does no harm."""
    table = [
        [
            row.place,
            row.data_source,
            row.notes,
            [[len(sequence.ids), sequence.length, sequence.spans] for sequence in row.sequences],
        ]
        for row in rows
    ]
    write_table(file, table, [sequence.ids for row in rows for sequence in row.sequences])
