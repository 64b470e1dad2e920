"""The order of the rows."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from burnish.config.data import DataConfig
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.extern import load_attribute


class EpochSampler(Sampler[int]):
    """All rows once an epoch; the order is a function of (seed, epoch) alone.

    `set_epoch` names the epoch that the next iteration goes through. The position within it is kept by the iterator, which is
    what a stateful loader saves and restores: a state restored under the epoch that it was saved in goes on where it was, and
    under any other epoch the state is passed over and the epoch starts at its first row. So a state saved at the very end of an
    epoch neither repeats that epoch nor skips the next one.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool, seed: int) -> None:
        self.num_rows = len(data_source)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration goes through epoch ``epoch`` (counted from 0)."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The positions of the epoch's rows, in order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        # A plain sum would give (seed 1, epoch 0) and (seed 0, epoch 1) the same order.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        return _EpochIterator(self)

    def __len__(self) -> int:
        return self.num_rows


class _EpochIterator(Iterator[int]):
    def __init__(self, sampler: EpochSampler) -> None:
        self._epoch = sampler.epoch
        self._identity = {"num_rows": sampler.num_rows, "shuffle": sampler.shuffle, "seed": sampler.seed}
        self._order = sampler.order()
        self._position = 0

    def __next__(self) -> int:
        if self._position == len(self._order):
            raise StopIteration
        self._position += 1
        return self._order[self._position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the saved position, if the saved epoch is this one.

        Raises:
            DataError: the state belongs to another order of rows: to go on would skip some and repeat others.
        """
        changed = [f"{name} {state[name]} -> {value}" for name, value in self._identity.items() if state[name] != value]
        if changed:
            raise DataError(
                f"The data changed since the checkpoint was saved ({', '.join(changed)}), so its place in them means nothing "
                f"now. Restore the data and data.seed, or start a new run (trainer.resume_mode=disable)."
            )
        if state["epoch"] == self._epoch:
            self._position = state["position"]


def create_rl_sampler(config: DataConfig, dataset: Sized) -> Sampler[int]:
    """The sampler of the training set: an `EpochSampler`, or the class that ``data.sampler`` names.

    A custom class is called with ``data_source=dataset, data_config=config``.

    Raises:
        ConfigError: ``data.sampler`` names no sampler class.
    """
    custom = config.sampler
    if custom.class_path is None:
        return EpochSampler(dataset, shuffle=config.shuffle, seed=0 if config.seed is None else config.seed)
    if custom.class_name is None:
        raise ConfigError(f"data.sampler.class_path={custom.class_path}: data.sampler.class_name must name the class.")
    cls = load_attribute(custom.class_path, custom.class_name, key="data.sampler.class_path")
    if not (isinstance(cls, type) and issubclass(cls, Sampler)):
        raise ConfigError(
            f"data.sampler.class_name={custom.class_name}: this is no subclass of torch.utils.data.Sampler."
        )
    return cls(data_source=dataset, data_config=config)
