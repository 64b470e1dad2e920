#!/usr/bin/env bash
# GRPO: the mean of a prompt's responses is the baseline, a KL to the model before training in the loss.
source "$(dirname "$0")/common.sh"

burnish train recipe=grpo "${COMMON[@]}" "$@"
