"""Prompts and responses as people read them: dumps to JSON lines, samples on the console, one for a live view."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from burnish.protocol import DataProto
from burnish.utils.console import console


def generations(batch: DataProto, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Each row of a scored batch as text: uid, prompt, response, score, validity, ground truth and the reward's extras."""
    tensors, others = batch.tensors, batch.non_tensor_batch
    num_response = tensors["responses"].shape[1]
    prompt_mask = tensors["attention_mask"][:, :-num_response].bool()
    scores = tensors["token_level_scores"].sum(-1).tolist()
    extras = batch.meta_info.get("reward_extra_keys", [])
    for row in range(len(batch)):
        prompt_ids = tensors["prompts"][row][prompt_mask[row]]
        response_ids = tensors["responses"][row][tensors["response_mask"][row]]
        reward_model = others["reward_model"][row] if "reward_model" in others else None
        yield {
            "uid": others["uid"][row],
            "data_source": others["data_source"][row] if "data_source" in others else None,
            "prompt": tokenizer.decode(prompt_ids, skip_special_tokens=False),
            "response": tokenizer.decode(response_ids, skip_special_tokens=False),
            "score": scores[row],
            "valid": bool(tensors["valid"][row]),
            "ground_truth": reward_model.get("ground_truth") if isinstance(reward_model, dict) else None,
            "extra_info": others["extra_info"][row] if "extra_info" in others else None,
            "finish_reason": others["finish_reason"][row],
            **{key: _plain(others[key][row]) for key in extras},
        }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def dump_generations(batch: DataProto, tokenizer: Any, folder: str, step: int) -> Path:
    """Writes every row to ``folder/<step>.jsonl``, UTF-8 as it is, and returns the path."""
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in generations(batch, tokenizer):
            file.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n")
    return path


def show_generations(batch: DataProto, tokenizer: Any, num_shown: int, step: int) -> None:
    """Prints the first ``num_shown`` rows."""
    for row in generations(batch[: min(num_shown, len(batch))], tokenizer):
        console.print(f"step {step} | score {row['score']:.3f}", style="bold")
        console.print(f"{row['prompt']}{row['response']}")


def sample_of(batch: DataProto, tokenizer: Any) -> dict[str, Any]:
    """One row as text: the first of the batch."""
    return next(generations(batch[:1], tokenizer))
