"""Reward managers, one a file; `burnish.reward.manager` is their door."""
