"""The processes of a group of Ray actors: who they are, whether they live, where they stand."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from burnish.single_controller.heartbeat import SECONDS_BETWEEN_BEATS, Beat, Listener
from burnish.single_controller.ray.heartbeat import Channel
from burnish.single_controller.ray.host import ProcessInfo
from burnish.utils import stacks
from burnish.utils.errors import WorkerError

_SECONDS_FOR_AN_ANSWER = 3 * SECONDS_BETWEEN_BEATS
"""That a process on another machine has to send its stacks."""

_SECONDS_BETWEEN_LOOKS = SECONDS_BETWEEN_BEATS / 2
"""Each look is a question a process, and the groups of several roles ask one after the other."""


@dataclass
class Processes:
    """The actors of a group, shared by the groups of all roles in them.

    Attributes:
        name: of the group; a process is called ``<name> rank <rank>``.
        stack_folder: where stacks are written; None: nowhere.
        failure: why they were ended, if a call failed.
    """

    actors: list[Any]
    name: str = "worker"
    stack_folder: str | None = None
    infos: list[ProcessInfo] = field(default_factory=list)
    channel: Channel = field(default_factory=Channel)
    failure: WorkerError | None = None
    closed: bool = False
    _listener: Listener = field(default_factory=Listener)
    _listened: float = float("-inf")

    def describe(self, rank: int) -> str:
        """Rank, node and process id, as far as they are known."""
        where = f" ({self.infos[rank]})" if rank < len(self.infos) else ""
        return f"rank {rank} of {len(self.actors)}{where}"

    def process_name(self, rank: int) -> str:
        """What heartbeats and files of stacks call the process."""
        return f"{self.name} rank {rank}"

    def beats(self) -> dict[str, Beat]:
        """The last sign of life of each process that gave one, by its name."""
        self._listen()
        return self._listener.beats

    def idle_seconds(self) -> float | None:
        """Seconds since any of the processes got further; None where none was heard."""
        self._listen()
        heard = [self._listener.idle_seconds(self.process_name(rank)) for rank in range(len(self.actors))]
        return min((seconds for seconds in heard if seconds is not None), default=None)

    def _listen(self) -> None:
        now = time.monotonic()
        if self.closed or not ray.is_initialized() or now - self._listened < _SECONDS_BETWEEN_LOOKS:
            return
        self._listened = now
        for rank in range(len(self.actors)):
            beat = self.channel.hear(rank)
            if beat is not None:
                self._listener.hear(self.process_name(rank), beat)

    def dump_stacks(self, ranks: Iterable[int] | None = None) -> dict[int, tuple[Path, str | None]]:
        """Writes the stacks of the processes, and of those that they have started.

        Returns:
            by rank the file, and where the main thread stands, if that can be told; ranks that do not answer are missing.
        """
        if self.stack_folder is None or self.closed or not ray.is_initialized():
            return {}
        here = ray.util.get_node_ip_address()
        ranks = [rank for rank in (range(len(self.actors)) if ranks is None else ranks) if rank < len(self.infos)]
        far = [rank for rank in ranks if self.infos[rank].address != here]
        texts = self._ask(far)
        texts |= {rank: stacks.of_tree(self.infos[rank].pid) for rank in ranks if rank not in far}
        return {
            rank: (stacks.write(self.stack_folder, self.process_name(rank), text), stacks.innermost(text))
            for rank, text in texts.items()
            if text
        }

    def _ask(self, ranks: list[int]) -> dict[int, str | None]:
        """The stacks of processes on other machines, which they write themselves."""
        question = uuid.uuid4().hex
        answers: dict[int, str | None] = {}
        for rank in ranks:
            self.channel.ask_for_stacks(rank, question)
        deadline = time.monotonic() + _SECONDS_FOR_AN_ANSWER
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.2)
            for rank in ranks:
                if rank not in answers and (text := self.channel.answered(rank, question)) is not None:
                    answers[rank] = text
        return answers

    def kill(self) -> None:
        """Ends all processes at once. May be called again."""
        if ray.is_initialized():
            if not self.closed:
                self.channel.close()
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
        self.closed = True
