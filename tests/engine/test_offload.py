"""State that lies on the CPU between uses comes back to the bit, and holds no memory meanwhile."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.engine import offload
from burnish.engine.offload import HostGroup, StepOffload, WeightOffload
from burnish.utils.transfers import Transfers
from tests.engine.engine_program import make_batch, make_engine, policy_loss, train
from tests.engine.memory_program import bytes_away

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny models are all small."""
    monkeypatch.setattr(offload, "_LEAST_BYTES", 0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU's state move to other memory of the CPU, as a GPU's does."""
    monkeypatch.setattr(offload, "_DEVICES", {"cpu"})


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_tensors_and_their_views_come_back_to_the_bit() -> None:
    whole, alone = torch.randn(6, 5), torch.randn(3).bfloat16()
    first, second = whole[:2], whole[2:]
    expected = [tensor.clone() for tensor in (first, second, alone)]
    group = HostGroup([first, second, alone], Transfers(CPU))
    assert group.num_bytes == 6 * 5 * 4 + 3 * 2
    group.leave()
    assert memory(whole) == memory(alone) == 0
    group.fetch()
    group.wait()
    assert all(torch.equal(a, b) for a, b in zip((first, second, alone), expected, strict=True))
    assert first.data_ptr() == whole.data_ptr()


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1000)
    small, large = torch.ones(249), torch.ones(250)
    group = HostGroup([small, large], Transfers(CPU))
    group.leave()
    assert (memory(small), memory(large)) == (996, 0)


def test_what_has_not_changed_is_not_copied_again() -> None:
    tensor = torch.zeros(4)
    group = HostGroup([tensor], Transfers(CPU))
    for value, changed, expected in ((1.0, False, 1.0), (2.0, False, 1.0), (3.0, True, 3.0)):
        tensor.fill_(value)
        group.leave(changed=changed)
        group.fetch()
        group.wait()
        # The first time there is no copy to keep.
        assert tensor.tolist() == [expected] * 4


def test_leaving_twice_and_fetching_twice_do_nothing() -> None:
    tensor = torch.arange(4.0)
    group = HostGroup([tensor], Transfers(CPU))
    group.fetch()
    group.leave()
    group.leave()
    group.fetch()
    tensor[0] = 9
    group.fetch()
    assert tensor.tolist() == [9, 1, 2, 3]


def test_a_step_visits_every_parameter_once_with_at_most_two_buckets_there() -> None:
    masters = {f"p{i}": torch.full((10,), float(i)) for i in range(7)}
    moments = {name: [torch.zeros(10)] for name in masters}
    state = StepOffload(
        masters, moments.__getitem__, Transfers(CPU), masters_leave=True, moments_leave=True, bucket_bytes=80
    )
    state.leave()
    assert not any(map(memory, masters.values()))
    visited = []
    for names in state.visit():
        there = [name for name, master in masters.items() if memory(master)]
        assert set(names) <= set(there)
        assert len(there) <= 4
        for name in names:
            masters[name].add_(1)
            moments[name][0].add_(2)
        visited += names
    assert visited == list(masters)
    assert not any(memory(tensor) for tensor in (*masters.values(), *(m for ms in moments.values() for m in ms)))
    state.fetch()
    assert [master[0].item() for master in masters.values()] == [1, 2, 3, 4, 5, 6, 7]
    assert all(moment[0].item() == 2 for ms in moments.values() for moment in ms)


def test_moments_that_a_step_makes_or_a_checkpoint_replaces_leave_too() -> None:
    masters: dict[str, Tensor] = {"a": torch.zeros(4)}
    moments: dict[str, list[Tensor]] = {"a": []}
    state = StepOffload(masters, moments.__getitem__, Transfers(CPU), masters_leave=False, moments_leave=True)
    state.leave()
    for value in (1.0, 2.0):
        for _ in state.visit():
            moments["a"] = [torch.full((4,), value)]
        assert memory(moments["a"][0]) == 0
        assert memory(masters["a"]) == 16
        state.fetch()
        assert moments["a"][0].tolist() == [value] * 4


def test_weights_of_a_module_are_there_when_it_is_called() -> None:
    layers = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    weights = WeightOffload([(layer, [layer.weight.detach()]) for layer in layers], Transfers(CPU))
    expected = [layer.weight.detach().clone() for layer in layers]
    weights.leave(changed=True)
    assert not any(memory(layer.weight) for layer in layers)
    weights.fetch(wait=False)
    for layer, weight in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(torch.eye(3)), weight.t())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_replicated_model_trains_to_the_same_bits_with_its_state_on_the_cpu(
    dtype: str, optimizer: str, on_cpu: None
) -> None:
    keys = {"param_offload": True, "optimizer_offload": True}
    results = []
    for fsdp_keys in ({}, keys):
        engine = make_engine(dtype=dtype, fsdp_keys=fsdp_keys, optimizer=optimizer)
        results.append(train(engine, steps=3, micro_batch_size=3))
    plain, parked = results
    for key in ("weights", "gradients"):
        assert all(torch.equal(parked[key][name], tensor) for name, tensor in plain[key].items())
    assert parked["updates"] == plain["updates"]


def test_masters_moments_and_gradients_leave_and_what_the_rollout_reads_stays(on_cpu: None) -> None:
    engine = make_engine(dtype="bfloat16", fsdp_keys={"param_offload": True, "optimizer_offload": True})
    masters = sum(master.numel() * 4 for master in engine._layout.masters().values())
    assert bytes_away(engine) == {"weights": 0, "masters": masters, "moments": 0}
    addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
    train(engine, steps=1, micro_batch_size=4)
    assert bytes_away(engine) == {"weights": 0, "masters": masters, "moments": 2 * masters}
    assert addresses == [parameter.data_ptr() for parameter in engine.module.parameters()]
    assert not engine._layout._main_grads  # type: ignore[union-attr]
    assert engine.non_finite_weights() == []
    assert bytes_away(engine)["moments"] == 2 * masters


def test_only_what_a_key_names_leaves(on_cpu: None) -> None:
    for key, absent in (("param_offload", "moments"), ("optimizer_offload", "masters")):
        engine = make_engine(dtype="bfloat16", fsdp_keys={key: True})
        train(engine, steps=1, micro_batch_size=4)
        away = bytes_away(engine)
        assert away[absent] == 0
        assert away["moments" if absent == "masters" else "masters"] > 0


def test_a_model_that_is_only_read_leaves_whole_and_answers_the_same(on_cpu: None) -> None:
    engine = make_engine(trained=False, fsdp_keys={"param_offload": True})
    parameters = list(engine.module.parameters())
    assert not any(map(memory, parameters))
    plain = make_engine(trained=False).infer_batch(make_batch())["log_probs"]
    for _ in range(2):
        assert torch.equal(engine.infer_batch(make_batch())["log_probs"], plain)
        assert all(map(memory, parameters))
        engine.park()
        assert not any(map(memory, parameters))
    assert sum(weight.numel() for _, weight in engine.named_weights()) == sum(p.numel() for p in parameters)


def test_a_checkpoint_is_written_and_read_while_state_is_away(on_cpu: None, tmp_path: Any) -> None:
    keys = {"param_offload": True, "optimizer_offload": True}
    engine = make_engine(dtype="bfloat16", fsdp_keys=keys)
    train(engine, steps=2, micro_batch_size=4)
    engine.save_checkpoint(tmp_path)
    expected = train(engine, steps=2, micro_batch_size=4)["weights"]
    for fsdp_keys in ({}, keys):
        other = make_engine(dtype="bfloat16", seed=5, fsdp_keys=fsdp_keys)
        other.load_checkpoint(tmp_path)
        weights = train(other, steps=2, micro_batch_size=4)["weights"]
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_on_a_cpu_the_keys_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="burnish.engine"):
        engine = make_engine(
            fsdp_keys={"param_offload": True, "optimizer_offload": True},
            model_keys={"enable_activation_offload": True},
        )
    (message,) = [record.getMessage() for record in caplog.records]
    section = "actor_rollout_ref.actor.fsdp_config"
    assert f"{section}.param_offload=true, {section}.optimizer_offload=true, " in message
    assert "actor_rollout_ref.model.enable_activation_offload=true: no effect on a CPU" in message
    train(engine, steps=1, micro_batch_size=4)
    assert bytes_away(engine) == {"weights": 0, "masters": 0, "moments": 0}


def test_an_update_that_is_skipped_leaves_the_state_away(on_cpu: None) -> None:
    engine = make_engine(dtype="bfloat16", fsdp_keys={"param_offload": True, "optimizer_offload": True})
    rows = make_batch()
    engine.train_batch(rows, policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=4)
    next(iter(engine._layout.local_grads().values())).fill_(float("nan"))
    before = bytes_away(engine)
    assert engine.optimizer_step(1)["skipped_updates"] == 1
    assert bytes_away(engine) == before
