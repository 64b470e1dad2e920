"""From easy to hard, by a column or by how the policy fares."""

from typing import Any

import numpy as np
import torch

from burnish.config.data import DataConfig
from burnish.data.sampler import EpochSampler
from burnish.utils.errors import DataError

# Share of the newest mean score in a row's running mean: the policy changes, and old scores fade.
_NEWEST = 0.5


class CurriculumSampler(EpochSampler):
    """All rows once an epoch, the easy ones first.

    With ``data.sampler.difficulty_key`` the easiest have the least of that number. Without it the easiest are those whose
    responses scored best so far (a running mean over epochs; rows without a score stand where the mean score would), so the
    first epoch has the order of ``data.shuffle``. Rows that are equally hard keep that order too.

    The order of an epoch is fixed when it begins: scores that come in during it count from the next one on.
    """

    def __init__(self, data_source: Any, data_config: DataConfig) -> None:
        super().__init__(
            data_source,
            shuffle=data_config.shuffle,
            seed=0 if data_config.seed is None else data_config.seed,
        )
        self.difficulty_key = data_config.sampler.difficulty_key
        self._difficulties = _difficulties(data_source, self.difficulty_key) if self.difficulty_key else None
        self._positions = {int(data_source[i]["index"]): i for i in range(self.num_rows)}
        self._scores = np.full(self.num_rows, np.nan)
        self._settled = self._scores.copy()
        self._settled_epoch = -1

    def order(self, epoch: int) -> list[int]:
        """The positions of the rows in epoch ``epoch``, in order."""
        shuffled = np.asarray(super().order(epoch))
        if self._difficulties is not None:
            return shuffled[np.argsort(self._difficulties[shuffled], kind="stable")].tolist()
        # A restored run asks for the first epoch before it goes to its own, whose order must not change.
        if epoch > self._settled_epoch:
            self._settled, self._settled_epoch = self._scores.copy(), epoch
        known = ~np.isnan(self._settled)
        if not known.any():
            return shuffled.tolist()
        scores = np.where(known, self._settled, self._settled[known].mean())
        return shuffled[np.argsort(-scores[shuffled], kind="stable")].tolist()

    def identity(self) -> dict[str, Any]:
        """As of an `EpochSampler`, and what the order is made by."""
        return {**super().identity(), "curriculum": self.difficulty_key or "scores"}

    def update(self, batch: Any) -> None:
        """Takes the scores of a batch of responses in.

        Args:
            batch: a `DataProto` with ``uid``, ``token_level_scores`` and ``valid``.
        """
        scores = batch.tensors["token_level_scores"].sum(-1).double().numpy()
        valid = batch.tensors["valid"].numpy().astype(bool)
        by_row: dict[int, list[float]] = {}
        for uid, score, is_valid in zip(batch.non_tensor_batch["uid"], scores, valid, strict=True):
            index = _index_of(uid)
            position = None if index is None else self._positions.get(index)
            if is_valid and position is not None:
                by_row.setdefault(position, []).append(float(score))
        for position, values in by_row.items():
            old, new = self._scores[position], float(np.mean(values))
            self._scores[position] = new if np.isnan(old) else (1 - _NEWEST) * old + _NEWEST * new

    def feedback_state(self) -> dict[str, Any]:
        """What `update` has gathered, for a checkpoint."""
        return {
            "num_rows": self.num_rows,
            "scores": torch.from_numpy(self._scores.copy()),
            "settled": torch.from_numpy(self._settled.copy()),
            "settled_epoch": self._settled_epoch,
        }

    def load_feedback_state(self, state: dict[str, Any]) -> None:
        """Takes up what `feedback_state` gave.

        Raises:
            DataError: it was gathered over other rows.
        """
        if state["num_rows"] != self.num_rows:
            raise DataError(
                f"The data changed since the checkpoint was saved (num_rows {state['num_rows']} -> {self.num_rows}), so the "
                f"scores of the curriculum belong to other rows. Restore the data, or start a new run "
                f"(trainer.resume_mode=disable)."
            )
        self._scores = state["scores"].numpy().copy()
        self._settled = state["settled"].numpy().copy()
        self._settled_epoch = state["settled_epoch"]


def _index_of(uid: str) -> int | None:
    """The row's ``index`` in a uid such as "epoch0-round1-17#2"."""
    text = str(uid).rpartition("-")[2].partition("#")[0]
    return int(text) if text.isdigit() else None


def _difficulties(data_source: Any, key: str) -> np.ndarray:
    numbers: list[float] = []
    locate: Any = getattr(data_source, "location", "row {}".format)
    for position in range(len(data_source)):
        row = data_source[position]
        info = row.get("extra_info")
        value = row.get(key, info.get(key) if isinstance(info, dict) else None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(
                f"{locate(position)}: data.sampler.difficulty_key={key} needs a number in a column {key!r} or in "
                f"extra_info.{key}, and there is {value!r:.80}."
            )
        numbers.append(float(value))
    return np.asarray(numbers)
