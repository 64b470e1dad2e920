"""The optimizer steps of one trainer step: passes over the batch, each planned anew, and a watch over steps without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from burnish.config import AlgoConfig, FSDPActorConfig, FSDPCriticConfig
from burnish.core_algos.policy_losses import get_policy_loss_fn, preparation_of
from burnish.core_algos.resampling import compute_pf_ppo_reweight_data
from burnish.protocol import DataProto
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.utils.errors import BatchError, TrainingError
from burnish.workers.updates import merge_updates


class Passes(NamedTuple):
    """What the updates of one model in a step have come to."""

    metrics: dict[str, float]
    num_updates: int
    """Optimizer steps; see `update_in_passes`."""
    rows: DataProto
    """That were trained on."""


def joined(metrics: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """``metrics`` with ``more`` over them. Of a GPU's memory, which each model measures in its own process, the most counts."""
    memory = {key: max(metrics[key], more[key]) for key in metrics.keys() & more.keys() if key.startswith("perf/max_")}
    return metrics | more | memory


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
        the metrics over all optimizer steps (see `merge_updates`), and how many steps there were: mini-batches in which a
        token was left to train on, whether their gradient was finite or not.
    """
    metrics, num_updates = [], []
    needs_noise = _chooses_among_tokens(config)
    for ppo_epoch in range(config.ppo_epochs):
        seed = (config.data_loader_seed * 1_000_003 + step) * 1_009 + ppo_epoch
        planned = plan_mini_batches(
            _with_choice_noise(batch, seed) if needs_noise else batch,
            num_prompts=config.ppo_mini_batch_size,
            dp_size=dp_size,
            shuffle_seed=seed if config.shuffle else None,
            balance=balance,
            share_prompts=config.use_prefix_grouper,
        )
        planned.meta_info |= {"global_steps": step, "max_response_length": max_response_length}
        metrics.append(planned.meta_info.pop("seqlen_metrics") | merge_ranks(update(planned)))
        num_empty = sum(value for key, value in metrics[-1].items() if key.endswith("/empty_updates"))
        num_updates.append(len(planned.meta_info["mini_batches"]) - int(num_empty))
    return merge_updates(metrics, num_updates), sum(num_updates)


def _chooses_among_tokens(config: FSDPActorConfig | FSDPCriticConfig) -> bool:
    """Whether the loss has a preparation, which may draw tokens at random."""
    if not isinstance(config, FSDPActorConfig):
        return False
    return preparation_of(get_policy_loss_fn(config.policy_loss.loss_mode), config) is not None


def _with_choice_noise(batch: DataProto, seed: int) -> DataProto:
    """The batch with ``choice_noise`` [batch, response], uniform in [0, 1).

    Drawn in the order of the batch, before its rows are spread over ranks: any number of ranks chooses the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    with_noise = batch.select()
    with_noise.tensors["choice_noise"] = torch.rand(batch.tensors["response_mask"].shape, generator=generator)
    return with_noise


def merge_ranks(per_rank: list[dict[str, float]]) -> dict[str, float]:
    """An update's metrics from what the ranks returned.

    The engine has summed them over the ranks already. Pace and memory are each rank's own: of utilisation the mean counts, of
    everything else the largest.
    """
    merged = dict(per_rank[0])
    for key in merged:
        if key.startswith("perf/mfu/"):
            merged[key] = sum(metrics[key] for metrics in per_rank) / len(per_rank)
        elif key.startswith("perf/"):
            merged[key] = max(metrics[key] for metrics in per_rank)
    return merged


def resample_rows(batch: DataProto, config: AlgoConfig, *, seed: int, step: int) -> tuple[DataProto, dict[str, float]]:
    """PF-PPO (arXiv:2409.06957): rows drawn anew by their score, where ``algorithm.use_pf_ppo`` asks for it.

    Args:
        seed, step: decide the draw.

    Returns:
        as many rows as there were, under their uids and the same in every call of a step, and the metric
        ``pf_ppo/num_distinct_rows``.
    """
    if not config.use_pf_ppo:
        return batch, {}
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    batch = compute_pf_ppo_reweight_data(batch, config.pf_ppo.reweight_method, config.pf_ppo.weight_pow, generator)
    others = batch.non_tensor_batch
    distinct = set(zip(others["uid"], others["sample_index"], strict=True))
    return batch, {"pf_ppo/num_distinct_rows": float(len(distinct))}


class SkippedUpdates:
    """Ends a run that does not learn any more.

    A gradient that is not finite skips its update, and a mini-batch without a token to train on is none: the weights stay
    as they are, and the learning-rate schedule goes on. Policy and critic are counted apart, or the one that still learns
    would hide the other.

    Args:
        limit: ``trainer.max_skipped_updates``.
        folder: the run's folder, for the batch of the step that ended it.
        why_empty: why a mini-batch may have no token to train on.
        advice: what to look at.
    """

    def __init__(
        self,
        limit: int,
        folder: str | Path,
        *,
        why_empty: str = "every row was rejected or abstained",
        advice: str = "and the rewards, or lower the learning rate",
    ) -> None:
        self.limit = limit
        self.why_empty, self.advice = why_empty, advice
        self.folder = Path(folder)
        self.in_a_row: dict[str, int] = {}

    def watch(self, name: str, metrics: dict[str, float], num_updates: int, step: int, batch: DataProto) -> None:
        """Takes note of the updates of ``name`` ("actor" or "critic") in step ``step``, which trained on ``batch``.

        Raises:
            TrainingError: more than ``limit`` steps in a row were without an update; ``batch`` is on the disk then.
        """
        num_skipped, num_empty = (int(metrics[f"{name}/{kind}_updates"]) for kind in ("skipped", "empty"))
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if num_skipped >= num_updates else 0
        if self.in_a_row[name] > self.limit:
            with kept_on_error(batch, self.folder, step):
                raise TrainingError(
                    f"the {name} was not updated in {self.in_a_row[name]} steps in a row "
                    f"(trainer.max_skipped_updates={self.limit}), so it learns nothing any more. Of this step's "
                    f"mini-batches {num_skipped} had a gradient that was not finite, and {num_empty} had no token to train "
                    f"on ({self.why_empty}). The last checkpoint is unharmed. Look at {name}/grad_norm {self.advice}."
                )


@contextmanager
def kept_on_error(batch: DataProto, folder: Path, step: int) -> Iterator[None]:
    """Where the block raises a `TrainingError`, ``batch`` is written to ``folder`` and the error says so."""
    try:
        yield
    except TrainingError as error:
        try:
            where = f"The batch is in {dump_batch(batch, folder, step)} (DataProto.load_from_disk)."
        except (OSError, SafetensorError) as full_disk:
            # What is wrong with the disk must not hide why the run ends.
            where = f"The batch could not be written to {folder}: {full_disk}."
        raise TrainingError(f"Step {step}: {error} {where}") from error


def dump_batch(batch: DataProto, folder: Path, step: int) -> Path:
    """Writes the batch of a step that went wrong to the file ``folder/failed_batch_step_N``, for `DataProto.load_from_disk`.

    Where a non-tensor value or ``meta_info`` is nothing that the file can hold, the tensors and the uids are written alone.

    Returns:
        the file.
    """
    path = folder / f"failed_batch_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        batch.save_to_disk(str(path))
    except BatchError:
        uids = [key for key in batch.non_tensor_batch if key == "uid"]
        batch.select(non_tensor_batch_keys=uids, meta_info_keys=[]).save_to_disk(str(path))
    return path
