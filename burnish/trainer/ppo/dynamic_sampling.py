"""Dynamic sampling (DAPO, arXiv:2503.14476): a group is trained on only where its metric varies.

Responses that all did equally well have advantages of zero: the group costs an update and teaches nothing. Such groups are left
out, and further prompts are answered until there are ``data.train_batch_size`` of them.
"""

from dataclasses import dataclass

import numpy as np

from burnish.config import FilterGroupsConfig
from burnish.protocol import DataProto
from burnish.trainer.ppo.scoring import concat_scored, describe_numbers, reward_number
from burnish.utils.errors import TrainingError

_KEY = "algorithm.filter_groups"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which groups of a batch vary.

    Attributes:
        keep: rows of the groups that do [batch].
        constant_values: the metric of each group that does not.
        num_unscored: groups in which no row has a value.
    """

    keep: np.ndarray
    constant_values: np.ndarray
    num_unscored: int


def judge_groups(uids: np.ndarray, values: np.ndarray) -> Verdict:
    """Keeps a group if its values differ (max != min), or if only one of its rows has a value.

    Args:
        uids: the group of each row [batch].
        values: the metric of each row, NaN where it has none [batch].
    """
    names, groups = np.unique(uids.astype(str), return_inverse=True)
    has_value = ~np.isnan(values)
    num_values = np.bincount(groups[has_value], minlength=len(names))
    high, low = np.full(len(names), -np.inf), np.full(len(names), np.inf)
    np.maximum.at(high, groups[has_value], values[has_value])
    np.minimum.at(low, groups[has_value], values[has_value])
    constant = (num_values > 1) & (high == low)
    unscored = num_values == 0
    return Verdict(
        keep=~(constant | unscored)[groups], constant_values=high[constant], num_unscored=int(unscored.sum())
    )


class DynamicSampling:
    """What one step has collected: round by round, the groups that vary.

    With the filter off, the first round is all there is and every group is kept.

    Args:
        config: ``algorithm.filter_groups``.
        num_prompts: prompts that the step is to have (``data.train_batch_size``).
        batches_per_epoch: rounds that are one pass over the data.
    """

    def __init__(self, config: FilterGroupsConfig, *, num_prompts: int, batches_per_epoch: int) -> None:
        self.config = config
        self.num_prompts = num_prompts
        self.batches_per_epoch = batches_per_epoch
        self.start()

    def start(self) -> None:
        """Begins a step: nothing is collected yet."""
        self.num_rounds = 0
        self._num_fruitless = 0
        self._kept: list[DataProto] = []
        self._num_kept = 0
        self._constant_values: list[float] = []
        self._num_unscored = 0

    def uid_prefix(self, epoch: int) -> str:
        """What comes before a prompt's row in its uid. It tells the rounds apart, since a sampler of one's own may draw a
        prompt for two of them."""
        return f"epoch{epoch}-round{self.num_rounds}" if self.num_rounds else f"epoch{epoch}"

    def filter(self, batch: DataProto) -> DataProto:
        """The rows of the groups whose metric varies, over rows that have a score and that number.

        Raises:
            TrainingError: no row has a number of the metric's name.
        """
        metric = self.config.metric or "score"
        values, valid = reward_number(batch, metric), batch.tensors["valid"].numpy()
        if values is None and valid.any():
            raise TrainingError(
                f"{_KEY}.metric={metric}: no response has a number of that name. {describe_numbers(batch)}"
            )
        none = np.full(len(batch), np.nan)
        verdict = judge_groups(batch.non_tensor_batch["uid"], none if values is None else np.where(valid, values, none))
        self._constant_values += verdict.constant_values.tolist()
        self._num_unscored += verdict.num_unscored
        return batch.select_idxs(verdict.keep)

    def add(self, batch: DataProto) -> None:
        """Takes the filtered rows of one more round."""
        self.num_rounds += 1
        num_prompts = len(set(batch.non_tensor_batch["uid"]))
        self._num_kept += num_prompts
        self._num_fruitless = 0 if num_prompts else self._num_fruitless + 1
        if num_prompts:
            self._kept.append(batch)

    @property
    def is_complete(self) -> bool:
        """Whether the step has its prompts, or all the rounds that it may have."""
        if not self.config.enable or self._num_kept >= self.num_prompts:
            return True
        # Without a bound of rounds, what a whole pass over the data did not give, another one will hardly give.
        bound = self.config.max_num_gen_batches
        return self.num_rounds >= bound if bound else self._num_fruitless >= self.batches_per_epoch

    def take(self) -> DataProto:
        """The groups as one batch, the first ``num_prompts`` of them; nothing holds them here afterwards.

        Raises:
            TrainingError: there are none.
        """
        if not self._kept:
            raise TrainingError(self._nothing_varies())
        kept, self._kept = self._kept, []
        batch = kept[0] if len(kept) == 1 else concat_scored(kept)
        if not self.config.enable or self._num_kept <= self.num_prompts:
            return batch
        uids = batch.non_tensor_batch["uid"]
        first = set(list(dict.fromkeys(uids))[: self.num_prompts])
        return batch.select_idxs([uid in first for uid in uids])

    def metrics(self) -> dict[str, float]:
        """Rounds of the step, and its prompts by what became of them; nothing with the filter off."""
        if not self.config.enable:
            return {}
        kept = min(self._num_kept, self.num_prompts)
        return {
            "train/num_gen_batches": float(self.num_rounds),
            "filter_groups/kept_prompts": float(kept),
            "filter_groups/constant_prompts": float(len(self._constant_values)),
            "filter_groups/unscored_prompts": float(self._num_unscored),
            "filter_groups/surplus_prompts": float(self._num_kept - kept),
            "filter_groups/filled": float(kept == self.num_prompts),
        }

    def _nothing_varies(self) -> str:
        bound = self.config.max_num_gen_batches
        rounds = f"{self.num_rounds} generation batch{'' if self.num_rounds == 1 else 'es'}"
        limit = f"{_KEY}.max_num_gen_batches={bound}" if bound else "a whole pass over the data"
        if not self._constant_values:
            what = f"none of the {self._num_unscored} groups has a response with a score"
        else:
            low, high = min(self._constant_values), max(self._constant_values)
            seen = f"{low:g} everywhere" if low == high else f"from {low:g} in one group to {high:g} in another"
            unscored = f", and {self._num_unscored} groups have no score at all" if self._num_unscored else ""
            what = f"it is equal within each of {len(self._constant_values)} groups ({seen}){unscored}"
        return (
            f"{_KEY}.metric={self.config.metric or 'score'} varies in no group of {rounds} ({limit}): {what}. There is "
            f"nothing to learn from that. Use prompts that are neither too easy nor too hard, more responses to each "
            f"(actor_rollout_ref.rollout.n), a higher temperature, or another metric; {_KEY}.enable=false trains on all "
            f"groups."
        )
