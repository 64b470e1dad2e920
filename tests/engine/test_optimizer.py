"""AdamW with masters: against torch's own, in mixed precision, and against gradients that are no numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.engine.schedule import lr_at
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError
from tests.engine.engine_program import make_batch, make_engine, policy_loss, tiny_config, train, value_loss


def step(engine: Any, number: int = 1, scale: float = 1.0, batch: DataProto | None = None) -> dict[str, float]:
    def loss_fn(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = policy_loss()(outputs, rows, info)
        return loss * scale, metrics

    engine.train_batch(make_batch() if batch is None else batch, loss_fn, outputs=("log_probs", "entropy"))
    return engine.optimizer_step(number)


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def test_steps_equal_those_of_torch_adamw_on_the_clipped_gradient() -> None:
    engine, twin = (make_engine(dtype="float64", clip_grad=0.1, weight_decay=0.1) for _ in range(2))
    parameters = dict(twin.module.named_parameters())
    adamw = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999))
    for number in (1, 2, 3):
        batch = make_batch(seed=number, dtype=torch.float64)
        twin.train_batch(batch, policy_loss(), outputs=("log_probs", "entropy"))
        # torch adds 1e-6 to the norm, which is why this is equal to six digits only.
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.1))
        adamw.step()
        adamw.zero_grad()
        assert step(engine, number, batch=batch)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], atol=1e-6, rtol=0)


def test_a_gradient_below_the_bound_is_not_clipped() -> None:
    norms = {bound: step(make_engine(clip_grad=bound))["grad_norm"] for bound in (0.01, 1e9)}
    assert norms[0.01] == norms[1e9]
    loose, none = make_engine(clip_grad=1e9, lr=1.0), make_engine(clip_grad=norms[0.01] * 1.01, lr=1.0)
    step(loose)
    step(none)
    for a, b in zip(weights(loose).values(), weights(none).values(), strict=True):
        assert torch.equal(a, b)


def test_updates_smaller_than_bf16_resolution_add_up_in_the_masters() -> None:
    # One step moves a weight of about 1 (a norm's) by 1e-4, an eightieth of the distance between bf16 numbers there.
    engine = make_engine(dtype="bfloat16", lr=1e-4, weight_decay=0.0)
    name = "model.norm.weight"
    start = weights(engine)[name]
    step(engine, 1)
    assert torch.equal(weights(engine)[name], start)
    for number in range(2, 60):
        step(engine, number)
    assert not torch.equal(weights(engine)[name], start)
    assert engine.dtype == weights(engine)[name].dtype == torch.bfloat16


def test_bf16_compute_weights_are_the_rounded_masters_at_their_old_addresses() -> None:
    engine = make_engine(dtype="bfloat16")
    addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
    for number in (1, 2):
        step(engine, number)
    masters = engine._layout.masters()
    for name, parameter in engine.module.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    assert addresses == [parameter.data_ptr() for parameter in engine.module.parameters()]
    assert engine.shares_storage


def test_gradients_of_many_micro_batches_are_added_in_float32() -> None:
    # In bf16 the sum of 256 equal shares stops growing at the first that is 256 times smaller than it.
    row = make_batch()[:1]
    many = DataProto.concat([row] * 300)
    small = tiny_config(num_hidden_layers=1)
    engine = make_engine(dtype="bfloat16", config=small)
    engine.train_batch(many, policy_loss("token-sum"), outputs=("log_probs", "entropy"), micro_batch_size=1)
    alone = make_engine(dtype="bfloat16", config=small)
    alone.train_batch(row, policy_loss("token-sum"), outputs=("log_probs", "entropy"))
    for name, grad in engine.full_gradients().items():
        torch.testing.assert_close(grad, 300 * alone.full_gradients()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_gradient_remembers_nothing_of_the_last(dtype: str) -> None:
    engine, fresh = make_engine(dtype=dtype, lr=0.0, weight_decay=0.0), make_engine(dtype=dtype)
    step(engine, 1)
    assert all(float(grad.abs().max()) == 0 for grad in engine.full_gradients().values())
    step(engine, 2, scale=float("nan"))
    for each in (engine, fresh):
        each.train_batch(make_batch(seed=3), policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=3)
    for name, grad in engine.full_gradients().items():
        assert torch.equal(grad, fresh.full_gradients()[name]), name


def test_a_tied_pair_has_one_master_and_stays_tied() -> None:
    engine = make_engine(dtype="bfloat16")
    step(engine)
    model = engine.module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(engine)
    assert sum("embed" in name or "lm_head" in name for name in engine._layout.masters()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_no_number_skips_one_step_and_is_counted(dtype: str) -> None:
    engine, clean = make_engine(dtype=dtype), make_engine(dtype=dtype)
    for each in (engine, clean):
        assert step(each, 1)["skipped_updates"] == 0
    before = weights(engine)
    result = step(engine, 2, scale=float("nan"))
    assert result["skipped_updates"] == 1
    assert not result["grad_norm"] < float("inf")
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())
    # Neither the moments nor the next gradient remember it.
    step(engine, 3)
    step(clean, 3)
    assert all(torch.equal(weight, weights(clean)[name]) for name, weight in weights(engine).items())


def test_the_logged_rate_is_the_one_of_the_trainers_step() -> None:
    engine = make_engine(lr=1e-2, lr_warmup_steps=4)
    assert [step(engine, number)["lr"] for number in (1, 4, 9)] == pytest.approx([0.0025, 0.01, 0.01])


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_logged_rate_is_the_one_that_the_optimizer_used(shape: str, optimizer: str) -> None:
    engine = make_engine(lr=1e-2, lr_warmup_steps=3, lr_scheduler_type=shape, lr_decay_steps=4, optimizer=optimizer)
    inner, used = engine._optimizer._optimizer, []  # type: ignore[union-attr]
    inner.register_step_pre_hook(lambda *_: used.append(inner.param_groups[0]["lr"]))
    logged = [step(engine, number)["lr"] for number in range(1, 11)]
    assert used == logged
    # make_engine's runs have ten steps.
    assert logged == [lr_at(number, engine._optimizer.config, 10) for number in range(1, 11)]  # type: ignore[union-attr]


def test_a_weight_moves_by_the_logged_rate() -> None:
    # The first step of Adam without decay moves every weight that has a gradient by the rate.
    engine = make_engine(dtype="float64", lr=1e-2, lr_warmup_steps=4, weight_decay=0.0)
    before = weights(engine)
    lr = step(engine, 1, batch=make_batch(dtype=torch.float64))["lr"]
    moved = torch.cat([(weight - before[name]).abs().flatten() for name, weight in weights(engine).items()])
    assert lr == pytest.approx(0.0025)
    assert float(moved.max()) == pytest.approx(lr, rel=1e-4)


def test_a_model_that_is_only_read_has_no_masters_and_refuses_a_step() -> None:
    engine = make_engine(dtype="bfloat16", trained=False)
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    assert engine._layout.masters() == {}
    with pytest.raises(ConfigError, match="only reads"):
        engine.optimizer_step(1)


def test_a_policy_and_its_critic_learn() -> None:
    critic = make_engine(module="value", lr=1e-2, clip_grad=1.0)
    losses = []
    for number in range(1, 16):
        values = critic.infer_batch(make_batch(), outputs=("values",))["values"]
        batch = make_batch().batch
        assert batch is not None
        losses.append(float((values - batch["returns"])[batch["loss_mask"]].square().mean()))
        critic.train_batch(make_batch(), value_loss, outputs=("values",))
        critic.optimizer_step(number)
    assert losses[-1] < 0.5 * losses[0]


def test_training_in_bf16_stays_near_float32() -> None:
    a, b = (train(make_engine(dtype=dtype, lr=1e-3), steps=3, micro_batch_size=4) for dtype in ("float32", "bfloat16"))
    assert b["updates"][0]["grad_norm"] == pytest.approx(a["updates"][0]["grad_norm"], rel=0.02)
