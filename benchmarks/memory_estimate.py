"""Memory of each stage: what `burnish check` estimates from a model's configuration, and what a run really takes.

    python -m benchmarks.memory_estimate --json                      # a GPU: three configurations, some steps of each
    python -m benchmarks.memory_estimate --only grpo-0.5b            # one of them
    python -m benchmarks.memory_estimate --estimate-only             # any machine: the estimates for a GPU of 79.1 GiB

Measured is the most that PyTorch has allocated during a stage (``torch.cuda.max_memory_allocated``), the largest of all steps
but the first, in burnish's own trainer with the local controller; weights are random, responses have their full length. Each
configuration runs in a process of its own. With ``--json`` the last line is one object.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402

from benchmarks.grpo_work import GRPOWork, measured_run, prompt_texts, score  # noqa: E402
from benchmarks.models import model_path, word_tokenizer_path  # noqa: E402
from burnish.config import batch_plan, load_config  # noqa: E402
from burnish.config.trainer import PPOTrainerConfig  # noqa: E402
from burnish.trainer.main_ppo import Parts, TaskRunner, run_ppo  # noqa: E402
from burnish.trainer.preflight.memory import GIB, MemoryReport, estimate_memory  # noqa: E402
from burnish.workers import ActorRolloutRefWorker, CriticWorker  # noqa: E402

VOCAB = 151936
# name -> (model, work, overrides)
CONFIGURATIONS: dict[str, tuple[str, GRPOWork, dict[str, Any]]] = {
    "grpo-0.5b": (
        "qwen2.5-0.5b",
        GRPOWork(prompts=32, samples=8, prompt_length=128, response_length=384),
        {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 25600,
        },
    ),
    "ppo-0.5b": (
        "qwen2.5-0.5b",
        GRPOWork(prompts=64, samples=1, prompt_length=256, response_length=256),
        {
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
            "critic.ppo_max_token_len_per_gpu": 16384,
        },
    ),
    "grpo-1.5b": (
        "qwen2.5-1.5b",
        GRPOWork(prompts=16, samples=8, prompt_length=128, response_length=384),
        {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 12800,
        },
    ),
    "grpo-0.5b-lora": (
        "qwen2.5-0.5b",
        GRPOWork(prompts=32, samples=8, prompt_length=128, response_length=384),
        {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.lora_rank": 32,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 25600,
        },
    ),
}
STAGES = {
    "generate_sequences": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "update_actor": "update_actor",
    "compute_values": "values",
    "update_critic": "update_critic",
}
_peaks: dict[str, list[float]] = {}


def measured(cls: type) -> type:
    """A subclass of a worker that notes what each stage allocates at most."""

    def measure(method: Any, stage: str) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            result = method(*args, **kwargs)
            torch.cuda.synchronize()
            _peaks.setdefault(stage, []).append(torch.cuda.max_memory_allocated())
            return result

        return call

    methods = {name: measure(getattr(cls, name), stage) for name, stage in STAGES.items() if hasattr(cls, name)}
    return type(f"Measured{cls.__name__}", (cls,), methods)


class _Runner(TaskRunner):
    """Swaps in the workers that measure."""

    def add_actor_rollout_worker(self, config: Any) -> None:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping = {role: measured(ActorRolloutRefWorker) for role in self.role_worker_mapping}

    def add_critic_worker(self, config: Any) -> None:
        super().add_critic_worker(config)
        for role, worker in self.role_worker_mapping.items():
            if issubclass(worker, CriticWorker):
                self.role_worker_mapping[role] = measured(worker)


def configuration(name: str, folder: str, device: str, steps: int) -> tuple[PPOTrainerConfig, GRPOWork]:
    """The run's configuration and its work."""
    model, work, overrides = CONFIGURATIONS[name]
    settings = {
        "actor_rollout_ref.model.path": model_path(model),
        "actor_rollout_ref.model.tokenizer_path": word_tokenizer_path(VOCAB),
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
        "trainer.controller": "local",
        **measured_run(
            prompts=work.prompts,
            prompt_length=work.prompt_length,
            response_length=work.response_length,
            steps=steps,
            device=device,
            folder=folder,
        ),
    }
    return load_config([settings, overrides], train_rows_given=True), work


