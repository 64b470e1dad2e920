"""``burnish export``: a checkpoint as a folder that transformers and vLLM load (docs/export.md)."""

from __future__ import annotations

import json
from typing import Any

from burnish.trainer.offline.export import ExportOptions, export
from burnish.utils.console import console


def run_export(options: ExportOptions, *, as_json: bool) -> int:
    """Exports and says what was written; 0.

    Raises:
        ConfigError, ModelError, ResourceError: see `burnish.trainer.offline.export.export`.
    """
    facts = export(options)
    if as_json:
        console.print(json.dumps(facts), soft_wrap=True)
    else:
        console.print(_told(facts), soft_wrap=True)
    return 0


def _told(facts: dict[str, Any]) -> str:
    what = {"model": "model", "adapter": "adapter in peft's format", "critic": "critic: backbone and value head"}
    proven = {
        "model": "transformers loads it, with the same weights and the same logits",
        "adapter": "peft loads it onto its base, with the same logits",
        "critic": "transformers loads its backbone, with the same weights and the same hidden states",
    }
    tied = ", head tied to the embedding" if facts["tied_head"] and facts["holds"] == "model" else ""
    step = "" if facts["step"] is None else f" of step {facts['step']}"
    return (
        f"{facts['out']}: {facts['architecture']}{step}, {what[facts['holds']]}, {facts['num_parameters']:,} parameters in "
        f"{facts['dtype']}{tied}, {_size(facts['num_bytes'])} in {len(facts['files'])} files. Checked: "
        f"{proven[facts['holds']]}."
    )


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
