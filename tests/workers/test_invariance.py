"""The gradient of every loss and term is that of the whole step, however the step is cut into micro-batches."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.engine import FSDPEngine, LossFn
from burnish.protocol import DataProto
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.workers.losses import make_policy_loss, make_value_loss
from burnish.workers.preparation import make_preparation
from burnish.workers.updates import run_mini_batches
from tests.engine.engine_program import VOCAB, make_batch, make_engine, tiny_config
from tests.workers.update_program import LOSS_MODES, OUTPUTS, TEMPERATURE, actor_config, update_batch

LENGTHS = [1, 2, 3, 10]
# Rows of each micro-batch: [4], [2, 2], [3, 1], [1, 1, 1, 1], and one by a bound of tokens.
SPLITS: list[dict[str, int | None]] = [{"micro_batch_size": size} for size in (4, 2, 3, 1)] + [{"max_token_len": 13}]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def four_rows(engine: FSDPEngine) -> DataProto:
    """Responses of 1, 2, 3 and 10 tokens after a prompt of three, with all that the losses read."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if engine.dtype == torch.float64 else torch.float32
    mask = torch.arange(10) < torch.tensor(LENGTHS)[:, None]
    attention_mask = torch.cat([torch.ones(4, 3, dtype=torch.bool), mask], 1)
    ids = torch.where(attention_mask, torch.randint(3, VOCAB, (4, 13), generator=generator), 0)
    tensors = {"input_ids": ids, "attention_mask": attention_mask, "responses": ids[:, 3:], "response_mask": mask}
    rows = DataProto.from_dict(tensors=tensors | {"loss_mask": mask.clone()})
    output = "values" if engine.kind == "value" else "log_probs"
    own = engine.infer_batch(rows, temperature=TEMPERATURE, outputs=(output,))[output].to(dtype)

    def near(distance: float) -> Tensor:
        return own + distance * torch.randn(4, 10, generator=generator, dtype=torch.float64).to(dtype)

    for key in ("old_log_probs", "rollout_log_probs", "ref_log_prob", "values"):
        rows.tensors[key] = near(0.3)
    rows.tensors["returns"] = near(1.0)
    rows.tensors["advantages"] = near(1.0) - own
    return rows


# Every mode to the last digits of float64; float32 shows that nothing large cancels, which no mode changes.
DTYPES_AND_MODES = [("float64", mode) for mode in LOSS_AGG_MODES] + [("float32", "token-mean")]


@cache
def engine_of(dtype: str, module: str = "policy") -> FSDPEngine:
    """An engine whose weights no test changes."""
    return make_engine(dtype=dtype, module=module, config=tiny_config(num_hidden_layers=1))


def gradients(engine: FSDPEngine, loss_fn: LossFn, prepare: Callable[[DataProto], None] | None = None) -> list[Tensor]:
    """Of the same step, cut in each of the ways."""
    outputs = ("values",) if engine.kind == "value" else OUTPUTS
    rows, found = four_rows(engine), []
    if prepare is not None:
        prepare(rows)
    info = engine.global_batch_info(rows, loss_scale_factor=7.0)
    for split in SPLITS:
        engine.train_batch(rows, loss_fn, temperature=TEMPERATURE, outputs=outputs, global_batch_info=info, **split)
        found.append(torch.cat([grad.double().flatten() for grad in engine.full_gradients().values()]))
        engine._layout.clear_grads()
    return found


