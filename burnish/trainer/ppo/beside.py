"""Calls on a group of workers that go on while the driver calls another group."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

PASSES = ("_compute_old_log_prob", "_old_log_prob_pass", "_compute_ref_log_prob", "_compute_values")
UNTIL_SCORES = ("_collect", "_generate", "_score_by_model", "_compute_reward", "_filter_groups", *PASSES)
UPDATES = ("_update_critic", "_update_actor")
"""Stages of the trainer beside which others may be done: passes, all that comes before scores are read, updates."""


def are_of(trainer_class: type, trainer: object, stages: Sequence[str]) -> bool:
    """Whether nobody has put another method in the place of one of ``stages``. Such a stage may do anything with the batch,
    and has to find it as it is when it is its turn, so nothing may be done beside it."""
    return all(getattr(getattr(trainer, name), "__func__", None) is getattr(trainer_class, name) for name in stages)


class Beside(Generic[T]):
    """``work`` in a thread of its own, until its result is asked for.

    The groups of workers that it calls must be called by nobody else meanwhile. An error of it is raised where its result is
    asked for; where nobody asks, since the run ends before, the thread holds up nothing.

    Args:
        work: what to do; it changes nothing that others read meanwhile.
        name: of the thread, for stacks.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self.seconds = 0.0
        """From its begin to its end, where it ended well; 0 until then."""
        self._work = work
        self._result: Future[T] = Future()
        # A daemon: workers that hang must not keep the driver from ending.
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def result(self) -> T:
        """Waits for what ``work`` gives, or raises."""
        return self._result.result()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            found = self._work()
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            self._result.set_exception(error)
        else:
            self.seconds = time.perf_counter() - begin
            self._result.set_result(found)
