"""``burnish score``: scores responses that are stored in files, by the reward function of a configuration."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from burnish.config import load_config
from burnish.config.trainer import PPOTrainerConfig
from burnish.data.files import read_source, resolve_files, sound
from burnish.render.tokenizer import load_tokenizer
from burnish.reward.manager import reward_function
from burnish.reward.outcome import Outcome
from burnish.reward.score import Score, read_score
from burnish.reward.scorers import Scorer, make_pool, make_scorer
from burnish.trainer.offline import numbers
from burnish.trainer.offline.settings import reward_keys
from burnish.trainer.start_checks import check_folder
from burnish.utils import local_paths
from burnish.utils.console import console
from burnish.utils.errors import ConfigError, DataError, RewardError
from burnish.utils.json_lines import write_atomically

_RESPONSE_KEYS = ("response", "responses", "solution_str", "output", "completion")
_FAILURES = ("error", "timeout", "non_finite")
# Managers that call one function for one response, as is done here.
_MANAGERS = ("naive", "dapo", "prime")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to score and how.

    Attributes:
        data: files, patterns or folders; dumps of `trainer.rollout_data_dir` among them.
        overrides: configuration, ``key=value``.
        reward: ``path.py:function``, instead of reward.custom_reward_function.
        response_key: the column of responses, text or a list of texts; None: the first there is of the usual ones.
        out: file for the scored rows; None: beside the first data file.
        tokenizer: folder or hub name of one whose special tokens are cut out of responses, which dumps have in them.
        pass_score: the least score of a response that counts as right, where the function gives no ``acc``.
    """

    data: list[str]
    overrides: list[str] = field(default_factory=list)
    reward: str | None = None
    response_key: str | None = None
    out: str | None = None
    tokenizer: str | None = None
    pass_score: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A response of a file: its row, the place of that in words, and the prompt that it belongs to."""

    place: str
    prompt: tuple[Any, ...]
    row: dict[str, Any]
    arguments: dict[str, Any]


def run_score(options: ScoreOptions, *, as_json: bool) -> int:
    """Scores, writes the scored rows and a summary.

    Returns:
        0 where every response was scored (abstained from, too), 1 where the function failed on some.

    Raises:
        ConfigError, DataError: a wrong request; nothing was scored.
        RewardError: the function cannot be started, or failed under reward.on_error=raise.
    """
    config = load_config([*options.overrides, reward_keys(options.reward)], train_rows_given=True)
    if config.reward.reward_manager.name not in _MANAGERS:
        raise ConfigError(
            f"reward.reward_manager.name={config.reward.reward_manager.name}: stored responses are scored one by one; "
            f"choose {', '.join(_MANAGERS)}."
        )
    files = resolve_files(options.data, "--data")
    out = _out_file(options.out, files)
    function = reward_function(config.reward)
    takes_prompt = bool(getattr(function, "takes_prompt", False))
    stored = [
        response
        for path in files
        for place, row in sound(read_source(path))
        for response in _responses(str(place), row, config, options.response_key, takes_prompt)
    ]
    if options.tokenizer is not None:
        _cut_special_tokens(stored, options.tokenizer)
    if not stored:
        raise DataError(f"--data={', '.join(options.data)}: there are no responses in it.")
    scores = _score(function, stored, config)
    summary = summarise(stored, scores, options.pass_score)
    try:
        _write(out, stored, scores)
        summary["out"] = str(out)
    finally:
        # What may have taken hours is told, also where the disk does not take it.
        if as_json:
            console.print(json.dumps(summary), soft_wrap=True)
        else:
            _show(summary)
    return int(any(summary[f"num_{reason}"] for reason in _FAILURES))


def _out_file(out: str | None, files: Sequence[Path]) -> Path:
    first = files[0]
    path = local_paths.named("--out", out) if out else first.with_name(f"{first.name.split('.')[0]}.scored.jsonl")
    if path.resolve() in [file.resolve() for file in files]:
        raise ConfigError(
            f"{f'--out={out}' if out else f'{path}, where the scored rows would go'}: this is one of the files that are "
            f"read. Name another by --out, or by --data a pattern without it."
        )
    if path.is_dir():
        raise ConfigError(f"--out={out}: this is a folder. Name a file, as scored.jsonl.")
    if path.is_file() or not path.exists():
        # What is no file, as /dev/stdout, is written to where it is.
        check_folder("--out", str(path.parent))
    return path


def _responses(
    place: str, row: dict[str, Any], config: PPOTrainerConfig, key: str | None, takes_prompt: bool
) -> Iterator[Stored]:
    """The responses in a row, each as a row of its own."""
    found = key or next((name for name in _RESPONSE_KEYS if name in row), None)
    if found is None or found not in row:
        raise DataError(
            f"{place}: there is no column {found or ' or '.join(_RESPONSE_KEYS)!r}; there are "
            f"{', '.join(row) or 'none'}. Name the column of the responses by --response-key."
        )
    value = row[found]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(
                f"{place}: column {found!r} holds {type(text).__name__} ({text!r:.60}); text, or a list of texts, is expected."
            )
    reward_model = row.get("reward_model")
    truth = row["ground_truth"] if "ground_truth" in row else (reward_model or {}).get("ground_truth")
    arguments = {
        "data_source": row.get(config.data.reward_fn_key) or row.get("data_source") or "unknown",
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
    }
    if takes_prompt:
        arguments["prompt"] = row.get(config.data.prompt_key, row.get("prompt"))
    # A dump of several steps has a prompt again in a later one, with responses of another policy.
    prompt = (row.get("step"), row["uid"]) if row.get("uid") is not None else (place,)
    for text in texts:
        yield Stored(
            place=place,
            prompt=prompt,
            row={**row, found: text},
            arguments={**arguments, "solution_str": text},
        )


def _cut_special_tokens(stored: Sequence[Stored], tokenizer: str) -> None:
    """As in training, where functions get what is decoded without them."""
    special = sorted(load_tokenizer(tokenizer).all_special_tokens, key=len, reverse=True)
    for response in stored:
        for token in special:
            response.arguments["solution_str"] = response.arguments["solution_str"].replace(token, "")


def _score(function: Any, stored: Sequence[Stored], config: PPOTrainerConfig) -> list[Score]:
    reward = config.reward
    scorer: Scorer = make_scorer(function, reward) if reward.num_workers == 0 else make_pool(function, reward)
    try:
        outcomes = scorer.score([response.arguments for response in stored])
    finally:
        scorer.close()
    scores = list(map(_to_score, outcomes))
    lost = [i for i, score in enumerate(scores) if score.reason in _FAILURES]
    if lost and reward.on_error == "raise":
        first = scores[lost[0]]
        raise RewardError(
            f"{stored[lost[0]].place}: the reward function failed (reward.on_error=raise): {first.error}\n{first.traceback}"
        )
    if reward.on_error == "zero":
        for i in lost:
            scores[i] = dataclasses.replace(scores[i], value=0.0)
    return scores


def _to_score(outcome: Outcome) -> Score:
    if outcome.error is not None:
        reason = "timeout" if outcome.kind == "timeout" else "error"
        return Score(value=None, reason=reason, error=outcome.error, traceback=outcome.traceback)
    try:
        return read_score(outcome.value)
    except RewardError as error:
        return Score(value=None, reason="error", error=str(error))


def _write(out: Path, stored: Sequence[Stored], scores: Sequence[Score]) -> None:
    write_atomically(out, (_scored_row(*pair) for pair in zip(stored, scores, strict=True)))


def _scored_row(response: Stored, score: Score) -> dict[str, Any]:
    row = {**response.row, **score.extras, "score": score.value, "valid": score.value is not None}
    # A dump holds what the run made of the response; it is not this function's word.
    row.pop("score_error", None)
    if score.reason:
        row["score_error"] = f"{score.reason}: {score.error}" if score.error else score.reason
    return row


def summarise(stored: Sequence[Stored], scores: Sequence[Score], pass_score: float = 1.0) -> dict[str, Any]:
    """Counts and means over all responses, by data source, and over the responses to a prompt where there are several."""
    sources: dict[str, list[int]] = {}
    for i, response in enumerate(stored):
        sources.setdefault(str(response.arguments["data_source"]), []).append(i)
    failures = [(response.place, score) for response, score in zip(stored, scores, strict=True) if score.error]
    return {
        **_counts(stored, scores, pass_score),
        "first_error": f"{failures[0][0]}: {failures[0][1].error}" if failures else None,
        "data_sources": {
            name: _counts([stored[i] for i in rows], [scores[i] for i in rows], pass_score)
            for name, rows in sorted(sources.items())
        },
    }


def _counts(stored: Sequence[Stored], scores: Sequence[Score], pass_score: float) -> dict[str, Any]:
    groups: dict[tuple[Any, ...], list[Score]] = {}
    for response, score in zip(stored, scores, strict=True):
        groups.setdefault(response.prompt, []).append(score)
    of_prompts = numbers.prompt_numbers(list(groups.values()), pass_score)
    n = min(map(len, groups.values()))
    # The mean is told over responses, and what needs several responses only where every prompt has them.
    told = {name: value for name, value in numbers.means(of_prompts).items() if n > 1 and not name.startswith("mean@")}
    return {
        "num_responses": len(scores),
        "num_prompts": len(groups),
        "mean": _mean([score.value for score in scores if score.value is not None]),
        **numbers.counts(scores),
        **told,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _show(summary: dict[str, Any]) -> None:
    sources = summary["data_sources"]
    columns = {"all": summary, **sources} if len(sources) > 1 else sources
    table = Table("", *columns)
    skipped = ("first_error", "data_sources", "out")
    for name in (name for name in summary if name not in skipped):
        table.add_row(name, *(_number(column.get(name)) for column in columns.values()))
    console.print(table)
    if summary["first_error"]:
        console.print(f"The reward function failed; first: {summary['first_error']}")
    if "out" in summary:
        console.print(f"Scored responses: {summary['out']}")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
