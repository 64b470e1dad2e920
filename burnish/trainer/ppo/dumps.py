"""A run's responses on their way to the disk, off the critical path.

With ``trainer.rollout_data_dir`` every response of every step, also those that dynamic sampling leaves out; without it
``trainer.sample_rollouts`` of each step, in ``rollouts/`` of the run's folder, to look at. Validation's go to
``trainer.validation_data_dir``.
"""

import copy
import errno
import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.config import TrainerConfig
from burnish.protocol import DataProto
from burnish.trainer import rollout_store
from burnish.utils import local_paths
from burnish.utils.events import EventLog
from burnish.utils.foreign_code import Caught, told

logger = logging.getLogger("burnish.trainer")

# Steps that may wait to be written; a disk that is slower than training slows it down instead of filling the memory.
_MOST_WAITING = 2


class Dumps:
    """Writes responses in a thread. What cannot be written is told of, and training goes on.

    Args:
        config: the ``trainer`` section.
        tokenizer: makes texts of the responses.
        events: is told when something cannot be written.
    """

    def __init__(self, config: TrainerConfig, tokenizer: Any, events: EventLog) -> None:
        self.config = config
        self._given_tokenizer = tokenizer
        self._events = events
        self._rounds: list[DataProto] = []
        self._round_metrics: list[dict[str, float]] = []
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._room = threading.BoundedSemaphore(_MOST_WAITING)

    @cached_property
    def _tokenizer(self) -> Any:
        """One of this thread's own: a fast tokenizer may refuse to be used by two at once."""
        with Caught():
            return copy.deepcopy(self._given_tokenizer)
        return self._given_tokenizer

    @cached_property
    def _tokenizer_name(self) -> str:
        return tokenizer_fingerprint(self._tokenizer)

    @property
    def folder(self) -> Path | None:
        """Where training's responses go; None: nowhere."""
        if self.config.rollout_data_dir:
            return local_paths.expanded(self.config.rollout_data_dir)
        if self.config.sample_rollouts:
            return local_paths.expanded(self.config.default_local_dir) / rollout_store.SAMPLES_FOLDER
        return None

    @property
    def is_complete(self) -> bool:
        """Whether every response is kept, so that the run can be replayed."""
        return bool(self.config.rollout_data_dir)

    def open(self, resumed_step: int) -> None:
        """Moves what the folders hold of steps behind ``resumed_step`` out of the way; 0: everything."""
        self._rounds, self._round_metrics = [], []
        for folder in (self.folder, self.config.validation_data_dir):
            if folder is not None:
                with Caught() as caught:
                    moved = rollout_store.set_aside(folder, resumed_step)
                if caught.error is not None:
                    self._tell(
                        f"Responses of an earlier run stay where they are, in {folder}", caught.error, resumed_step
                    )
                elif moved is not None:
                    logger.warning("%s held responses of an earlier run: they are in %s now.", folder, moved)

    def take_round(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Takes note of a round of responses, scored, before dynamic sampling chooses among them.

        Args:
            metrics: what the reward manager has said of it.
        """
        if self.is_complete:
            self._rounds.append(batch)
            self._round_metrics.append(metrics)

    def step(self, batch: DataProto, step: int) -> None:
        """Writes the responses of a step."""
        rounds, self._rounds = self._rounds, []
        metrics, self._round_metrics = self._round_metrics, []
        if self.folder is None:
            return
        # The stages of the next step may add keys to the batch that they are given, and take some away.
        snapshot = batch.select()
        self._submit(lambda: self._write_step(snapshot, step, rounds, metrics), "The responses", step)

    def _write_step(
        self, batch: DataProto, step: int, rounds: list[DataProto], metrics: list[dict[str, float]]
    ) -> None:
        uids = list(batch.non_tensor_batch["uid"])
        trained = set(uids)
        left_out = [[uid not in trained for uid in part.non_tensor_batch["uid"]] for part in rounds]
        rollout_store.write_step(
            str(self.folder),
            step,
            batch,
            self._tokenizer,
            rows=None if self.is_complete else rollout_store.rows_to_sample(uids, self.config.sample_rollouts),
            untrained=[part.select_idxs(rows) for part, rows in zip(rounds, left_out, strict=True) if any(rows)],
            notes={"complete": self.is_complete, "tokenizer": self._tokenizer_name, "reward_metrics": metrics},
        )

    def validation(self, batch: DataProto, step: int) -> None:
        """Writes the responses of a validation, if they are asked for."""
        folder = self.config.validation_data_dir
        if folder:
            snapshot = batch.select()
            self._submit(
                lambda: rollout_store.write_texts(folder, step, [(snapshot, {})], self._tokenizer),
                "The responses of the validation",
                step,
            )

    def _submit(self, write: Callable[[], Any], what: str, step: int) -> None:
        self._room.acquire()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="dumps")
        self._pending = [
            *(future for future in self._pending if not future.done()),
            self._writer.submit(self._guarded, write, what, step),
        ]

    def _guarded(self, write: Callable[[], Any], what: str, step: int) -> None:
        try:
            with Caught() as caught:
                write()
            if caught.error is not None:
                self._tell(f"{what} of step {step} cannot be written", caught.error, step)
        finally:
            self._room.release()

    def _tell(self, what: str, error: Exception, step: int) -> None:
        message = f"{what}: {told(error)}."
        logger.warning("%s", message)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._events.write("out_of_disk" if is_full else "warning", message, step=step)

    def flush(self) -> None:
        """Waits until everything that was handed over is written, or told of."""
        for future in self._pending:
            future.result()
        self._pending = []

    def close(self) -> None:
        """As `flush`, and ends the thread; a later step starts another."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown(wait=True)
        self._pending = []


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short text that two tokenizers share if they have the same tokens under the same ids; "" where it has no vocabulary."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
