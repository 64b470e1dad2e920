"""``burnish report``: a run's files as one page that people look at, written once or served while the run goes on.

It only reads: metrics.jsonl, events.jsonl, heartbeat.json, config.yaml and config_origin.json, and the dumps of rollouts. Neither
torch nor a model is loaded.
"""

from burnish.report.html import write_report
from burnish.report.read import RunFolder, open_runs
from burnish.report.serve import HOST, serve_report

__all__ = ["HOST", "RunFolder", "open_runs", "serve_report", "write_report"]
