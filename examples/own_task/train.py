import os

from reward import compute_score

import burnish

rows = [
    {"prompt": f"{a}+{b}=", "ground_truth": a + b} for a in range(15, 95) for b in (17, 28, 39) if a % 10 + b % 10 > 9
]

run = burnish.train(
    model=os.environ["MODEL"],
    dataset=rows,
    reward_fn=compute_score,
    algorithm={"adv_estimator": "grpo"},
    data={"train_batch_size": 32, "max_prompt_length": 64, "max_response_length": 16},
    actor_rollout_ref={
        "rollout": {"n": 8},
        "actor": {"ppo_mini_batch_size": 32, "optim": {"lr": float(os.environ["LR"])}},
    },
    trainer={"total_training_steps": 5, "default_local_dir": "runs/python"},
    callbacks=[lambda report: print(report.step, round(report.metrics["critic/score/mean"], 2))],
)
print(len(run.curve("actor/entropy")), "steps, files in", run.run_dir)
