# What the recipes of this folder share; they source it. From outside, all optional:
#   MODEL   a folder or a name of the hub     TASK   chain_sum, basic_arithmetic, countdown
#   SEED    1, 2, 3, ...                      RUN    the run's folder
#   PROMPTS of a step, 128                    PYTHON the interpreter
# and keys of the configuration as arguments of the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RECIPE=$(basename "$0" .sh)
MODEL=${MODEL:-models/smollm2} TASK=${TASK:-chain_sum} SEED=${SEED:-1} PROMPTS=${PROMPTS:-128}
RUN=${RUN:-runs/reasoning/$RECIPE-$TASK-$SEED}
DATA=${DATA:-examples/reasoning/data/$TASK}
burnish() { "${PYTHON:-python}" -m burnish.cli "$@"; }

[ "$MODEL" != models/smollm2 ] || [ -d "$MODEL" ] || burnish model smollm2 "$MODEL"
[ -f "$DATA/test.jsonl" ] || "${PYTHON:-python}" -m examples.reasoning.data --task "$TASK" --out "$DATA"

# 128 prompts x 8 responses a step and one update of all of them; the held-out prompts every 10 steps, greedily. A step's tokens make
# one micro-batch: on a GPU the launches of so small a model take longer than its arithmetic.
COMMON=(
    data.train_files="$DATA/train.jsonl" data.val_files="$DATA/test.jsonl"
    data.train_batch_size="$PROMPTS" data.max_prompt_length=256 data.max_response_length=24
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.ppo_mini_batch_size="$PROMPTS" actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    actor_rollout_ref.actor.optim.lr=1e-5 actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.rollout.n=8
    reward.custom_reward_function.path=examples/reasoning/reward.py
    trainer.project_name=reasoning trainer.experiment_name="$RECIPE-$TASK" trainer.default_local_dir="$RUN"
    trainer.seed="$SEED" trainer.total_epochs=100 trainer.total_training_steps=150 trainer.test_freq=10
    trainer.save_freq=1000000 actor_rollout_ref.actor.checkpoint.save_contents=[model]
)
