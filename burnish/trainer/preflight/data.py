"""Reads and renders every row, and says what is wrong with each that cannot be used."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.data import RLHFDataset, check_rows, create_rl_dataset
from burnish.data.prepared_dataset import Split
from burnish.data.problems import RowProblem
from burnish.reward.compute_score import unscorable_rows
from burnish.trainer.preflight.findings import Findings
from burnish.utils.errors import BurnishError

_AREA = "data"
_MOST_PROBLEMS = 100
_MOST_TOLD = 10


def load_data(config: PPOTrainerConfig, tokenizer: Any, findings: Findings) -> dict[str, Any]:
    """The datasets by split ("train", "val"), of those that can be made."""
    datasets: dict[str, Any] = {}
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        files = config.data.train_files if split == "train" else config.data.val_files
        told = any(item.key == f"data.{split}_files" and item.level == "error" for item in findings.items)
        if not files or told:
            continue
        start = time.perf_counter()
        try:
            dataset: Any = create_rl_dataset(config.data, tokenizer, split=split)
        except BurnishError as error:
            tell_problems(partial(check_rows, config.data, tokenizer), split, str(error), findings)
            continue
        if dataset is None:
            continue
        datasets[split] = dataset
        lengths = _prompt_lengths(dataset)
        facts = {
            "rows": len(dataset),
            "read": getattr(dataset, "num_rows", len(dataset)),
            "filtered": getattr(dataset, "num_filtered", 0),
            "truncated": getattr(dataset, "num_truncated", 0),
            "empty": getattr(dataset, "num_empty", 0),
            "seconds": round(time.perf_counter() - start, 3),
            "longest_prompt": max(lengths, default=0),
            "mean_prompt": round(sum(lengths) / max(1, len(lengths)), 1),
        }
        findings.facts.setdefault("data", {})[split] = facts
        findings.note(
            _AREA,
            f"data.{split}_files: {facts['rows']:,} rows of {facts['read']:,} (left out as too long: {facts['filtered']:,}, "
            f"cut: {facts['truncated']:,}); prompts of {facts['mean_prompt']:g} tokens, at most {facts['longest_prompt']:,}.",
            f"data.{split}_files",
        )
        if isinstance(dataset, RLHFDataset):
            for remark in dataset.remarks:
                findings.warning(_AREA, f"data.{split}_files: {remark}", f"data.{split}_files")
    train = datasets.get("train")
    if train is not None and len(train) < config.data.train_batch_size:
        findings.error(
            _AREA,
            f"data.train_batch_size={config.data.train_batch_size}: the training data has {len(train)} rows, which fill no "
            f"batch. Lower it.",
        )
    return datasets


def tell_problems(check: Callable[..., list[RowProblem]], split: Split, first: str, findings: Findings) -> None:
    """Every row that cannot be used, where one has ended the reading; some of them as sentences.

    Args:
        check: `check_rows` or `check_conversations`, without the split.
        first: what has ended the reading.
    """
    key = f"data.{split}_files"
    try:
        problems = check(split=split, max_problems=_MOST_PROBLEMS)
    except BurnishError:
        problems = []
    findings.facts.setdefault("data_problems", {})[split] = [asdict(problem) for problem in problems]
    for problem in problems[:_MOST_TOLD]:
        findings.error(_AREA, problem.message, key)
    if not problems:
        findings.error(_AREA, first, key)
    if len(problems) > _MOST_TOLD:
        most = f"{_MOST_PROBLEMS} or more" if len(problems) == _MOST_PROBLEMS else f"{len(problems)}"
        findings.error(_AREA, f"{key}: {most} problems in all; --json has them.", key)


def check_sources(datasets: dict[str, Any], manager: Any, findings: Findings) -> None:
    """Every row has a reward function that can read its ground truth. What is wrong with many rows alike is told once."""
    for split, dataset in datasets.items():
        alike: dict[str, list[str]] = {}
        for _, error in unscorable_rows(dataset, manager):
            alike.setdefault(str(error.__cause__), []).append(str(error))
        if not alike:
            continue
        findings.facts.setdefault("reward_problems", {})[split] = [
            {"message": messages[0], "rows": len(messages)} for messages in alike.values()
        ]
        for messages in list(alike.values())[:_MOST_TOLD]:
            others = f" {len(messages) - 1:,} other rows have the same." if len(messages) > 1 else ""
            findings.error(_AREA, messages[0] + others, "data.reward_fn_key")
        if len(alike) > _MOST_TOLD:
            text = (
                f"data.{split}_files: {len(alike)} different problems of rows that cannot be scored; --json has them."
            )
            findings.error(_AREA, text, "data.reward_fn_key")


def _prompt_lengths(dataset: Any) -> list[int]:
    """Of at most some thousand rows, spread over the dataset."""
    step = max(1, len(dataset) // 4096)
    lengths = []
    for position in range(0, len(dataset), step):
        row = dataset[position]
        ids = row.get("input_ids") if isinstance(row, dict) else None
        if ids is None:
            return []
        lengths.append(len(ids))
    return lengths