def assert_equal(found: list[Tensor], dtype: str) -> None:
    whole, *others = found
    assert float(whole.norm()) > 1e-4
    for other in others:
        assert float((whole - other).norm() / whole.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_every_policy_loss(loss_mode: str, dtype: str, mode: str) -> None:
    config = actor_config(loss_mode, loss_agg_mode=mode, entropy_coeff=0.0, use_kl_loss=False)
    batching: dict[str, int | None] = {"micro_batch_size": 2}
    prepare = make_preparation(config, engine_of(dtype), temperature=TEMPERATURE, batching=batching)
    assert_equal(gradients(engine_of(dtype), make_policy_loss(config), prepare), dtype)


def other_terms(config: FSDPActorConfig) -> LossFn:
    """The actor's loss without its policy term, whose advantages are set to zero."""
    loss_fn = make_policy_loss(config)

    def without_policy_term(outputs: Any, rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        rows.tensors["advantages"] = torch.zeros_like(rows.tensors["advantages"])
        return loss_fn(outputs, rows, info)

    return without_policy_term


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES)
def test_the_entropy_bonus(dtype: str, mode: str) -> None:
    config = actor_config(loss_agg_mode=mode, entropy_coeff=1.0, use_kl_loss=False)
    assert_equal(gradients(engine_of(dtype), other_terms(config)), dtype)


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES)
@pytest.mark.parametrize("kl_loss_type", ["low_var_kl", "k1+"])
def test_the_kl_term(kl_loss_type: str, dtype: str, mode: str) -> None:
    config = actor_config(loss_agg_mode=mode, entropy_coeff=0.0, kl_loss_coef=1.0, kl_loss_type=kl_loss_type)
    assert_equal(gradients(engine_of(dtype), other_terms(config)), dtype)


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES)
def test_the_value_loss(dtype: str, mode: str) -> None:
    loss_fn = make_value_loss(FSDPCriticConfig(loss_agg_mode=mode, cliprange_value=0.2))
    assert_equal(gradients(engine_of(dtype, "value"), loss_fn), dtype)


