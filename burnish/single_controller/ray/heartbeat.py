"""Beats over Ray's own store of keys (the one that the cluster's head holds): no further process, port or firewall rule.

A thread of each worker's process writes its beat there, and answers when the driver asks for its stacks.
"""

import json
import os
import threading
import uuid
from dataclasses import asdict, dataclass, field

from ray.experimental import internal_kv

from burnish.single_controller.heartbeat import SECONDS_BETWEEN_BEATS, Beat, Pulse
from burnish.utils import stacks
from burnish.utils.foreign_code import Caught

_NAMESPACE = b"burnish"


@dataclass(frozen=True)
class Channel:
    """The keys of one group of processes."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def _key(self, what: str, rank: int) -> bytes:
        return f"{self.name}/{what}/{rank}".encode()

    def send(self, rank: int, beat: Beat) -> None:
        """What the worker's process says."""
        self._put("beat", rank, json.dumps(asdict(beat)))

    def hear(self, rank: int) -> Beat | None:
        """What a worker's process said last; None where nothing is there, or the cluster is gone."""
        said = self._get("beat", rank)
        return None if said is None else Beat(**json.loads(said))

    def ask_for_stacks(self, rank: int, question: str) -> None:
        """Of a worker on another machine, which answers with its next beat, if it can."""
        self._put("question", rank, question)

    def asked(self, rank: int) -> str | None:
        """The last question, in the worker's process."""
        return self._get("question", rank)

    def answer(self, rank: int, question: str, text: str) -> None:
        """The stacks of a worker's process."""
        self._put(f"answer/{question}", rank, text)

    def answered(self, rank: int, question: str) -> str | None:
        """The answer to a question, as soon as it is there."""
        return self._get(f"answer/{question}", rank)

    def close(self) -> None:
        """Removes the keys."""
        with Caught():
            internal_kv._internal_kv_del(f"{self.name}/".encode(), del_by_prefix=True, namespace=_NAMESPACE)

    def _put(self, what: str, rank: int, value: str) -> None:
        # A cluster that is gone is found by whoever waits for a call; signs of life add no error of their own.
        with Caught():
            internal_kv._internal_kv_put(self._key(what, rank), value.encode(), overwrite=True, namespace=_NAMESPACE)

    def _get(self, what: str, rank: int) -> str | None:
        with Caught():
            value = internal_kv._internal_kv_get(self._key(what, rank), namespace=_NAMESPACE)
            return None if value is None else value.decode()
        return None


def start_beating(pulse: Pulse, channel: Channel, rank: int) -> None:
    """Sends the beats of this process until it ends, from a thread of its own."""
    threading.Thread(target=_beat, args=(pulse, channel, rank), daemon=True, name="heartbeat").start()


def _beat(pulse: Pulse, channel: Channel, rank: int) -> None:
    answered, pause = None, threading.Event()
    while True:
        channel.send(rank, pulse.beat())
        question = channel.asked(rank)
        if question is not None and question != answered:
            channel.answer(rank, question, stacks.of_tree(os.getpid()) or "")
            answered = question
        pause.wait(SECONDS_BETWEEN_BEATS)
