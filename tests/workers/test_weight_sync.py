"""What the rollout holds after an update is what was trained, adapters and all, or there is an error that names the tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.model import lora
from burnish.protocol import DataProto
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.stats import RolloutStats
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import fingerprint
from burnish.workers.weight_sync import WeightSync
from tests.workers.test_actor import prompts, worker_of

LORA = ("model.lora_rank=3", "model.target_modules=[q_proj,down_proj]", "actor.optim.lr=0.01")


class FakeEngine:
    """A rollout of somebody's own: a map from names to tensors, dummy until it is told."""

    shares_storage = False

    def __init__(self, needs_base: bool | None = None) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.received: list[list[str]] = []
        if needs_base is not None:
            self.needs_base = needs_base

    def update_weights(self, stream: Any, version: int) -> None:
        self.received.append([])
        for name, tensor in stream:
            self.received[-1].append(name)
            self.held[name] = tensor.clone()

    def weights_checksum(self) -> dict[str, int]:
        return {name: int(fingerprint(tensor)) for name, tensor in self.held.items()}


def sync_of(worker: Any, rollout: Any) -> WeightSync:
    return WeightSync(worker.engine, rollout, worker.config.rollout)


def one_update(worker: Any, seed: int = 0) -> None:
    """One optimizer step that moves the weights."""
    batch = worker.generate_sequences(prompts())
    generator = torch.Generator().manual_seed(seed)
    shape = batch.tensors["responses"].shape
    batch.tensors["advantages"] = torch.randn(shape, generator=generator)
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
    batch.tensors["loss_mask"] = batch.tensors["response_mask"]
    batch.tensors["mini_batch_id"] = torch.zeros(len(batch), dtype=torch.long)
    info = worker.engine.global_batch_info(batch)
    batch.meta_info |= {"mini_batches": [info], "global_steps": 1, "max_response_length": 6}
    worker.update_actor(batch)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    from burnish.model.attention import plain_attention

    with torch.no_grad(), plain_attention(model):
        return model(ids, use_cache=False).logits


def test_an_engine_of_ones_own_gets_the_base_first_and_the_adapters_after_every_update(tiny_model_path: str) -> None:
    worker, fake = worker_of(tiny_model_path, *LORA), FakeEngine()
    sync = sync_of(worker, fake)
    sync.push(0)
    one_update(worker)
    sync.push(1)
    names = fake.received[1]
    adapters = [name for name in names if lora.is_adapter_name(name)]
    assert adapters
    assert names[-len(adapters) :] == adapters
    # What it holds is the trained model: base and adapter, once.
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    state = plain.state_dict()
    for name, tensor in fake.held.items():
        if not lora.is_adapter_name(name):
            assert torch.equal(tensor, state[name])
    scale = worker.config.model.lora_alpha / worker.config.model.lora_rank
    with torch.no_grad():
        for name in adapters:
            if name.endswith("lora_A.weight"):
                stem = name.removesuffix(".lora_A.weight")
                delta = scale * fake.held[f"{stem}.lora_B.weight"] @ fake.held[name]
                assert float(delta.abs().max()) > 0
                plain.get_parameter(f"{stem}.weight").add_(delta)
        ids = torch.tensor([[5, 6, 7, 8]])
        theirs = plain(ids).logits
    torch.testing.assert_close(logits(worker.engine.module.model, ids), theirs, atol=1e-4, rtol=1e-4)


def test_the_frozen_base_is_sent_again_only_to_who_needs_it(tiny_model_path: str) -> None:
    worker, fake = worker_of(tiny_model_path, *LORA), FakeEngine(needs_base=True)
    sync = sync_of(worker, fake)
    whole = sync.push(0).weight_copy_bytes
    checksums = [sync.checksum]
    fake.needs_base = False
    one_update(worker)
    adapters = sync.push(1).weight_copy_bytes
    checksums.append(sync.checksum)
    assert 0 < adapters < whole / 5
    assert all(lora.is_adapter_name(name) for name in fake.received[1])
    # It went to sleep and forgot everything.
    fake.held, fake.needs_base = {}, True
    sync.push(2)
    checksums.append(sync.checksum)
    assert fake.received[2] == fake.received[0]
    assert checksums[0] != checksums[1] == checksums[2]
    # Who does not say gets everything every time.
    silent = FakeEngine()
    sync = sync_of(worker, silent)
    sync.push(0)
    sync.push(1)
    assert silent.received[0] == silent.received[1] == fake.received[0]


