"""The optimizer steps of one trainer step: several passes over the batch, each planned anew, and a watch over skipped ones."""

from collections.abc import Callable

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.protocol import DataProto
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.utils.errors import TrainingError
from burnish.workers.updates import merge_updates


def update_in_passes(
    update: Callable[[DataProto], list[dict[str, float]]],
    batch: DataProto,
    config: FSDPActorConfig | FSDPCriticConfig,
    *,
    dp_size: int,
    balance: bool,
    step: int,
    max_response_length: int,
) -> tuple[dict[str, float], int]:
    """``ppo_epochs`` passes over the batch, each in mini-batches formed over all ranks.

    Args:
        update: the worker group's method: a planned batch -> metrics of every rank.
        step: the trainer's step, which decides the learning rate and, with ``config.shuffle``, the order.

    Returns:
        the metrics over all optimizer steps (see `merge_updates`), and how many steps there were.
    """
    metrics, num_updates = [], []
    for ppo_epoch in range(config.ppo_epochs):
        seed = (config.data_loader_seed * 1_000_003 + step) * 1_009 + ppo_epoch
        planned = plan_mini_batches(
            batch,
            num_prompts=config.ppo_mini_batch_size,
            dp_size=dp_size,
            shuffle_seed=seed if config.shuffle else None,
            balance=balance,
        )
        planned.meta_info |= {"global_steps": step, "max_response_length": max_response_length}
        metrics.append(merge_ranks(update(planned)))
        num_updates.append(sum(info["batch_num_tokens"] > 0 for info in planned.meta_info["mini_batches"]))
    return merge_updates(metrics, num_updates), sum(num_updates)


def merge_ranks(per_rank: list[dict[str, float]]) -> dict[str, float]:
    """An update's metrics from what the ranks returned.

    The engine has summed them over the ranks already; memory and utilisation are each rank's own, and the largest counts.
    """
    merged = dict(per_rank[0])
    for key in merged:
        if key.startswith("perf/"):
            merged[key] = max(metrics[key] for metrics in per_rank)
    return merged


class SkippedUpdates:
    """Ends a run that does not learn any more: a non-finite gradient skips its update, and the weights stay as they are.

    Policy and critic are counted apart, or the one that still learns would hide the other.

    Args:
        limit: ``trainer.max_skipped_updates``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row: dict[str, int] = {}

    def watch(self, name: str, metrics: dict[str, float], num_updates: int, step: int) -> None:
        """Takes note of the updates of ``name`` ("actor" or "critic") in step ``step``.

        Raises:
            TrainingError: in more than ``limit`` steps in a row every one of them was skipped.
        """
        all_skipped = metrics[f"{name}/skipped_updates"] >= num_updates
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if all_skipped else 0
        if self.in_a_row[name] > self.limit:
            raise TrainingError(
                f"Step {step}: no gradient of the {name} was finite in {self.in_a_row[name]} steps in a row "
                f"(trainer.max_skipped_updates={self.limit}), so it learns nothing any more. The last checkpoint is "
                f"unharmed; look at {name}/grad_norm and the rewards, or lower the learning rate."
            )
