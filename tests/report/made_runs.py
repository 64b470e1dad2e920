"""Runs that were never trained: folders with the files that a run leaves, for tests and the report's benchmark."""

import copy
import json
import math
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from burnish.config import PPOTrainerConfig, load_config, to_shown_yaml, write_origins

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "examples" / "tiny_model"
_TEXT = "so the sum of both is then we add carry one and get which gives after that let me check again yes no wait"


def made_run(
    folder: Path,
    *,
    num_steps: int = 12,
    num_prompts: int = 4,
    num_samples: int = 4,
    num_tokens: int = 40,
    num_metrics: int = 60,
    tokens: bool = True,
    validation: bool = True,
    overrides: tuple[str, ...] = (),
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A run of some steps that learned a little.

    Args:
        num_prompts, num_samples: of a step; prompts come again every third step.
        num_tokens: of a response, about.
        num_metrics: beside those that the report knows.
        tokens: with ``<step>.tokens.parquet``.
        changes: metric -> function of the step that gives its value, or None to leave it out.
    """
    folder.mkdir(parents=True)
    _write_config(folder, overrides)
    draws = random.Random(seed)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            row = _metrics(step, num_steps, num_prompts * num_samples, num_metrics, draws)
            for name, value in (changes or {}).items():
                row.pop(name, None)
                if value is not None:
                    row[name] = value(step)
            file.write(json.dumps({"step": step, **row}) + "\n")
    kinds = ["start", *["checkpoint"] * (num_steps // 6), "end"]
    with (folder / "events.jsonl").open("w") as file:
        for place, kind in enumerate(kinds):
            step = min(num_steps, 6 * place)
            event = {
                "time": 1.7e9 + 60 * place,
                "step": step,
                "kind": kind,
                "message": f"The run: {kind} at step {step}.",
            }
            file.write(json.dumps(event) + "\n")
    pool = _responses(num_tokens, draws)
    for step in range(1, num_steps + 1):
        prompts = [f"<|user|>{(step % 3) * num_prompts + p}+{p}=<|end|><|assistant|>" for p in range(num_prompts)]
        _dump(folder / "rollouts", step, num_steps, prompts, num_samples, pool, draws, tokens=tokens)
    for step in range(0, num_steps + 1, max(1, num_steps // 3)) if validation else ():
        prompts = [f"<|user|>{p}*{p}=<|end|><|assistant|>" for p in range(num_prompts)]
        _dump(folder / "validation", step, num_steps, prompts, 1, pool, draws, tokens=False)
    return folder


@cache
def _config(overrides: tuple[str, ...]) -> PPOTrainerConfig:
    paths = [f"actor_rollout_ref.model.path={TINY / 'model'}", f"data.train_files={TINY / 'data' / 'train.jsonl'}"]
    return load_config(["recipe=demo", *paths, *overrides])


def _write_config(folder: Path, overrides: tuple[str, ...]) -> None:
    config = copy.deepcopy(_config(overrides))
    config.trainer.default_local_dir = str(folder)
    (folder / "config.yaml").write_text(to_shown_yaml(config))
    write_origins(config, folder)


def _metrics(step: int, num_steps: int, num_rows: int, num_others: int, draws: random.Random) -> dict[str, float]:
    if step == 0:
        return {"val-core/burnish/arithmetic/acc/mean@1": 0.1}
    done = step / num_steps
    noise = draws.gauss(0, 0.02)
    row = {
        "critic/score/mean": 0.3 + 0.5 * done + noise,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "critic/advantages/mean": noise,
        "critic/advantages/min": -2.0,
        "critic/advantages/max": 2.0,
        "actor/entropy": 0.8 - 0.3 * done + noise,
        "actor/grad_norm": 0.5 + abs(noise),
        "actor/pg_loss": noise,
        "actor/pg_clipfrac": 0.01,
        "actor/ppo_kl": 0.001,
        "actor/skipped_updates": 0.0,
        "response_length/mean": 40 + 3 * math.sin(step),
        "response_length/min": 20.0,
        "response_length/max": 60.0,
        "response_length/clip_ratio": 0.01,
        "reward/error_count": 0.0,
        "training/num_rows": float(num_rows),
        "training/rollout_probs_diff_mean": 1e-4,
        "perf/total_num_tokens": 20000.0,
        "perf/throughput": 9000 + 100 * noise,
        "timing_s/gen": 1.0 + noise,
        "timing_s/reward": 0.1,
        "timing_s/update_actor": 1.4 - noise,
        "timing_s/step": 2.7,
        **{f"extra/metric_{number:03d}": draws.random() for number in range(num_others)},
    }
    if step % max(1, num_steps // 3) == 0:
        row |= {"val-core/burnish/arithmetic/acc/mean@1": 0.1 + 0.6 * done, "timing_s/testing": 0.8}
    return row


def _responses(num_tokens: int, draws: random.Random, size: int = 60) -> list[tuple[str, list[int]]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "model" / "tokenizer.json"))
    texts = []
    for _ in range(size):
        words = [draws.choice(_TEXT.split()) for _ in range(num_tokens)]
        texts.append(" ".join(words)[: max(1, num_tokens - 1 - draws.randrange(num_tokens // 4 + 1))] + "<|end|>")
    return [(text, encoding.ids) for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True)]


def _dump(
    folder: Path,
    step: int,
    num_steps: int,
    prompts: list[str],
    num_samples: int,
    pool: list[tuple[str, list[int]]],
    draws: random.Random,
    *,
    tokens: bool,
) -> None:
    folder.mkdir(exist_ok=True)
    keys = [(f"epoch0-{prompt[8:13]}", sample, prompt) for prompt in prompts for sample in range(num_samples)]
    chosen = [draws.choice(pool) for _ in keys]
    scores = [float(draws.random() < 0.3 + 0.5 * step / num_steps) for _ in keys]
    with (folder / f"{step}.jsonl").open("w") as file:
        for (uid, sample, prompt), (text, ids), score in zip(keys, chosen, scores, strict=True):
            row = {
                "step": step,
                "uid": uid,
                "data_source": "burnish/arithmetic",
                "prompt": prompt,
                "response": text,
                "score": score,
                "valid": True,
                "ground_truth": "7",
                "extra_info": None,
                "finish_reason": "stop",
                "sample_index": sample,
                "num_tokens": len(ids),
                "acc": bool(score),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if not tokens:
        return
    lengths = [len(ids) for _, ids in chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    generator = np.random.default_rng(step)
    total = int(offsets[-1])

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    log_probs = -generator.exponential(0.4, total).astype(np.float32)
    last = np.zeros(total, np.float32)
    last[offsets[1:] - 1] = scores
    loss_mask = np.ones(total, bool)
    loss_mask[offsets[:-1]] = False
    advantage = np.repeat(np.array(scores, np.float32) - 0.5, lengths)
    table = {
        "uid": pa.array([key[0] for key in keys]),
        "sample_index": pa.array([key[1] for key in keys], pa.int32()),
        "prompt_ids": pa.array([[1, 2, 3]] * len(keys), pa.list_(pa.int32())),
        "response_ids": lists(np.concatenate([np.array(ids, np.int32) for _, ids in chosen])),
        "rollout_log_probs": lists(log_probs),
        "old_log_probs": lists(log_probs + generator.normal(0, 0.01, total).astype(np.float32)),
        "advantages": lists(advantage),
        "token_level_scores": lists(last),
        "loss_mask": lists(loss_mask),
        "response_mask": lists(np.ones(total, bool)),
        "values": pa.nulls(len(keys), pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(table), folder / f"{step}.tokens.parquet", row_group_size=64, compression="zstd")
