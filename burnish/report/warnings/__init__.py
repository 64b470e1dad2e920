"""What looks wrong in a run: seen in its metrics and dumps, explained, with what to try."""

from burnish.report.warnings import policy, run, sft, trouble
from burnish.report.warnings.base import Evidence, Warning, find_warnings, rule

__all__ = ["Evidence", "Warning", "find_warnings", "policy", "rule", "run", "sft", "trouble"]