def estimate(config: PPOTrainerConfig, total_bytes: int) -> MemoryReport:
    """What `burnish check` says of one GPU."""
    return estimate_memory(config, batch_plan(config, 1), device="cuda", total_bytes=total_bytes)[0]


def run_one(name: str, steps: int, estimate_only: bool) -> dict[str, Any]:
    """One configuration in this process."""
    on_gpu = torch.cuda.is_available() and not estimate_only
    total = torch.cuda.mem_get_info()[1] if on_gpu else int(79.1 * GIB)
    result: dict[str, Any] = {"name": name, "stages": {}}
    with tempfile.TemporaryDirectory() as folder:
        config, work = configuration(name, folder, "cuda" if on_gpu else "cpu", steps)
        report = estimate(config, total)
        if on_gpu:
            torch.cuda.init()
            texts = prompt_texts(work, VOCAB, steps * work.prompts)
            rows = [{"prompt": text, "data_source": "numbers"} for text in texts]
            parts = Parts(train_rows=rows, reward_fn=lambda solution_str, **_: score(solution_str))
            run_ppo(config, _Runner, parts=parts, quiet=True)
            free, all_of_it = torch.cuda.mem_get_info()
            result["beside_gib"] = (all_of_it - free - torch.cuda.memory_reserved()) / GIB
            result["estimated_beside_gib"] = report.beside_bytes / GIB
    for stage in report.stages:
        seen = _peaks.get(stage.name, [])
        # From the second step on gradients and moments are there.
        peak = max(seen[1:] or seen) / GIB if seen else None
        result["stages"][stage.name] = {
            "estimate_gib": stage.bytes / GIB,
            "measured_gib": peak,
            "ratio": None if peak is None else stage.bytes / GIB / peak,
            "held": {key: round(value / GIB, 3) for key, value in stage.held.items()},
            "taken": {key: round(value / GIB, 3) for key, value in stage.taken.items()},
            "note": stage.note,
        }
    if result["stages"] and _peaks:
        peaks = [(one["estimate_gib"], one["measured_gib"]) for one in result["stages"].values() if one["measured_gib"]]
        estimated, highest = max(one for one, _ in peaks), max(one for _, one in peaks)
        result |= {"estimate_gib": estimated, "measured_gib": highest, "ratio": estimated / highest}
    return result


def table(result: dict[str, Any]) -> str:
    """One configuration, for people."""
    lines = [f"{result['name']:<24} estimate   measured   ratio"]
    for stage, one in result["stages"].items():
        known = "" if one["measured_gib"] is None else f"{one['measured_gib']:8.2f}   {one['ratio']:5.2f}"
        lines.append(f"  {stage:<22} {one['estimate_gib']:8.2f}   {known}   {one['note']}")
        lines.append(f"      held {one['held']}, taken {one['taken']}")
    if "ratio" in result:
        lines.append(
            f"  {'the step':<22} {result['estimate_gib']:8.2f}   {result['measured_gib']:8.2f}   {result['ratio']:5.2f}"
        )
        lines.append(f"  beside PyTorch         {result['estimated_beside_gib']:8.2f}   {result['beside_gib']:8.2f}")
    return "\n".join(lines)


def main() -> None:
    """Runs each configuration in a process of its own, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=list(CONFIGURATIONS), nargs="+", help="these (default: all that can run here)"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--estimate-only", action="store_true", help="run nothing")
    parser.add_argument("--here", metavar="NAME", choices=list(CONFIGURATIONS), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(run_one(args.here, args.steps, args.estimate_only)))
        return
    results = []
    for name in args.only or list(CONFIGURATIONS):
        command = [sys.executable, "-m", "benchmarks.memory_estimate", "--here", name, "--steps", str(args.steps)]
        command += ["--estimate-only"] if args.estimate_only else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name} failed with status {done.returncode}; see above.", flush=True)
            continue
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(table(results[-1]), flush=True)
    if args.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        print(json.dumps({"device": device, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
