"""The order of the rows."""

import logging
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from burnish.config.data import DataConfig
from burnish.utils.errors import DataError
from burnish.utils.extern import load_class

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """All rows once an epoch; the order is a function of (seed, epoch) alone.

    An iteration goes through one epoch, and the next iteration after its end through the next one; an iteration that is
    given up is begun anew. A stateful loader keeps the epoch and the position of its iterator: restored, the next
    iteration goes on there. At the very end of an epoch that iteration is empty, and the one after it goes on.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool, seed: int) -> None:
        self.num_rows = len(data_source)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration goes through epoch ``epoch`` (counted from 0), unless it restores a saved place."""
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """The positions of the rows in epoch ``epoch``, in order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        # A plain sum would give (seed 1, epoch 0) and (seed 0, epoch 1) the same order.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return _EpochIterator(self)

    def identity(self) -> dict[str, Any]:
        """What a place in the order means something with."""
        return {"num_rows": self.num_rows, "shuffle": self.shuffle, "seed": self.seed}

    def __len__(self) -> int:
        return self.num_rows


class _EpochIterator(Iterator[int]):
    """One epoch of an `EpochSampler`, with a place that can be saved. The state is here and not in the sampler, which
    is ahead of it where processes read ahead."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._start(sampler.epoch, position=0)

    def _start(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = self._sampler.order(epoch)
        self._sampler.epoch = epoch
        self._finished = False

    def __next__(self) -> int:
        if self._position == len(self._order):
            self._finish()
            raise StopIteration
        self._position += 1
        return self._order[self._position - 1]

    def _finish(self) -> None:
        self._finished = True
        self._sampler.epoch = self._epoch + 1

    def state_dict(self) -> dict[str, Any]:
        place = {"epoch": self._epoch, "position": self._position, "finished": self._finished}
        return {**self._sampler.identity(), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the saved place.

        Raises:
            DataError: the state belongs to another order of rows: to go on would skip some and repeat others.
        """
        changed = [
            f"{name} {state.get(name)} -> {value}"
            for name, value in self._sampler.identity().items()
            if state.get(name) != value
        ]
        if changed:
            raise DataError(
                f"The data changed since the checkpoint was saved ({', '.join(changed)}), so its place in them means "
                f"nothing now. Restore the data, data.seed (which follows trainer.seed) and data.sampler, or start a new run "
                f"(trainer.resume_mode=disable)."
            )
        self._start(state["epoch"], state["position"])
        if state["finished"]:
            self._finish()


def create_rl_sampler(config: DataConfig, dataset: Sized) -> Sampler[int]:
    """The sampler of the training set: what ``data.sampler.name`` says, or the class that ``data.sampler.class_path`` names.

    A custom class is called with ``data_source=dataset, data_config=config``. Where it has a method ``update(batch)``, that is
    called with every batch of scored responses. One without ``state_dict`` and ``load_state_dict`` (its own or its
    iterator's) is told of in a warning: a resumed run cannot go on where it was.

    Raises:
        ConfigError: ``data.sampler`` names no sampler class.
    """
    custom = config.sampler
    if custom.class_path is None and custom.name == "curriculum":
        from burnish.data.curriculum import CurriculumSampler

        return CurriculumSampler(data_source=dataset, data_config=config)
    if custom.class_path is None:
        return EpochSampler(dataset, shuffle=config.shuffle, seed=0 if config.seed is None else config.seed)
    cls = load_class(
        custom.class_path,
        custom.class_name,
        Sampler,
        path_key="data.sampler.class_path",
        name_key="data.sampler.class_name",
    )
    sampler = cls(data_source=dataset, data_config=config)
    if not keeps_its_place(sampler):
        logger.warning(
            "data.sampler.class_name=%s: neither the sampler nor its iterator has state_dict and load_state_dict, so a run "
            "that is resumed skips as many rows as were drawn and trusts that the order is the same.",
            custom.class_name,
        )
    return sampler


def takes_feedback(sampler: Any) -> bool:
    """Whether a sampler wants the scores: it has a method ``update(batch)``."""
    return callable(getattr(sampler, "update", None))


def keeps_its_place(sampler: Any) -> bool:
    """Whether the sampler, or its iterator, can save its place."""
    parts = [sampler] if hasattr(sampler, "state_dict") else [iter(sampler)]
    return all(hasattr(part, "state_dict") and hasattr(part, "load_state_dict") for part in parts)
