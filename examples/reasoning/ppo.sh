#!/usr/bin/env bash
# PPO: a critic, which begins as the policy with a new head, says what to expect; two updates of both a step.
source "$(dirname "$0")/common.sh"

burnish train recipe=ppo "${COMMON[@]}" \
    data.train_batch_size=$((PROMPTS * 4)) actor_rollout_ref.rollout.n=1 actor_rollout_ref.actor.ppo_mini_batch_size=$((PROMPTS * 2)) \
    critic.optim.lr=2e-5 critic.optim.lr_warmup_steps=5 trainer.critic_warmup=5 \
    "$@"
