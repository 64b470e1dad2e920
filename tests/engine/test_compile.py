"""Compiled blocks: the same numbers for any micro-batches, one compilation for all blocks and lengths."""

import logging

import pytest
import torch

from tests.engine.engine_program import make_engine, train
from tests.engine.test_ranks import distance
from tests.model.tiny_models import FAMILIES


@pytest.mark.slow
def test_an_engine_trains_alike_with_compiled_blocks() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # A family whose layers are not fused.
    plain, compiled = (
        train(
            make_engine(config=FAMILIES["granite"], fsdp_keys={"use_torch_compile": on}, gradient_checkpointing=on),
            steps=2,
            micro_batch_size=3,
        )
        for on in (False, True)
    )
    assert distance(compiled["gradients"], plain["gradients"]) < 1e-5
    assert distance(compiled["weights"], plain["weights"]) < 1e-3
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Two pieces around attention, with and without gradients at most, whatever the number of tokens and blocks.
    assert 0 < graphs <= 6


def test_where_layers_are_fused_the_key_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="burnish.engine"):
        make_engine(fsdp_keys={"use_torch_compile": True})
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("actor_rollout_ref.actor.fsdp_config.use_torch_compile=true has no effect")
