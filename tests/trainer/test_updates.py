"""Several optimizer steps of one trainer step: how their metrics become one, and when skipped ones end the run."""

import numpy as np
import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.protocol import DataProto
from burnish.trainer.ppo.updates import SkippedUpdates, update_in_passes
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
        return [{"actor/pg_loss": call, "actor/skipped_updates": 1.0, "perf/max_memory_allocated_gb": 5 - call}]

    metrics, num_updates = update_in_passes(
        update, batch, config, dp_size=1, balance=True, step=step, max_response_length=9
    )
    return orders, metrics, num_updates


def config_of(**settings) -> FSDPActorConfig:
    return FSDPActorConfig(data_loader_seed=1, ppo_mini_batch_size=2, **settings)


def test_means_are_over_all_updates_counts_add_up_and_memory_keeps_the_most():
    _, metrics, num_updates = passes(config_of(ppo_epochs=3), batch_of(6))
    assert num_updates == 9
    assert metrics == {"actor/pg_loss": 2.0, "actor/skipped_updates": 3.0, "perf/max_memory_allocated_gb": 4.0}


def test_a_mini_batch_without_a_token_is_no_update():
    assert passes(config_of(), batch_of(6, empty=2))[2] == 2


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


def watch(limit: int, *steps: tuple[str, int]) -> None:
    """(name, skipped of 2 updates) for every call."""
    skipped = SkippedUpdates(limit)
    for step, (name, count) in enumerate(steps, 1):
        skipped.watch(name, {f"{name}/skipped_updates": float(count)}, 2, step)


def test_a_critic_that_learns_does_not_hide_a_policy_that_does_not():
    with pytest.raises(TrainingError, match="no gradient of the actor was finite in 2 steps"):
        watch(1, ("critic", 0), ("actor", 2), ("critic", 0), ("actor", 2))


def test_a_step_in_which_one_update_was_made_starts_the_count_anew():
    watch(1, ("actor", 2), ("actor", 1), ("actor", 2), ("actor", 0), ("actor", 2))
    with pytest.raises(TrainingError):
        watch(1, ("actor", 2), ("actor", 1), ("actor", 2), ("actor", 2))
