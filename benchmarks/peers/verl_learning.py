"""A whole run of verl's trainer: ``python -m benchmarks.peers.verl_learning WORK FOLDER``, as ``trl_learning`` beside this file.

It runs on one GPU with vLLM; verl 0.9.1 has neither a training engine nor a rollout for a CPU.
"""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.learning.work import LearningWork, merged, read_rows
from benchmarks.peers.verl_run import package_versions, read_steps, run_settings, start, step_figures, write_parquet


def main() -> None:
    """Trains to the end."""
    work, folder = LearningWork(**json.loads(sys.argv[1])), Path(sys.argv[2])
    write_parquet(read_rows(work.train_file), folder / "train.parquet")
    write_parquet(read_rows(work.val_file)[:1], folder / "val.parquet")
    (folder / "facts.json").write_text(json.dumps(package_versions()))
    common = run_settings(
        folder,
        model=work.model,
        tokenizer=None,
        micro_batch_rows=work.micro_batch_rows,
        engine_memory=work.engine_memory,
    )
    module, _, function = work.reward.partition(":")
    spec = find_spec(module)
    assert spec is not None
    reward = {"reward.custom_reward_function.path": spec.origin, "reward.custom_reward_function.name": function}
    saving = {"trainer.save_freq": work.save_every, "actor_rollout_ref.actor.checkpoint.save_contents": ["hf_model"]}
    code = start(common | merged(work, "verl") | reward | saving, folder).wait()
    if code:
        raise SystemExit(code)
    with (folder / "steps.jsonl").open("w") as file:
        for metrics in read_steps(folder):
            file.write(json.dumps(step_figures(metrics, work.num_rows)) + "\n")
    for step in work.measured_steps:
        shutil.move(folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface", folder / f"step_{step}")
    shutil.rmtree(folder / "checkpoints")


if __name__ == "__main__":
    main()
