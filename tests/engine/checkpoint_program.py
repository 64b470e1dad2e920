"""Saves, reads and resumes checkpoints on several ranks (run as `engine_program`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from burnish.engine.checkpoint import tensor_file
from burnish.model.load import build_causal_lm
from burnish.utils.errors import CheckpointError
from tests.engine.engine_program import main, make_engine, tiny_config, train

PROGRAM = Path(__file__)
EVERYTHING = ("model", "optimizer", "extra", "hf_model")
HOW = {"steps": 1, "micro_batch_size": 2}


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """One case by what it does."""
    case = dict(case)
    case.pop("name")
    what = {"save": saved, "load": loaded, "verl": write_verl, "broken": broken}
    return what[case.pop("what")](case, out)


def saved(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains, saves everything in the background, and goes on while it is written."""
    folder = out / case.pop("folder")
    engine = make_engine(**case)
    train(engine, **HOW)
    engine.save_checkpoint(folder, EVERYTHING, blocking=False)
    drawn = torch.rand(3)
    after = train(engine, **HOW)
    assert engine.checkpoint_written(wait=True)
    return {"drawn": drawn, "weights": after["weights"], "updates": after["updates"]}


def loaded(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Resumes in another layout and goes on."""
    folder = Path(case.pop("folder"))
    contents = case.pop("contents", ("model", "optimizer", "extra"))
    engine = make_engine(seed=4, **case)
    engine.load_checkpoint(folder, contents)
    drawn = torch.rand(3)
    after = train(engine, **HOW)
    return {"drawn": drawn, "weights": after["weights"], "updates": after["updates"]}


def broken(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """What each rank says when rank 0 cannot write, and whether the ranks can still work together."""
    engine = make_engine(**case)
    plain = tensor_file.os.pwrite

    def pwrite(*arguments: Any) -> int:
        if dist.get_rank() == 0:
            raise OSError(28, "No space left on device")
        return plain(*arguments)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file.os, "pwrite", pwrite)
        try:
            engine.save_checkpoint(out / "broken", EVERYTHING)
        except CheckpointError as error:
            said = str(error)
    train(engine, **HOW)
    engine.save_checkpoint(out / "mended", EVERYTHING)
    return {"said": said}


def write_verl(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """A folder as verl's FSDP2 workers write it: each rank its parts of the state dicts of model and optimizer."""
    folder = out / case.pop("folder")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = tiny_config(**case.pop("config", {}))
    model = build_causal_lm(config, torch.float32, seed=7, attn=False)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shape, names = ((world,), ("fsdp",)) if not case.pop("replicas", False) else ((2, world // 2), ("ddp", "fsdp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.tensor([[3, 9, 4, 21]])).logits.square().mean().backward()
    optimizer.step()
    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), folder / f"optim_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder / "huggingface")
    moments = {
        name: optimizer.state[parameter]["exp_avg"].full_tensor() for name, parameter in model.named_parameters()
    }
    weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(weights[name], whole[name]) for name in weights)
    dist.barrier()
    return {"weights": weights, "moments": moments}


if __name__ == "__main__":
    main(run_case)
