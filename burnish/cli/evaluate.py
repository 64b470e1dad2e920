"""``burnish eval``: pass@k, maj@k and means with intervals of a model, or of two beside each other (docs/evaluate.md)."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from burnish.cli.generate import check_out
from burnish.cli.progress import progress
from burnish.trainer.offline.evaluate import EvalOptions, evaluate
from burnish.trainer.offline.numbers import REASONS
from burnish.utils.console import console
from burnish.utils.json_lines import write_atomically


def run_eval(options: EvalOptions, out: str | None, *, as_json: bool) -> int:
    """Measures and shows.

    Args:
        out: file of the scored responses, a line each.

    Returns:
        0, or 1 where the reward function failed on some responses.

    Raises:
        ConfigError, DataError, ModelError, RewardError: see `burnish.trainer.offline.evaluate.evaluate`.
    """
    path = None if out is None else check_out(out, options.ask.data)
    with progress() as on_progress:
        result, rows = evaluate(options, on_progress)
    try:
        if path is not None:
            write_atomically(path, rows)
            result["out"] = str(path)
    finally:
        # What took so long to measure is told, also where the disk does not take the responses.
        if as_json:
            console.print(json.dumps(result), soft_wrap=True)
        else:
            _show(result)
    failed = sum(model[f"num_{reason}"] for model in result["models"] for reason in REASONS if reason != "abstain")
    return int(failed > 0)


def parse_sizes(texts: list[str] | None) -> list[int] | None:
    """The k of ``-k 1,4,8``, or of several ``-k``.

    Raises:
        ConfigError: one is no number.
    """
    from burnish.utils.errors import ConfigError

    if not texts:
        return None
    words = [word.strip() for text in texts for word in text.split(",")]
    if wrong := [word for word in words if not word.isdigit() or int(word) == 0]:
        raise ConfigError(f"-k {wrong[0]}: write numbers of at least 1, as -k 1,4,8.")
    return [int(word) for word in words]


def _show(result: dict[str, Any]) -> None:
    sampling = result["sampling"]
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        if sampling[name] != off and sampling["temperature"] != 0:
            how += f", {name} {sampling[name]:g}"
    for model in result["models"]:
        console.print(_headline(model, result["n"]), soft_wrap=True)
        console.print(_table(model))
    console.print(
        f"In brackets: {result['confidence']:.0%} intervals over prompts. Sampled {how}, up to {sampling['max_tokens']} tokens, "
        f"seed {sampling['seed']}.",
        soft_wrap=True,
    )
    if "comparison" in result:
        _show_comparison(result)
    if "out" in result:
        console.print(f"Responses: {result['out']}", soft_wrap=True)


def _headline(model: dict[str, Any], n: int) -> str:
    lost = [f"{model[f'num_{reason}']} {reason.replace('_', ' ')}" for reason in REASONS if model[f"num_{reason}"]]
    step = "" if model["step"] is None else f" (step {model['step']})"
    return (
        f"{model['model']}{step}: {model['num_prompts']} prompts, {n} response{'s' if n > 1 else ''} to each"
        f"{', not scored: ' + ', '.join(lost) if lost else ''}."
    )


def _table(model: dict[str, Any]) -> Table:
    sources = model["data_sources"]
    columns = {"all": model, **sources} if len(sources) > 1 else sources
    table = Table("", *columns)
    for name in model["metrics"]:
        table.add_row(name, *(_with_interval(column["metrics"].get(name)) for column in columns.values()))
    table.add_row("tokens", *(f"{column['response_length']:.1f}" for column in columns.values()))
    table.add_row("truncated", *(f"{column['truncated']:.1%}" for column in columns.values()))
    if len(columns) > 1:
        table.add_row("prompts", *(str(column["num_prompts"]) for column in columns.values()))
    return table


def _show_comparison(result: dict[str, Any]) -> None:
    comparison = result["comparison"]
    first, second = (model["model"] for model in result["models"])
    console.print(f"\n{second} less {first}, on the same {comparison['num_prompts']} prompts:", soft_wrap=True)
    table = Table("", "difference", "p", "better", "worse", "equal")
    parts = [("", comparison["metrics"])]
    if len(comparison["data_sources"]) > 1:
        parts += [(f"{source} ", part["metrics"]) for source, part in comparison["data_sources"].items()]
    for prefix, metrics in parts:
        for name, found in metrics.items():
            shown = {"value": found["difference"], "low": found["low"], "high": found["high"]}
            numbers = (str(found[f"num_{what}"]) for what in ("better", "worse", "equal"))
            table.add_row(f"{prefix}{name}", _with_interval(shown, signed=True), _p_value(found["p_value"]), *numbers)
    console.print(table)
    console.print(
        "p: the chance of so large a difference if the models were equally good (paired test). better, worse, equal: prompts.",
        soft_wrap=True,
    )


def _with_interval(found: dict[str, float | None] | None, *, signed: bool = False) -> str:
    if found is None or found["value"] is None:
        return "-"
    form = "+.4f" if signed else ".4f"
    text = format(found["value"], form)
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text} [{format(found['low'], form)}, {format(found['high'], form)}]"


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"
