"""Small engines, batches and losses for the engine's tests, and a program that trains them on several ranks.

Run as ``python engine_program.py RANK WORLD_SIZE STORE_FILE OUT_DIR CASES_JSON``, a process of its own per rank.
"""

import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from burnish.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses import compute_policy_loss_vanilla
from burnish.engine import FSDPEngine
from burnish.model.load import build_causal_lm
from burnish.protocol import DataProto
from burnish.utils.errors import CheckpointError

VOCAB = 48
PROGRAM = Path(__file__)


def tiny_config(**changes: Any) -> LlamaConfig:
    """A tied Llama of two layers."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(settings | changes))


def make_engine(
    *,
    dtype: str = "float32",
    module: str = "policy",
    fsdp_size: int = -1,
    seed: int = 0,
    trained: bool = True,
    gradient_checkpointing: bool | str = False,
    path: str | None = None,
    device: str = "cpu",
    sequence_parallel: int = 1,
    config: LlamaConfig | dict[str, Any] | None = None,
    model_keys: dict[str, Any] | None = None,
    fsdp_keys: dict[str, Any] | None = None,
    share_prompts: bool | None = None,
    **optim: Any,
) -> FSDPEngine:
    """An engine around a random tiny model, or around the one at ``path``."""
    model = None
    if path is None:
        master = torch.float64 if dtype == "float64" else torch.float32
        config = tiny_config(**config) if isinstance(config, dict) else config
        model = build_causal_lm(config or tiny_config(), master, seed=seed)
        if module == "value":
            model = model.model
    return FSDPEngine(
        HFModelConfig(path=path, enable_gradient_checkpointing=gradient_checkpointing, **(model_keys or {})),
        FSDPEngineConfig(
            dtype=dtype,
            fsdp_size=fsdp_size,
            ulysses_sequence_parallel_size=sequence_parallel,
            **(fsdp_keys or {}),
        ),
        FSDPOptimizerConfig(**({"lr": 1e-2, "clip_grad": 0.05} | optim)) if trained else None,
        module=module,  # type: ignore[arg-type]
        device=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else device,
        total_training_steps=10,
        model=model,
        share_prompts=share_prompts,
    )


def make_batch(
    num_rows: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    prompt_width: int = 6,
    response_width: int = 7,
) -> DataProto:
    """Rows of ragged prompts (left-padded) and responses (right-padded) with everything that losses need."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompt_lengths, response_lengths = draw(1, prompt_width + 1, num_rows), draw(1, response_width + 1, num_rows)
    prompt_mask = torch.arange(prompt_width) >= prompt_width - prompt_lengths[:, None]
    response_mask = torch.arange(response_width) < response_lengths[:, None]
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    ids = torch.where(attention_mask, draw(3, VOCAB, num_rows, prompt_width + response_width), 0)

    def normal() -> Tensor:
        values = torch.randn(num_rows, response_width, generator=generator, dtype=torch.float64).to(dtype)
        return torch.where(response_mask, values, 0)

    loss_mask = response_mask.clone()
    if num_rows > 2:
        loss_mask[2] = False
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention_mask,
            "responses": ids[:, prompt_width:],
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "advantages": normal(),
            "old_log_probs": normal() * 0.3 - 3.9,
            "values": normal(),
            "returns": normal(),
        }
    )


