"""Several optimizer steps of one trainer step: how their metrics become one, and when skipped ones end the run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.updates import SkippedUpdates, dump_batch, merge_ranks, update_in_passes
from burnish.utils.errors import TrainingError
from burnish.workers.updates import merge_updates


def batch_of(num_prompts: int, empty: int = 0) -> DataProto:
    """One row a prompt; the first ``empty`` rows have no token in the loss."""
    mask = torch.ones(num_prompts, 3, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:empty] = False
    return DataProto.from_dict(
        tensors={
            "attention_mask": mask,
            "response_mask": mask,
            "loss_mask": loss_mask,
            "row": torch.arange(num_prompts),
        },
        non_tensors={"uid": np.array([f"u{i}" for i in range(num_prompts)], dtype=object)},
    )


def passes(config: FSDPActorConfig, batch: DataProto, step: int = 1) -> tuple[list[list[int]], dict[str, float], int]:
    """(order of the rows in each pass, merged metrics, number of updates) of a fake worker that logs its call."""
    orders: list[list[int]] = []

    def update(planned: DataProto) -> list[dict[str, float]]:
        orders.append(planned.tensors["row"].tolist())
        assert planned.meta_info["global_steps"] == step
        assert planned.meta_info["max_response_length"] == 9
        call = float(len(orders))
        empty = float(sum(info["batch_num_tokens"] == 0 for info in planned.meta_info["mini_batches"]))
        counts = {"actor/skipped_updates": 1.0, "actor/empty_updates": empty}
        return [{"actor/pg_loss": call, "perf/max_memory_allocated_gb": 5 - call, **counts}]

    metrics, num_updates = update_in_passes(
        update, batch, config, dp_size=1, balance=True, step=step, max_response_length=9
    )
    return orders, metrics, num_updates


def config_of(**settings) -> FSDPActorConfig:
    return FSDPActorConfig(data_loader_seed=1, ppo_mini_batch_size=2, **settings)


def test_means_are_over_all_updates_counts_add_up_and_memory_keeps_the_most():
    _, metrics, num_updates = passes(config_of(ppo_epochs=3), batch_of(6))
    assert num_updates == 9
    counts = {"actor/skipped_updates": 3.0, "actor/empty_updates": 0.0}
    of_updates = {key: value for key, value in metrics.items() if not key.startswith("global_seqlen/")}
    assert of_updates == {"actor/pg_loss": 2.0, "perf/max_memory_allocated_gb": 4.0, **counts}
    assert metrics["global_seqlen/max"] == metrics["global_seqlen/balanced_min"] == metrics["global_seqlen/mean"]


def test_a_mini_batch_without_a_token_is_no_update():
    _, metrics, num_updates = passes(config_of(ppo_epochs=2), batch_of(6, empty=2))
    assert num_updates == 4
    assert metrics["actor/empty_updates"] == 2.0


def test_every_pass_and_every_step_has_an_order_of_its_own_that_the_seed_decides():
    config, batch = config_of(ppo_epochs=2, shuffle=True), batch_of(40)
    first, second = passes(config, batch)[0]
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert passes(config, batch)[0] == [first, second]
    assert passes(config, batch, step=2)[0][0] not in (first, second)


def test_without_shuffle_every_pass_keeps_the_order_of_the_batch():
    assert passes(config_of(ppo_epochs=2), batch_of(6))[0] == [list(range(6))] * 2


def test_extremes_stay_extremes_and_weights_count():
    parts = [{"a_max": 3.0, "a_min": 3.0, "a": 3.0}, {"a_max": 1.0, "a_min": 1.0, "a": 1.0}]
    assert merge_updates(parts) == {"a_max": 3.0, "a_min": 1.0, "a": 2.0}
    assert merge_updates(parts, [3, 1])["a"] == 2.5


def noise_of(batch: DataProto, config: FSDPActorConfig | FSDPCriticConfig, dp_size: int = 1, step: int = 1) -> list:
    """The planned passes as (row, noise of its tokens) by row, without the rows that fill up."""
    found = []

    def update(planned: DataProto) -> list[dict[str, float]]:
        if "choice_noise" not in planned.tensors:
            found.append(None)
            return [{"x/empty_updates": 0.0}]
        kept = planned.tensors["loss_mask"].any(-1)
        rows, noise = planned.tensors["row"][kept].tolist(), planned.tensors["choice_noise"][kept].tolist()
        found.append(sorted(zip(rows, noise, strict=True)))
        return [{"x/empty_updates": 0.0}]

    update_in_passes(update, batch, config, dp_size=dp_size, balance=True, step=step, max_response_length=9)
    return found


def test_noise_belongs_to_the_row_whatever_the_ranks_and_the_order():
    config = config_of(policy_loss=PolicyLossConfig(loss_mode="clip_cov"), ppo_epochs=2)
    batch = batch_of(7)
    one = noise_of(batch, config)
    shuffled = config_of(policy_loss=PolicyLossConfig(loss_mode="clip_cov"), ppo_epochs=2, shuffle=True)
    assert one == noise_of(batch, config, dp_size=2) == noise_of(batch, shuffled, dp_size=3)
    assert len(one) == 2
    assert one[0] != one[1] != noise_of(batch, config, step=2)[0]
    values = torch.tensor([noise for _, noise in one[0]])
    assert values.shape == (7, 3)
    assert bool(((values >= 0) & (values < 1)).all())
    assert "choice_noise" not in batch.tensors


@pytest.mark.parametrize(
    "config",
    [config_of(), FSDPCriticConfig(data_loader_seed=1, ppo_epochs=1, ppo_mini_batch_size=4, shuffle=False)],
)
def test_losses_that_choose_nothing_get_no_noise(config):
    assert set(noise_of(batch_of(4), config)) == {None}


def watch(limit: int, folder: Path, *steps: tuple[str, int, int]) -> None:
    """(name, skipped, empty of 2 mini-batches) for every call."""
    skipped = SkippedUpdates(limit, folder)
    for step, (name, count, empty) in enumerate(steps, 1):
        metrics = {f"{name}/skipped_updates": float(count), f"{name}/empty_updates": float(empty)}
        skipped.watch(name, metrics, 2 - empty, step, batch_of(3))


def test_a_critic_that_learns_does_not_hide_a_policy_that_does_not(tmp_path):
    with pytest.raises(TrainingError, match="Step 4: the actor was not updated in 2 steps in a row"):
        watch(1, tmp_path, ("critic", 0, 0), ("actor", 2, 0), ("critic", 0, 0), ("actor", 2, 0))


def test_a_step_in_which_one_update_was_made_starts_the_count_anew(tmp_path):
    none, one, all_skipped = ("actor", 0, 0), ("actor", 1, 0), ("actor", 2, 0)
    watch(1, tmp_path, all_skipped, one, all_skipped, none, all_skipped)
    with pytest.raises(TrainingError):
        watch(1, tmp_path, all_skipped, one, all_skipped, all_skipped)


def test_steps_without_a_token_and_skipped_ones_are_both_steps_without_an_update(tmp_path):
    with pytest.raises(TrainingError, match=r"1 had a gradient that was not finite, and 1 had no token to train on"):
        watch(1, tmp_path, ("actor", 0, 2), ("actor", 1, 1))
    watch(1, tmp_path, ("actor", 0, 2), ("actor", 0, 1), ("actor", 0, 2))


def test_the_batch_is_left_behind_where_the_message_says(tmp_path):
    with pytest.raises(TrainingError) as error:
        watch(0, tmp_path / "run", ("actor", 2, 0))
    file = tmp_path / "run" / "failed_batch_step_1"
    assert f"The batch is in {file}" in str(error.value)
    assert DataProto.load_from_disk(str(file)).tensors["row"].tolist() == [0, 1, 2]


def test_what_a_file_cannot_hold_is_left_out_of_the_dump(tmp_path):
    batch = batch_of(3)
    batch.non_tensor_batch["tool"] = object_array([object()] * 3)
    dumped = DataProto.load_from_disk(str(dump_batch(batch, tmp_path, 7)))
    assert list(dumped.non_tensor_batch) == ["uid"]
    assert dumped.tensors["row"].tolist() == [0, 1, 2]


def test_a_disk_that_takes_nothing_does_not_hide_why_the_run_ends(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TrainingError, match=r"not updated in 1 steps.*could not be written"):
        watch(0, tmp_path / "file", ("actor", 2, 0))


def test_of_the_ranks_utilisation_the_mean_counts_and_of_their_memory_the_most() -> None:
    ranks = [
        {"actor/loss": 1.0, "perf/mfu/actor": 0.2, "perf/max_memory_allocated_gb": 3.0},
        {"actor/loss": 1.0, "perf/mfu/actor": 0.4, "perf/max_memory_allocated_gb": 5.0},
    ]
    expected = {"actor/loss": 1.0, "perf/mfu/actor": pytest.approx(0.3), "perf/max_memory_allocated_gb": 5.0}
    assert merge_ranks(ranks) == expected
