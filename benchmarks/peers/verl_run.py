"""verl as a peer: the command line of a run on one GPU, its data, and the figures that it logs. Its trainer has no CPU path."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.work import words

Row = dict[str, Any]
TRAINERS = {"v1": True, "v0": False}
"""verl's default trainer and its older one (``trainer.use_v1``)."""


def run_settings(
    folder: Path, *, model: str, tokenizer: str | None, micro_batch_rows: int, engine_memory: float
) -> Row:
    """Configuration of any run here: one GPU, vLLM, its own defaults wherever nothing else is compared.

    Without flash-attn, which has no wheel on PyPI: attention is torch's, and batches are padded, since packed ones would take a
    mask of all tokens of a micro-batch by all. Log-probabilities come from verl's fused head in its default implementation,
    torch's (Triton's takes no padded batches): the plain one loops over single tokens where flash-attn's cross-entropy is
    not installed.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "data.train_files": [str(folder / "train.parquet")],
        "data.val_files": [str(folder / "val.parquet")],
        "actor_rollout_ref.model.path": model,
        **({} if tokenizer is None else {"actor_rollout_ref.model.tokenizer_path": tokenizer}),
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.use_fused_kernels": True,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.ppo_micro_batch_size_per_gpu": micro_batch_rows,
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": engine_memory,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro_batch_rows,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro_batch_rows,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": ["file"],
        "trainer.project_name": "beside",
        "trainer.experiment_name": "verl",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        # A cluster of its own, whatever runs here already. Its workers claim more of Ray's cores than a small machine has, and
        # would wait for them for ever.
        "+ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.num_cpus": 64,
    }


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Rows as verl reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Arrow has no struct without fields.
    pq.write_table(
        pa.Table.from_pylist([{**row, "extra_info": row.get("extra_info") or {"index": 0}} for row in rows]), path
    )


def start(settings: Row, folder: Path, *, log: Path | None = None) -> subprocess.Popen:
    """Starts its trainer in ``folder``; `read_steps` has its figures as they come.

    Args:
        log: where it prints to; else where this process does.

    Raises:
        RuntimeError: it could not come to its first step here.
    """
    check_environment()
    out = None if log is None else log.open("w")
    environment = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words(settings), f"hydra.run.dir={folder / 'hydra'}"]
    return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT if out else None)


def check_environment() -> None:
    """Before the minutes that it takes to start.

    Raises:
        RuntimeError: there is a TRL that it cannot use.
    """
    try:
        import trl
    except ImportError:
        return
    if not hasattr(trl, "AutoModelForCausalLMWithValueHead"):
        raise RuntimeError(
            f"TRL {trl.__version__} is installed beside verl, which wants AutoModelForCausalLMWithValueHead of any TRL that it "
            f"finds, and this one has none. Name an environment without TRL in BURNISH_PEER_PYTHON."
        )


def read_steps(folder: Path) -> list[Row]:
    """The metrics of the steps that are finished; a line that is being written is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            break
        if "timing_s/step" in found["data"]:
            steps.append({"step": found["step"], **found["data"]})
    return steps


def step_figures(metrics: Row, num_rows: int) -> Row:
    """One step in the words of the other peers: ``step``, ``seconds`` by stage, ``mean_score``, ``tokens``, ``prompt_tokens``.

    The seconds of a step are those of the whole less those of a save.
    """
    seconds = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    whole = seconds["step"] - seconds.get("save_checkpoint", 0.0)
    stages = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
    return {
        "step": metrics["step"],
        "mean_score": metrics["critic/score/mean"],
        "tokens": round(metrics["response_length/mean"] * num_rows),
        "prompt_tokens": round(metrics["prompt_length/mean"] * num_rows),
        "grad_norm": metrics.get("actor/grad_norm"),
        "seconds": {"step": whole, **{name: seconds[name] for name in stages if name in seconds}},
    }


def package_versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    from importlib.metadata import version

    return {name: version(name) for name in ("verl", "vllm", "torch", "transformers", "ray")}
