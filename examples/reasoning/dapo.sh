#!/usr/bin/env bash
# DAPO: two updates a step with a wider upper clip, only groups with right and wrong responses, long ones punished, no KL.
source "$(dirname "$0")/common.sh"

# At first one group in seven has right and wrong responses, so a step samples seven batches: a step takes four times as long as one
# of grpo.sh, and half as many are taken.
burnish train recipe=dapo "${COMMON[@]}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((PROMPTS / 2)) \
    reward.reward_kwargs.overlong_buffer_cfg.len=5 \
    algorithm.filter_groups.max_num_gen_batches=20 trainer.total_training_steps=80 \
    "$@"
