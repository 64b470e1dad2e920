"""What can be known of a run before anything is started: `burnish check`, and the cheap part of it at each start."""

from burnish.trainer.preflight.findings import Finding, Findings
from burnish.trainer.preflight.memory_check import check_memory
from burnish.trainer.preflight.reward import probe_reward
from burnish.trainer.preflight.template import check_tokenizer

__all__ = ["Finding", "Findings", "check_memory", "check_tokenizer", "probe_reward"]
