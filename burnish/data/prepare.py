"""Rows read -> rows of the dataset: columns named, prompt rendered and measured; in this process or in several."""

import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.data import DataConfig
from burnish.data.problems import Place, RowError
from burnish.data.readers import ReadRow
from burnish.data.rows import read_columns
from burnish.render import (
    Composed,
    checked_ids,
    compose,
    encode_composed,
    is_empty_prompt,
    normalize_messages,
    template_markers,
    truncate,
)
from burnish.utils import env
from burnish.utils.errors import ConfigError, DataError

# Starting a process takes seconds, as long as some thousands of rows.
MIN_ROWS_FOR_PROCESSES = 20_000
_CHUNK = 500

Prepared = TypeVar("Prepared", covariant=True)
Item = TypeVar("Item")


class Preparer(Protocol[Prepared]):
    """Prepares rows, here or, pickled, in another process.

    Attributes:
        tokenizer: that it renders with.
        workers_key: the key that says how many processes share the work.
        num_workers: what it says.
    """

    tokenizer: PreTrainedTokenizerBase
    workers_key: str

    @property
    def num_workers(self) -> int: ...

    def prepare(self, rows: Iterable[ReadRow]) -> Iterator[Prepared | RowError]:
        """Each row in order, or what is wrong with it; some may be read ahead."""


@dataclass(kw_only=True, slots=True)
class PreparedRow:
    """A row as the dataset keeps it.

    Attributes:
        place: where it comes from.
        columns: see `burnish.data.rows.read_columns`; no ``index`` yet.
        ids: of the prompt, int32 [prompt]; None: the row is left out, its prompt is too long.
        length: of the prompt before it was cut.
        was_templated: the prompt is a text with the chat template's own tokens.
        is_empty: the prompt asks nothing; what ids it has, the template or the tokenizer gave.
    """

    place: Place
    columns: dict[str, Any]
    ids: np.ndarray | None
    length: int
    was_templated: bool
    is_empty: bool


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row whose prompt has yet to become ids, with the prompt as the file has it."""

    place: Place
    columns: dict[str, Any]
    prompt: Any
    composed: Composed


class RowPreparer:
    """Prepares rows. The prompts of some hundred are tokenized at once, while the next ones are read.

    Args:
        tokenizer: renders the prompts.
        config: the ``data`` section.
        tools: schemas that every prompt shows, unless its row has a ``tools`` column.
        policy: what happens to a prompt that is too long; see `length_policy`.
    """

    workers_key = "data.filter_overlong_prompts_workers"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, tools: Sequence[dict[str, Any]], policy: str
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.tools = list(tools)
        self.policy = policy
        self.markers = template_markers(tokenizer)

    @property
    def num_workers(self) -> int:
        """Processes that share the work of large sets."""
        return self.config.filter_overlong_prompts_workers

    def prepare(self, rows: Iterable[ReadRow]) -> Iterator[PreparedRow | RowError]:
        """Each row in order, or what is wrong with it; some hundred are read ahead."""
        drafts = (self._draft(place, row) for place, row in rows)
        with ThreadPoolExecutor(max_workers=1) as tokenizing:
            chunks = ((chunk, tokenizing.submit(self._encode, chunk)) for chunk in _chunks(drafts, _CHUNK))
            for chunk, encoded in _one_ahead(chunks):
                ids = iter(encoded.result())
                for draft in chunk:
                    yield self._finish(draft, next(ids)) if isinstance(draft, _Draft) else draft

    def _encode(self, drafts: list[_Draft | RowError]) -> list[list[int]]:
        return encode_composed([draft.composed for draft in drafts if isinstance(draft, _Draft)], self.tokenizer)

    def _draft(self, place: Place, row: dict[str, Any] | RowError) -> _Draft | RowError:
        if isinstance(row, RowError):
            return row
        try:
            columns = read_columns(row, self.config)
            prompt = columns["raw_prompt"]
            try:
                if self.tokenizer.chat_template:
                    columns["raw_prompt"] = normalize_messages(prompt)
                return _Draft(place, columns, prompt, self._compose(prompt, columns.get("tools") or self.tools))
            except DataError as error:
                raise self._prompt_error(prompt, error) from error
        except RowError as error:
            return error.at(place)

    def _finish(self, draft: _Draft, ids: list[int]) -> PreparedRow | RowError:
        config, columns, prompt = self.config, draft.columns, draft.prompt
        try:
            kept = truncate(checked_ids(ids, prompt), config.max_prompt_length, self.policy)
        except DataError as error:
            return self._prompt_error(prompt, error).at(draft.place)
        return PreparedRow(
            place=draft.place,
            columns=columns,
            ids=np.asarray(kept, dtype=np.int32) if kept is not None else None,
            length=len(ids),
            was_templated=isinstance(prompt, str) and any(marker in prompt for marker in self.markers),
            is_empty=is_empty_prompt(columns["raw_prompt"]),
        )

    def _compose(self, prompt: Any, tools: list[dict[str, Any]]) -> Composed:
        if tools and not self.tokenizer.chat_template:
            raise RowError(
                "The row has tools, and a tokenizer without a chat template has no way to show them.",
                column="tools",
                seen="schemas of tools",
                expected="none, or a chat template",
            )
        kwargs = self.config.apply_chat_template_kwargs
        return compose(prompt, self.tokenizer, tools=tools or None, chat_template_kwargs=kwargs)

    def _prompt_error(self, prompt: Any, error: DataError) -> RowError:
        if isinstance(error, RowError):
            return error
        key = self.config.prompt_key
        return RowError(
            f"column {key!r}: {error}",
            column=key,
            seen=f"{type(prompt).__name__} ({prompt!r:.80})",
            expected=f"a prompt that renders to at most {self.config.max_prompt_length} tokens",
        )


def length_policy(config: DataConfig, split: str) -> str:
    """What happens to a prompt longer than ``data.max_prompt_length``, as `burnish.render.truncate` names it.

    Training rows are left out with ``data.filter_overlong_prompts``, else ``data.truncation`` decides. Of the validation
    data no row is ever left out: where a training row would be, a validation prompt keeps its end.
    """
    policy = "drop" if config.filter_overlong_prompts else config.truncation
    if split == "train" or policy != "drop":
        return policy
    return config.truncation if config.truncation in ("left", "right", "middle") else "left"


def prepare_rows(
    rows: Iterable[ReadRow],
    preparer: Preparer[Prepared],
    num_workers: int = 1,
    min_rows: int = MIN_ROWS_FOR_PROCESSES,
) -> Iterator[Prepared | RowError]:
    """The rows prepared, in order.

    Args:
        num_workers: processes that share the work of sets of more than ``min_rows`` rows.
        min_rows: fewer are prepared in this process.

    Raises:
        ConfigError: the tokenizer cannot travel to another process.
        DataError: a source cannot be read, or a process died.
    """
    rows = iter(rows)
    if num_workers > 1:
        head = list(islice(rows, min_rows))
        more = list(islice(rows, 1))
        if more:
            yield from _in_processes([*head, *more, *rows], preparer, num_workers)
            return
        rows = iter(head)
    yield from preparer.prepare(rows)


def _chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of ``size``. What comes before an error is given before it is raised."""
    chunk: list[Item] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except Exception:
        yield chunk
        raise
    yield chunk


