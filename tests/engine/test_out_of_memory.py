"""Running out of memory says in which stage, how much was asked for, and which keys to set to what."""

import re
from typing import Any

import pytest
import torch

from burnish.engine import FSDPEngine, offload
from burnish.engine.out_of_memory import asked_bytes, is_out_of_memory
from burnish.utils.errors import BurnishError, MemoryExceededError
from tests.engine.engine_program import make_batch, make_engine, policy_loss, value_loss

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."
)
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1073741824 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), int(2.5 * 2**30)),
        (RuntimeError(CPU_TEXT), 2**30),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 * 2**20),
        (MemoryError(), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_the_errors_of_torch_and_python_are_recognised(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


def test_a_real_allocation_that_cannot_be_made_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 1 << 60


@pytest.fixture
def device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """State can go from where it is to the CPU, as from a GPU."""
    monkeypatch.setattr(offload, "_DEVICES", {"cpu", "cuda"})


def fails(engine: FSDPEngine, where: str, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Makes the forward, the backward or the step of ``engine`` run out of memory."""
    error = torch.OutOfMemoryError(CUDA_TEXT) if error is None else error

    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    if where == "step":
        assert engine._optimizer is not None
        monkeypatch.setattr(engine._optimizer, "_update", raise_it)
    else:
        block = next(m for m in engine.module.modules() if type(m).__name__ == "LlamaDecoderLayer")
        if where == "forward":
            block.register_forward_hook(raise_it)
        else:
            block.register_full_backward_hook(raise_it)


def message(engine: FSDPEngine, stage: str, *, num_rows: int = 8, **cut: int) -> str:
    rows = make_batch(num_rows)
    policy = engine.kind == "policy"
    loss, outputs = (policy_loss(), ("log_probs", "entropy")) if policy else (value_loss, ("values",))

    def run() -> None:
        if stage == "infer":
            engine.infer_batch(rows, outputs=outputs[:1], **cut)
        else:
            engine.train_batch(rows, loss, outputs=outputs, **cut)
            engine.optimizer_step(1)

    with pytest.raises(MemoryExceededError) as caught:
        run()
    assert isinstance(caught.value, BurnishError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_update_names_its_micro_batch_and_the_keys_with_values(
    where: str, device_of_its_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    fails(engine, where, monkeypatch)
    text = message(engine, "train", max_token_len=40)
    found = re.match(
        r"Out of memory in the update of the actor, with (\d+) rows of (\d+) tokens in the model: it asked for 2\.50 GiB "
        r"more, and on cpu of [\d.]+ GiB [\d.]+ [GM]iB is free\. Set (.*)\.$",
        text,
    )
    assert found, text
    rows, tokens, ways = int(found[1]), int(found[2]), found[3].replace(" or ", ", ").split(", ")
    assert rows > 1
    assert 20 < tokens <= 40
    model, section = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    assert ways == [
        f"{section}.ppo_max_token_len_per_gpu={tokens // 2}",
        f"{model}.enable_gradient_checkpointing=true",
        f"{model}.enable_activation_offload=true",
        f"{section}.fsdp_config.optimizer_offload=true",
        f"{section}.fsdp_config.param_offload=true",
    ]


def test_a_cpu_is_not_told_to_move_its_state_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fails(engine, "forward", monkeypatch)
    text = message(engine, "train", micro_batch_size=8)
    cut, checkpointing = "actor.ppo_micro_batch_size_per_gpu=4", "model.enable_gradient_checkpointing=true"
    assert text.endswith(f" Set actor_rollout_ref.{cut} or actor_rollout_ref.{checkpointing}.")


def test_the_bound_that_is_named_is_of_one_of_the_workers_that_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(trained=False)
    fails(engine, "forward", monkeypatch)
    alone = message(engine, "infer", max_token_len=40)
    # As if the ranks that cut together were two; the model itself is not called by them.
    monkeypatch.setattr(engine, "sp_size", 2)
    shared = message(engine, "infer", max_token_len=20)
    (tokens,), (bound,) = (re.findall(pattern, alone) for pattern in (r"rows of (\d+) tokens", r"per_gpu=(\d+)"))
    (half,), (half_bound,) = (re.findall(pattern, shared) for pattern in (r"rows of (\d+) tokens", r"per_gpu=(\d+)"))
    assert int(half) == (int(tokens) + 1) // 2 <= 20
    assert int(half_bound) == int(half) // 2 < 20
    assert int(bound) == int(tokens) // 2


def test_rows_are_halved_where_rows_cut_and_what_is_set_is_not_named(
    device_of_its_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        gradient_checkpointing=True, fsdp_keys={"param_offload": True, "optimizer_offload": True}, module="value"
    )
    fails(engine, "forward", monkeypatch)
    text = message(engine, "train", micro_batch_size=5)
    assert "in the update of the critic, with 5 rows" in text
    assert text.endswith("Set critic.ppo_micro_batch_size_per_gpu=2 or critic.model.enable_activation_offload=true.")


def test_a_bound_is_never_below_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(trained=False)
    fails(engine, "forward", monkeypatch)
    text = message(engine, "infer", num_rows=1, max_token_len=13)
    # No smaller bound would take that row.
    assert "max_token_len" not in text
    assert "the pass for the reference's log-probs" in text
    assert text.endswith("Let more workers share the model, or lower data.max_response_length.")


@pytest.mark.parametrize(
    ("engine_keys", "stage", "names"),
    [
        ({}, "infer", ("the pass for the actor's log-probs", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4")),
        ({"trained": False}, "infer", ("the reference's log-probs", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4")),
        ({"module": "value"}, "infer", ("the pass for the critic's values", "critic.forward_micro_batch_size_per_gpu=4")),
    ],
)  # fmt: skip
def test_each_stage_names_itself_and_its_own_key(
    engine_keys: dict[str, Any], stage: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**engine_keys)
    fails(engine, "forward", monkeypatch, RuntimeError(CPU_TEXT))
    text = message(engine, stage, micro_batch_size=8)
    assert "it asked for 1.00 GiB more" in text
    assert all(name in text for name in names), text


def test_a_policy_without_its_adapters_is_the_reference_with_the_keys_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_keys={"lora_rank": 2})
    fails(engine, "forward", monkeypatch)
    assert "actor_rollout_ref.rollout.log_prob_micro_batch_size" in message(engine, "infer", micro_batch_size=8)
    with engine.adapters_off():
        text = message(engine, "infer", micro_batch_size=8)
    assert "the pass for the reference's log-probs" in text
    assert "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4" in text


def test_the_optimizer_step_names_what_leaves_it_more_memory(
    device_of_its_own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    fails(engine, "step", monkeypatch)
    text = message(engine, "train", micro_batch_size=8)
    section = "actor_rollout_ref.actor.fsdp_config"
    assert text.startswith("Out of memory in the optimizer step of the actor: it asked for 2.50 GiB more")
    assert text.endswith(f"Set {section}.optimizer_offload=true or {section}.param_offload=true.")


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fails(engine, "forward", monkeypatch, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine.infer_batch(make_batch())
