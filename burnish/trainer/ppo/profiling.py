"""Which steps of a run are recorded by its workers' profilers."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.config.profiler import GlobalProfilerConfig
from burnish.utils.foreign_code import Caught

logger = logging.getLogger("burnish.trainer")


class StepProfiler:
    """Starts and stops the workers' profilers around the steps of ``global_profiler.steps``.

    Args:
        config: ``global_profiler``.
        run_dir: the run's folder.
        last_step: of the run.
    """

    def __init__(self, config: GlobalProfilerConfig, run_dir: Path, last_step: int) -> None:
        self._steps = frozenset(config.steps or ())
        self._joins_steps = config.profile_continuous_steps
        self._folders = (str(run_dir.absolute()), str(Path.cwd()))
        self._last_step = last_step
        if beyond := sorted(step for step in self._steps if step > last_step):
            logger.warning(
                "global_profiler.steps names step %d, which is not recorded: the run ends at step %d.",
                beyond[0],
                last_step,
            )
        self._is_running = False

    @contextmanager
    def step(self, number: int, groups: Iterable[Any], told: Callable[..., None]) -> Iterator[None]:
        """Records the block, if it is a step to be recorded. What there is of a step that fails is written too.

        Args:
            groups: the worker groups; workers that cannot be recorded are left alone.
            told: `EventLog.write`.
        """
        if number not in self._steps:
            yield
            return
        workers = [group for group in groups if hasattr(group, "start_profile")]
        if not self._is_running:
            self._is_running = True
            for group in workers:
                group.start_profile(self._name(number), *self._folders)
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if not is_whole:
                # The step's own error is the one to tell; a group that it has ended cannot answer.
                with Caught():
                    self._stop(number, workers, told)
        if not self._goes_on_after(number):
            self._stop(number, workers, told)

    def _stop(self, number: int, workers: list[Any], told: Callable[..., None]) -> None:
        self._is_running = False
        files = [file for group in workers for of_rank in group.stop_profile() for file in of_rank]
        where = str(Path(files[0]).parent) if files else "nowhere"
        logger.info("Recorded up to step %d: %d files in %s.", number, len(files), where)
        told("profile", f"Recorded up to step {number}: {len(files)} files in {where}.", step=number, files=files)

    def _goes_on_after(self, number: int) -> bool:
        return self._joins_steps and number + 1 in self._steps and number < self._last_step

    def _name(self, number: int) -> str:
        last = number
        while self._goes_on_after(last):
            last += 1
        return f"step_{number}" if last == number else f"step_{number}-{last}"