def _one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Each item when the next one is made already; what comes before an error is given before it is raised."""
    made: list[Item] = []
    try:
        for item in items:
            yield from made
            made = [item]
    except Exception:
        yield from made
        raise
    yield from made


def _in_processes(rows: list[ReadRow], preparer: Preparer[Prepared], num_workers: int) -> Iterator[Prepared | RowError]:
    """Chunks of the rows, prepared by `burnish.data.prepare_worker` in ``num_workers`` fresh processes."""
    try:
        packed = pickle.dumps(preparer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{preparer.workers_key}={num_workers}: the tokenizer {type(preparer.tokenizer).__name__} cannot be sent to another "
            f"process ({error}). Set {preparer.workers_key}=1."
        ) from error
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    done: list[Any] = [None] * len(chunks)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(chunks)):
        waiting.put(number)
    failures: list[str] = []
    threads = [
        threading.Thread(target=_feed, args=(packed, chunks, done, waiting, failures), daemon=True)
        for _ in range(min(num_workers, len(chunks)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise DataError(
            f"{preparer.workers_key}={num_workers}: a process that renders rows failed: {failures[0]} Set "
            f"{preparer.workers_key}=1 to render them in one process."
        )
    for chunk in done:
        yield from chunk


def _feed(
    packed: bytes, chunks: list[Any], done: list[Any], waiting: "queue.SimpleQueue[int]", failures: list[str]
) -> None:
    """Gives chunk after chunk to a process of its own until none waits."""
    command = [sys.executable, "-m", "burnish.data.prepare_worker"]
    environment = {
        # The processes are many already.
        "TOKENIZERS_PARALLELISM": "false",
        **env.everything(),
        # The folders that this process imports from, so that a tokenizer of the user's own is found there too.
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(packed)
            while not failures:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    break
                pickle.dump(chunks[number], process.stdin)
                process.stdin.flush()
                done[number] = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            process.kill()
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
            failures.append((words[-1] if words else "it died without a word").rstrip(".") + ".")