def policy_loss(mode: str = "token-mean"):  # type: ignore[no-untyped-def]
    """PPO with an entropy bonus and a KL-like term, in aggregation mode ``mode``."""

    def loss_fn(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.batch is not None
        mask = rows.batch["loss_mask"]
        loss, metrics = compute_policy_loss_vanilla(
            rows.batch["old_log_probs"],
            outputs["log_probs"],
            rows.batch["advantages"],
            mask,
            mode,
            FSDPActorConfig(global_batch_info=info),
        )
        entropy = agg_loss(outputs["entropy"], mask, mode, **info)
        drift = agg_loss((outputs["log_probs"] - rows.batch["old_log_probs"]).square(), mask, mode, **info)
        metrics["tokens"] = mask.sum()
        metrics["length_max"] = mask.sum(1).max()
        return loss - 0.1 * entropy + 0.05 * drift, metrics

    return loss_fn


def value_loss(outputs: dict[str, Tensor], rows: DataProto, info: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the values, in sums over the whole step."""
    assert rows.batch is not None
    error = (outputs["values"] - rows.batch["returns"]).square()
    return agg_loss(error, rows.batch["loss_mask"], "token-mean", **info), {}


def my_share(batch: DataProto, engine: FSDPEngine, uneven: bool = False) -> DataProto:
    """The rows of this rank: halves, or three quarters and one."""
    if engine.dp_size == 1:
        return batch
    if uneven and engine.dp_size == 2:
        cut = len(batch) * 3 // 4
        return batch[:cut] if engine.dp_rank == 0 else batch[cut:]
    return batch.chunk(engine.dp_size)[engine.dp_rank]


def train(
    engine: FSDPEngine, *, steps: int, micro_batch_size: int, uneven: bool = False, mode: str = "token-mean"
) -> dict[str, Any]:
    """Trains ``steps`` steps and returns what must not depend on the number of ranks."""
    dtype = torch.float64 if engine.dtype == torch.float64 else torch.float32
    result: dict[str, Any] = {"metrics": [], "updates": []}
    policy = engine.kind == "policy"
    for step in range(1, steps + 1):
        rows = my_share(make_batch(seed=step, dtype=dtype), engine, uneven)
        metrics = engine.train_batch(
            rows,
            policy_loss(mode) if policy else value_loss,
            temperature=0.7,
            outputs=("log_probs", "entropy") if policy else ("values",),
            micro_batch_size=micro_batch_size,
            global_batch_info=engine.global_batch_info(rows, loss_scale_factor=7.0),
        )
        if step == 1:
            result["gradients"] = engine.full_gradients()
        result["metrics"].append(metrics)
        result["updates"].append(engine.optimizer_step(step))
        engine.park()
    result["weights"] = {name: weight.cpu().clone() for name, weight in engine.named_weights()}
    result["gradients"] = {name: gradient.cpu() for name, gradient in result["gradients"].items()}
    return result


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """One case: make (or load) an engine, train, perhaps save and go on."""
    case = dict(case)
    how = {key: case.pop(key) for key in ("steps", "micro_batch_size", "uneven", "mode") if key in case}
    save, load, name = case.pop("save", None), case.pop("load", None), case.pop("name")
    poison = case.pop("poison", False)
    engine = make_engine(**case)
    result: dict[str, Any] = {}
    if load is not None:
        engine.load_checkpoint(load)
    result = train(engine, **how)
    if save is not None:
        engine.save_checkpoint(out / save)
        result["after_save"] = train(engine, **how)
    result["name"] = name
    outputs = ("values",) if engine.kind == "value" else ("log_probs",)
    inferred = engine.infer_batch(make_batch(), micro_batch_size=3, outputs=outputs)
    result["log_probs"] = {name: value.cpu() for name, value in inferred.items()}
    if poison:
        result["poisoned"] = poisoned(engine, out / "poisoned")
    return result


def poisoned(engine: FSDPEngine, folder: Path) -> dict[str, Any]:
    """What each rank says of a model whose last master holds a NaN on the last rank only, and whether anything is saved."""
    *_, master = engine._layout.masters().values()
    if engine.dp_rank == engine.dp_size - 1:
        master.view(-1)[:1] = float("nan")
    refusal = ""
    try:
        engine.save_checkpoint(folder)
    except CheckpointError as error:
        refusal = str(error)
    return {"names": engine.non_finite_weights(), "refusal": refusal, "saved": folder.exists()}


def run_ranks(out: Path, cases: list[dict[str, Any]], world: int = 2, program: Path = PROGRAM) -> list[dict[str, Any]]:
    """What `main` of ``program`` has left on each rank: the results of the cases."""
    # Forked from one process that has imported what takes seconds to import; CUDA does not survive a fork.
    on_gpu = any(case.get("device") == "cuda" for case in cases)
    context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    if not on_gpu:
        context.set_forkserver_preload([__name__])
    arguments = [str(world), str(out / "store"), str(out), json.dumps(cases)]
    logs = [out / f"rank{rank}.log" for rank in range(world)]
    processes = [
        context.Process(
            target=_run_rank, args=(str(program), [str(rank), *arguments], logs[rank], dict(os.environ)), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    outputs = [log.read_text() if log.exists() else "" for log in logs]
    assert codes == [0] * world, "\n".join(outputs)
    assert not any("FSDP2-wrapped" in output for output in outputs), "\n".join(outputs)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


def _run_rank(program: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """``program`` in this process, which has been started for it; what it prints goes to ``log``."""
    os.environ.clear()
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def main(run_case: Callable[[dict[str, Any], Path], dict[str, Any]] = run_case) -> None:
    """Runs the cases on this rank; every rank writes its results."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    out = Path(sys.argv[4])
    torch.set_num_threads(1)
    cases = json.loads(sys.argv[5])
    backend = "gloo"
    if any(case.get("device") == "cuda" for case in cases):
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
    results = {case["name"]: run_case(case, out) for case in cases}
    torch.save(results, out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
