"""Reads and renders every conversation, says what is wrong with each that cannot be used, and shows what is learnt of one."""

import time
from functools import partial

from transformers import PreTrainedTokenizerBase

from burnish.config import SFTTrainerConfig
from burnish.data.prepared_dataset import Split
from burnish.data.sft_check import check_conversations
from burnish.data.sft_dataset import SFTDataset
from burnish.model.load import eos_token_ids
from burnish.render import marked_text
from burnish.trainer.preflight.data import tell_problems
from burnish.trainer.preflight.findings import Findings
from burnish.utils.errors import BurnishError, ModelError

_AREA = "data"
_MOST_LOOKED_AT = 100


def check_sft_rows(
    config: SFTTrainerConfig, tokenizer: PreTrainedTokenizerBase, findings: Findings
) -> dict[str, SFTDataset]:
    """Notes what is to be known of the rows of supervised fine-tuning, which nothing heavy has to run for.

    Datasets of a class of the user's own are not looked at: what is wrong with their rows only they know.

    Returns:
        the datasets by split ("train", "val"), of those that could be made.
    """
    data = config.data
    datasets: dict[str, SFTDataset] = {}
    if data.custom_cls.path is not None:
        return datasets
    splits: tuple[tuple[Split, list[str], int], ...] = (
        ("train", data.train_files, data.train_max_samples),
        ("val", data.val_files, data.val_max_samples),
    )
    for split, files, max_samples in splits:
        key = f"data.{split}_files"
        told = any(item.key == key and item.level == "error" for item in findings.items)
        if not files or told:
            continue
        start = time.perf_counter()
        try:
            dataset = SFTDataset(files, tokenizer, data, max_samples, key=key)
        except BurnishError as error:
            tell_problems(partial(check_conversations, data, tokenizer), split, str(error), findings)
            continue
        datasets[split] = dataset
        _describe(dataset, split, time.perf_counter() - start, findings)
    if "train" in datasets:
        _show_one(datasets["train"], tokenizer, findings)
        _check_stops(config, datasets["train"], tokenizer, findings)
    return datasets


def _describe(dataset: SFTDataset, split: str, seconds: float, findings: Findings) -> None:
    key, lengths = f"data.{split}_files", dataset.lengths
    findings.facts.setdefault("data", {})[split] = {
        "rows": dataset.num_rows,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "learnt_tokens": dataset.num_learnt,
        "longest": max(lengths),
        "seconds": round(seconds, 3),
        "notes": dict(dataset.notes),
    }
    mean, share = dataset.num_tokens / len(dataset), dataset.num_learnt / dataset.num_tokens
    findings.note(
        _AREA,
        f"{key}: {len(dataset):,} sequences of {dataset.num_rows:,} rows, {mean:,.1f} tokens each, at most {max(lengths):,}; "
        f"{dataset.num_learnt:,} of {dataset.num_tokens:,} tokens are learnt ({share:.0%}).",
        key,
    )
    for level, text in dataset.remarks:
        findings.add(level, _AREA, f"{key}: {text}", key)


def _show_one(dataset: SFTDataset, tokenizer: PreTrainedTokenizerBase, findings: Findings) -> None:
    shown = marked_text(dataset[0]["input_ids"], dataset.learnt_spans(0), tokenizer)
    findings.facts["example"] = {"row": dataset.location(0), "text": shown}
    findings.note(_AREA, f"What is learnt of {dataset.location(0)} stands between « and »: {shown}", "data.train_files")


def _check_stops(
    config: SFTTrainerConfig, dataset: SFTDataset, tokenizer: PreTrainedTokenizerBase, findings: Findings
) -> None:
    """A model that learns to end its answers with one token and is stopped at another talks on behind them."""
    if config.model.path is None:
        return
    try:
        stops = set(eos_token_ids(str(config.model.path), tokenizer))
    except (ModelError, OSError):
        return  # Whoever reads the model says what is wrong with it.
    ends = set()
    for position in range(min(len(dataset), _MOST_LOOKED_AT)):
        ends.add(dataset[position]["input_ids"][dataset.learnt_spans(position)[-1][1] - 1])
    # Cut answers end anywhere.
    if not stops or ends & stops or dataset.notes["answers_without_end"]:
        return
    end, shown = min(ends), ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in sorted(ends)[:3])
    known = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in sorted(stops))
    findings.warning(
        "template",
        f"The answers that are learnt end with {shown}, but generation with {config.model.path} stops at {known}: it would go on "
        f"behind its answers. Add {end} to eos_token_id in the generation_config.json of the model's folder, or set "
        f"actor_rollout_ref.rollout.stop_token_ids=[{end}] where it generates.",
        "model.path",
    )