def test_whatever_arrives_otherwise_than_it_was_sent_is_named(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, *LORA)

    class Broken(FakeEngine):
        def __init__(self, spoil: Any) -> None:
            super().__init__()
            self.spoil = spoil

        def update_weights(self, stream: Any, version: int) -> None:
            super().update_weights(stream, version)
            self.spoil(self)

    def flip(engine: FakeEngine) -> None:
        engine.held["model.norm.weight"].view(torch.int32)[3] ^= 1

    def swap(engine: FakeEngine) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        engine.held[name] = engine.held[name].flip(0)

    def forget(engine: FakeEngine) -> None:
        engine.held = {name: tensor for name, tensor in engine.held.items() if not lora.is_adapter_name(name)}

    def lose(engine: FakeEngine) -> None:
        del engine.held["model.layers.1.mlp.down_proj.weight"]

    def invent(engine: FakeEngine) -> None:
        engine.held["model.extra.weight"] = torch.ones(2)

    for spoil, says in (
        (flip, "'model.norm.weight' holds other values"),
        (swap, "'model.layers.1.mlp.down_proj.weight' holds other values"),
        (lose, "'model.layers.1.mlp.down_proj.weight' of policy 4 and holds nothing of that name"),
        (forget, "holds none of that name"),
        (invent, "'model.extra.weight', which policy 4 does not have"),
    ):
        with pytest.raises(RolloutError, match=says):
            sync_of(worker, Broken(spoil)).push(4)


def test_an_engine_that_does_not_read_the_stream_to_its_end_is_found_out(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, *LORA)

    class Lazy(FakeEngine):
        def update_weights(self, stream: Any, version: int) -> None:
            for _ in zip(range(4), stream, strict=False):
                pass

    class Deaf(FakeEngine):
        def update_weights(self, stream: Any, version: int) -> None:
            pass

    for rollout in (Lazy(), Deaf()):
        with pytest.raises(RolloutError, match="must read all of it"):
            sync_of(worker, rollout).push(1)


def test_a_copy_in_another_dtype_is_checked_in_that_dtype(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(tiny_model_path, "rollout.dtype=bfloat16", *LORA)
    worker.take_rollout_stats()
    first = worker.weight_sync.checksum
    one_update(worker)
    worker.update_weights(1)
    stats = worker.take_rollout_stats()
    assert 0 < stats.weight_copy_bytes < 1_000_000
    assert stats.weight_check_seconds > 0
    assert worker.weight_sync.checksum not in (None, first)
    wrong = NativeRollout.weights_checksum

    def one_off(rollout: NativeRollout) -> dict[str, int]:
        return wrong(rollout) | {"model.embed_tokens.weight": 1}

    monkeypatch.setattr(NativeRollout, "weights_checksum", one_off)
    with pytest.raises(RolloutError, match="'model.embed_tokens.weight' holds other values"):
        worker.update_weights(2)


def test_on_shared_storage_there_is_nothing_to_copy_and_nothing_to_sum(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, *LORA)
    assert worker.rollout.shares_storage
    assert worker.weight_sync.push(1) == RolloutStats()
    assert worker.weight_sync.checksum is None


def test_the_reference_is_the_actor_without_its_adapters(tiny_model_path: str, tmp_path: Path) -> None:
    worker = worker_of(tiny_model_path, *LORA, role="actor_rollout_ref")
    plain = worker_of(tiny_model_path, role="actor_rollout_ref")
    assert worker.reference is None
    assert plain.reference is not None
    for step in range(2):
        one_update(worker, seed=step)
    batch = worker.generate_sequences(prompts())
    ours, theirs = worker.compute_ref_log_prob(batch), plain.compute_ref_log_prob(batch)
    torch.testing.assert_close(ours.tensors["ref_log_prob"], theirs.tensors["ref_log_prob"], atol=2e-5, rtol=0)
    own = worker.compute_log_prob(batch).tensors["old_log_probs"]
    assert float((own - ours.tensors["ref_log_prob"]).abs().max()) > 1e-3
    torch.testing.assert_close(own, batch.tensors["rollout_log_probs"], atol=1e-4, rtol=0)
    worker.save_checkpoint(str(tmp_path / "actor"))
    resumed = worker_of(tiny_model_path, *LORA)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    assert torch.equal(resumed.compute_log_prob(batch).tensors["old_log_probs"], own)


@pytest.mark.parametrize("copy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_a_rate_of_zero_the_gap_to_the_rollout_stays_what_it_is(tiny_model_path: str, copy: bool) -> None:
    """If it grew although no weight moves, the rollout would be reading something else than the policy."""
    dtype = ["rollout.dtype=bfloat16"] if copy else []
    worker = worker_of(tiny_model_path, *LORA[:2], "actor.optim.lr=0", *dtype)
    gaps, checksums = [], []
    for version in range(6):
        batch: DataProto = worker.generate_sequences(prompts())
        log_probs = worker.compute_log_prob(batch).tensors["old_log_probs"]
        gaps.append(log_probs - batch.tensors["rollout_log_probs"])
        one_update(worker, seed=version)
        worker.update_weights(version + 1)
        checksums.append(worker.weight_sync.checksum)
    assert all(torch.equal(gap, gaps[0]) for gap in gaps)
    assert len(set(checksums)) == 1
