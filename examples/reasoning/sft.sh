#!/usr/bin/env bash
# A supervised start where the model is hardly ever right: conversations with right answers, of which the answers are learnt.
source "$(dirname "$0")/common.sh"

burnish sft \
    data.train_files="$DATA/sft.jsonl" data.train_batch_size=128 data.max_length=280 \
    model.path="$MODEL" optim.lr=5e-5 optim.lr_warmup_steps=5 optim.lr_scheduler_type=cosine \
    checkpoint.save_contents=[model] \
    trainer.project_name=reasoning trainer.experiment_name="$RECIPE-$TASK" trainer.default_local_dir="$RUN" \
    trainer.seed="$SEED" trainer.total_epochs=3 trainer.save_freq=1000000 \
    "$@"

# A model in a folder of its own, for: MODEL=$RUN/model bash examples/reasoning/grpo.sh
burnish export "$RUN" --out "$RUN/model" --overwrite
