"""Trains small engines whose state is kept in different places, on several ranks; see `tests.engine.engine_program`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from burnish.engine import FSDPEngine, building, fsdp, loading, memory, offload, state_bytes
from burnish.engine.building import ModuleBuilder
from burnish.utils.errors import BurnishError
from tests.engine.engine_program import main, make_batch, make_engine, my_share, policy_loss, train

PROGRAM = Path(__file__)


def run_memory_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """One case: what an engine computes, and what it did on the way."""
    case = dict(case)
    case.pop("name")
    what = case.pop("what", "train")
    with pytest.MonkeyPatch.context() as patch:
        if case.pop("offload_on_cpu", False):
            patch.setattr(offload, "_DEVICES", {"cpu", "cuda"})
            patch.setattr(offload, "_LEAST_BYTES", 0)
        if (unit_parameters := case.pop("unit_parameters", None)) is not None:
            patch.setattr(state_bytes, "_UNIT_PARAMETERS", unit_parameters)
        cases = {
            "train": trained,
            "sync": reductions,
            "prefetch": gathers,
            "load": loaded,
            "fail": failed,
            "plan": planned,
            "defer": deferred,
        }
        return cases[what](case, out)


def trained(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Two steps, a pass without gradient, a checkpoint, one more step, and the log-probs afterwards."""
    how = {key: case.pop(key) for key in ("micro_batch_size", "uneven") if key in case}
    engine = make_engine(**case)
    result = train(engine, steps=2, **how)
    engine.park()  # Reading the weights has brought them.
    result["away"] = bytes_away(engine)
    outputs = ("values",) if engine.kind == "value" else ("log_probs",)
    engine.infer_batch(make_batch(), micro_batch_size=3, outputs=outputs)
    result["whole"] = [name for name, weight in engine.module.named_parameters() if not isinstance(weight, DTensor)]
    folder = out / f"saved by {dist.get_world_size() if dist.is_initialized() else 1}"
    engine.save_checkpoint(folder)
    result["later"] = train(engine, steps=1, **how)["weights"]
    engine.load_checkpoint(folder)
    again = train(engine, steps=1, **how)["weights"]
    result["resumed_alike"] = all(torch.equal(again[name], weight) for name, weight in result["later"].items())
    result["log_probs"] = engine.infer_batch(make_batch(), micro_batch_size=3, outputs=outputs)
    return result


def bytes_away(engine: FSDPEngine) -> dict[str, int]:
    """Bytes of the weights, masters and moments whose memory the device does not hold."""
    optimizer = engine._optimizer
    assert optimizer is not None
    layout = engine._layout
    groups = {
        "weights": [p.to_local() if hasattr(p, "to_local") else p for p in engine.module.parameters()],
        "masters": list(layout.step_masters().values()),
        "moments": [t for name in layout.masters() for t in optimizer.state_tensors(name) if t.ndim],
    }
    return {
        name: sum(t.nbytes for t in tensors if t.untyped_storage().nbytes() == 0) for name, tensors in groups.items()
    }


def reductions(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """How many reduce-scatters an update of three micro-batches takes."""
    engine = make_engine(**case)
    counted = 0
    plain = FSDPParamGroup.post_backward

    def post_backward(group: Any, *unused: Any) -> None:
        nonlocal counted
        counted += bool(group.reduce_grads)
        plain(group, *unused)

    rows = my_share(make_batch(num_rows=6), engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "post_backward", post_backward)
        engine.train_batch(rows, policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=1)
    return {"reductions": counted, "gradients": engine.full_gradients()}


def gathers(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Blocks whose weights were asked for before their turn in a forward."""
    engine = make_engine(**case)
    rows = my_share(make_batch(), engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        log_probs = engine.infer_batch(rows)["log_probs"]
    early = [event.name for event in profile.events() if event.name.startswith("FSDP::forward_prefetch")]
    return {"early": sorted(early), "log_probs": log_probs}


def planned(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """The plan of an update that fits without recomputing blocks on the rank with the smallest shards, and just not on others."""
    engine = make_engine(**case)
    rows, planner = make_batch(), engine._planner
    assert planner is not None
    num_blocks = planner.activations.num_blocks
    tokens = -(-max(fsdp.Rows(rows, None).lengths) // engine.sp_size)
    fixed: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(fixed, engine._fixed_bytes(tokens))
    free = min(fixed) + memory.activation_bytes(planner._cost, num_blocks, 0, num_blocks, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "free_memory", lambda *_: free)
        engine.train_batch(rows, policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=1)
    plan = engine.memory_plan
    assert plan is not None
    return {"fixed": fixed, "tokens": (tokens, plan.num_tokens), "recomputed": plan.num_recomputed}


def deferred(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Whether ranks defer their gradients by themselves; case: "memory", the bytes of each rank's device."""
    of_ranks = case.pop("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "total_memory", lambda *_: of_ranks[dist.get_rank()])
        engine = make_engine(**case)
    return {"defers": engine._layout._defers_sync}  # type: ignore[union-attr]


def loaded(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Weights and buffers of an engine made from a folder, and which ranks read that folder."""
    read = False
    plain = ModuleBuilder.build

    def build(builder: ModuleBuilder, path: str | None, model: Any = None) -> Any:
        nonlocal read
        read = True
        return plain(builder, path, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleBuilder, "build", build)
        if case.pop("no_skeleton", False):
            patch.setattr(loading, "_skeleton", lambda *_: None)
        engine = make_engine(**case)
    model = engine.module.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return {
        "read": read,
        "weights": {name: weight.clone() for name, weight in engine.named_weights()},
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "tied": head is not None and head.weight is embedding.weight,
        "eos": model.generation_config.eos_token_id if head is not None else None,
        "training": model.training,
        "log_probs": engine.infer_batch(
            make_batch(), outputs=("values",) if engine.kind == "value" else ("log_probs",)
        ),
    }


def failed(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """What each rank raises where rank 0 cannot load."""
    try:
        make_engine(**case)
    except BurnishError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "", "text": ""}


if __name__ == "__main__":
    main(run_memory_case)
