"""The gradient does not depend on how a step is cut, and rows stay themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.model.flops import FlopsCounter
from burnish.protocol import DataProto
from tests.engine.engine_program import make_batch, make_engine, policy_loss, train, value_loss

SPLITS: list[dict[str, int]] = [
    {"micro_batch_size": 8},
    {"micro_batch_size": 3},
    {"micro_batch_size": 1},
    {"max_token_len": 15},
]


def gradient(
    dtype: str, split: dict[str, int], mode: str = "token-mean", batch: DataProto | None = None, **engine: Any
) -> Tensor:
    made = make_engine(dtype=dtype, **engine)
    rows = make_batch(dtype=torch.float64 if dtype == "float64" else torch.float32) if batch is None else batch
    policy = made.kind == "policy"
    made.train_batch(
        rows,
        policy_loss(mode) if policy else value_loss,
        outputs=("log_probs", "entropy") if policy else ("values",),
        global_batch_info=made.global_batch_info(rows, loss_scale_factor=7.0),
        **split,
    )
    return torch.cat([grad.double().flatten() for grad in made.full_gradients().values()])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_float64_gradient_is_the_same_for_any_micro_batches(mode: str) -> None:
    whole, *others = (gradient("float64", split, mode) for split in SPLITS)
    for other in others:
        assert float((whole - other).norm() / whole.norm()) < 1e-10


@pytest.mark.parametrize("module", ["policy", "value"])
def test_float32_gradient_is_the_same_for_any_micro_batches(module: str) -> None:
    whole, *others = (gradient("float32", split, module=module) for split in SPLITS)
    assert float(whole.norm()) > 0
    for other in others:
        assert float((whole - other).norm() / whole.norm()) < 1e-5


def test_gradient_does_not_depend_on_the_order_of_rows() -> None:
    batch = make_batch(dtype=torch.float64)
    shuffled = batch.select_idxs([5, 2, 7, 0, 1, 3, 6, 4])
    a, b = (gradient("float64", {"micro_batch_size": 3}, batch=rows) for rows in (batch, shuffled))
    assert float((a - b).norm() / a.norm()) < 1e-10


def test_rows_that_pad_a_dispatch_change_nothing() -> None:
    batch = make_batch(dtype=torch.float64)
    padding = batch[:3]
    assert padding.batch is not None
    padding = DataProto.from_dict(tensors={**dict(padding.batch.items())})
    padding.batch["response_mask"] = torch.zeros_like(padding.batch["response_mask"])  # type: ignore[index]
    padding.batch["loss_mask"] = torch.zeros_like(padding.batch["loss_mask"])  # type: ignore[index]
    a, b = (
        gradient("float64", {"micro_batch_size": 4}, batch=rows) for rows in (batch, DataProto.concat([batch, padding]))
    )
    assert float((a - b).norm() / a.norm()) < 1e-10


def test_recomputed_activations_and_a_few_steps_give_the_same_weights() -> None:
    results = [
        train(make_engine(dtype="float64", gradient_checkpointing=recompute), steps=3, micro_batch_size=size)
        for recompute, size in ((False, 8), (True, 3))
    ]
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(weight, results[1]["weights"][name], atol=1e-10, rtol=0)


def test_metrics_are_those_of_the_whole_step_for_any_micro_batches() -> None:
    rows = make_batch()
    metrics = [
        make_engine().train_batch(rows, policy_loss(), outputs=("log_probs", "entropy"), **split) for split in SPLITS
    ]
    assert rows.batch is not None
    assert metrics[0]["tokens"] == float(rows.batch["loss_mask"].sum())
    assert metrics[0]["length_max"] == float(rows.batch["loss_mask"].sum(1).max())
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], abs=1e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_inferred_rows_come_back_in_their_order(split: dict[str, int]) -> None:
    engine, batch = make_engine(), make_batch(9)
    log_probs = engine.infer_batch(batch, **split)["log_probs"]
    for row in range(9):
        alone = engine.infer_batch(batch[row : row + 1])["log_probs"][0]
        torch.testing.assert_close(log_probs[row], alone, atol=1e-6, rtol=0)
    assert batch.batch is not None
    assert bool((log_probs != 0).eq(batch.batch["response_mask"]).all())


def test_the_first_update_on_policy_has_ratio_one_for_any_micro_batches() -> None:
    engine, batch = make_engine(), make_batch()
    old = engine.infer_batch(batch, micro_batch_size=1)["log_probs"]
    seen: list[float] = []

    def loss_fn(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.batch is not None
        ratio = (outputs["log_probs"] - rows.batch["old_log_probs"]).exp()
        seen.append(float((ratio.detach() - 1).abs().max()))
        return ratio.sum() * 0, {}

    assert batch.batch is not None
    batch.batch["old_log_probs"] = old
    engine.train_batch(batch, loss_fn, micro_batch_size=8)
    assert max(seen) < 1e-5


def test_inference_needs_no_response_mask_and_leaves_no_gradient() -> None:
    engine, batch = make_engine(), make_batch()
    with_mask = engine.infer_batch(batch)["log_probs"]
    without = engine.infer_batch(batch.select(batch_keys=["input_ids", "attention_mask", "responses"]))["log_probs"]
    assert torch.equal(with_mask, without)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(train(make_engine(), steps=2, micro_batch_size=4))
        assert torch.equal(before, torch.get_rng_state())
    for name, weight in results[0]["weights"].items():
        assert torch.equal(weight, results[1]["weights"][name])


def test_operations_are_those_of_the_tokens_really_computed() -> None:
    engine, batch = make_engine(), make_batch(5)
    counter = FlopsCounter(engine.module.model)
    tensors = batch.tensors
    labels = tensors["response_mask"].sum(1).tolist()
    # Nothing depends on the last token of a row.
    tokens = [length - 1 for length in tensors["attention_mask"].sum(1).tolist()]
    pairs = [length * (length + 1) // 2 for length in tokens]
    forward, both = (
        counter.flops(sum(tokens), sum(pairs), sum(labels), backward=backward) for backward in (False, True)
    )
    for split in SPLITS:
        engine.infer_batch(batch, **split)
        assert engine.take_flops() == pytest.approx(forward)
        engine.train_batch(batch, policy_loss(), outputs=("log_probs", "entropy"), **split)
        engine.train_batch(batch, policy_loss(), outputs=("log_probs", "entropy"), **split)
        assert engine.take_flops() == pytest.approx(2 * both)
        assert engine.take_flops() == 0


def test_numbers_of_an_own_loss_are_metrics_like_tensors() -> None:
    def loss_fn(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return outputs["log_probs"].sum(), {"rows": float(len(rows)), "share": outputs["log_probs"].sum().detach()}

    metrics = make_engine().train_batch(make_batch(7), loss_fn, micro_batch_size=3)
    assert metrics["rows"] == 7.0


def test_a_loss_gets_the_rows_that_its_outputs_are_of() -> None:
    engine, batch = make_engine(), make_batch(9)
    expected = engine.infer_batch(batch)["log_probs"]
    batch.tensors["row"] = torch.arange(9)
    seen: list[int] = []

    def loss_fn(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        torch.testing.assert_close(outputs["log_probs"].detach(), expected[rows.tensors["row"]], atol=1e-6, rtol=0)
        seen.extend(rows.tensors["row"].tolist())
        return outputs["log_probs"].sum() * 0, {}

    engine.train_batch(batch, loss_fn, max_token_len=15)
    assert sorted(seen) == list(range(9))
