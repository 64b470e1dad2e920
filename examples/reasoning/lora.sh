#!/usr/bin/env bash
# GRPO of an adapter alone: 2 % of the parameters learn, at twenty times the learning rate.
source "$(dirname "$0")/common.sh"

burnish train recipe=grpo "${COMMON[@]}" \
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64 actor_rollout_ref.actor.optim.lr=2e-4 \
    "$@"
