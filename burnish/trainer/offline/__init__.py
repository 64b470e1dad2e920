"""Finished models outside a run: found in checkpoints (`source`), loaded (`models`), exported (`export`), sampled from
(`generate`) and measured (`evaluate`)."""