@pytest.mark.parametrize(("num_mini_batches", "accumulation"), [(1, 1), (4, 2), (8, 32), (1, 4)])
def test_the_size_of_an_update_does_not_depend_on_mini_batches_and_accumulation(
    num_mini_batches: int, accumulation: int
) -> None:
    # As many copies of the same four rows as the rollout has mini-batches; a rate of 0 keeps the policy where it is.
    engine = make_engine(dtype="float64", lr=0.0, config=tiny_config(num_hidden_layers=1))
    copies = max(1, accumulation // 4)
    one = DataProto.concat([four_rows(engine)] * copies)
    batch = DataProto.concat([one] * num_mini_batches)
    batch.non_tensor_batch["uid"] = torch.arange(len(batch)).numpy().astype(object)
    planned = plan_mini_batches(batch, num_prompts=len(one), dp_size=1)
    planned.meta_info["global_steps"] = 1
    assert len(planned.meta_info["mini_batches"]) == num_mini_batches
    metrics = run_mini_batches(
        engine,
        planned,
        make_policy_loss(actor_config()),
        name="actor",
        outputs=OUTPUTS,
        temperature=TEMPERATURE,
        loss_scale_factor=7.0,
        batching={"micro_batch_size": max(1, len(one) // accumulation)},
    )
    engine.train_batch(four_rows(engine), make_policy_loss(actor_config()), temperature=TEMPERATURE, outputs=OUTPUTS)
    assert metrics["actor/grad_norm"] == pytest.approx(engine.optimizer_step(1)["grad_norm"], rel=1e-10)


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_the_first_update_on_policy_clips_nothing_for_any_micro_batches(loss_mode: str) -> None:
    engine = make_engine()
    batch = update_batch(engine)
    # As the pass before the update gives them, and the rollout where it agrees with the trainer.
    own = engine.infer_batch(batch, temperature=TEMPERATURE, micro_batch_size=1)["log_probs"]
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"] = own
    config = actor_config(loss_mode)
    prepare = make_preparation(config, engine, temperature=TEMPERATURE, batching={"micro_batch_size": 3})
    if prepare is not None:
        prepare(batch)
    metrics = engine.train_batch(
        batch, make_policy_loss(config), temperature=TEMPERATURE, outputs=OUTPUTS, micro_batch_size=8
    )
    assert metrics.get("actor/pg_clipfrac", 0.0) == 0.0
    assert metrics.get("actor/ppo_kl", 0.0) == pytest.approx(0.0, abs=1e-5)


def test_rows_stay_themselves_through_a_pass_and_an_update_in_batches_by_tokens() -> None:
    # Of a prompt of one token and a response of n, n tokens are computed; best fit takes these rows in another order.
    lengths, engine = [9, 2, 8, 1, 7, 3], make_engine()
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    attention_mask = torch.cat([torch.ones(6, 1, dtype=torch.bool), mask], 1)
    ids = torch.where(attention_mask, torch.arange(6)[:, None] + 5, 0)
    reward = torch.arange(6.0)
    tensors = {"input_ids": ids, "attention_mask": attention_mask, "responses": ids[:, 1:], "response_mask": mask}
    batch = DataProto.from_dict(tensors=tensors | {"loss_mask": mask, "reward": reward})
    batch.tensors["old_log_probs"] = engine.infer_batch(batch, max_token_len=10)["log_probs"]
    for row in range(6):
        alone = engine.infer_batch(batch[row : row + 1])["log_probs"][0]
        torch.testing.assert_close(batch.tensors["old_log_probs"][row], alone, atol=1e-6, rtol=0)
    seen: list[float] = []

    def loss_fn(outputs: Any, rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        torch.testing.assert_close(outputs["log_probs"], rows.tensors["old_log_probs"], atol=1e-5, rtol=0)
        assert torch.equal(rows.tensors["reward"], (rows.tensors["responses"][:, 0] - 5).float())
        seen.extend(rows.tensors["reward"].tolist())
        return outputs["log_probs"].sum() * 0, {}

    engine.train_batch(batch, loss_fn, max_token_len=10)
    assert sorted(seen) == reward.tolist()
    assert seen != reward.tolist()


def test_a_batch_counts_its_rows_and_not_its_keys() -> None:
    batch = make_batch(3).select(["input_ids", "attention_mask", "responses", "response_mask", "values", "returns"])
    batch.tensors["loss_mask"] = batch.tensors["response_mask"]
    assert len(batch.tensors.keys()) == 7
    assert make_engine().global_batch_info(batch)["global_batch_size"] == 3


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", [*LOSS_MODES, "value"])
def test_a_row_out_of_the_loss_mask_is_as_if_it_were_not_there(loss_mode: str, mode: str) -> None:
    """Rejected and abstained rows are in no denominator, of the policy's terms (entropy and KL among them) or the critic's."""
    is_critic = loss_mode == "value"
    engine = engine_of("float64", "value" if is_critic else "policy")
    config = FSDPCriticConfig(loss_agg_mode=mode) if is_critic else actor_config(loss_mode, loss_agg_mode=mode)
    loss_fn = make_value_loss(config) if is_critic else make_policy_loss(config)
    whole = four_rows(engine)
    whole.tensors["choice_noise"] = torch.rand(4, 10, generator=torch.Generator().manual_seed(0))
    without = whole.select_idxs([0, 1, 3])
    whole.tensors["loss_mask"][2] = False
    # What a row that does not count holds is rubbish.
    for key in ("advantages", "returns"):
        whole.tensors[key][2] = torch.nan
    found, metrics = [], []
    for rows in (whole, without):
        if not is_critic and (prepare := make_preparation(config, engine, temperature=TEMPERATURE, batching=SPLITS[0])):
            prepare(rows)
        info = engine.global_batch_info(rows, loss_scale_factor=7.0)
        outputs = ("values",) if is_critic else OUTPUTS
        of_step = {"temperature": TEMPERATURE, "outputs": outputs, "global_batch_info": info}
        metrics.append(engine.train_batch(rows, loss_fn, **of_step, micro_batch_size=2))
        found.append(torch.cat([grad.double().flatten() for grad in engine.full_gradients().values()]))
        engine._layout.clear_grads()
    assert_equal(found, "float64")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-9, abs=1e-12)
