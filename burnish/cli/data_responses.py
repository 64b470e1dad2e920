"""``burnish data sft-from-responses``: responses that scored well as data to learn from (docs/sft.md)."""

from __future__ import annotations

from pathlib import Path

from burnish.cli.generate import check_out
from burnish.trainer.offline.good_responses import Taken, take_responses
from burnish.utils.console import console
from burnish.utils.errors import DataError
from burnish.utils.json_lines import write_atomically

_WORDS = {
    "low": "scored too low",
    "cut": "were cut at the length limit",
    "invalid": "could not be scored",
    "empty": "are empty",
    "double": "were there already",
    "more": "are more than --max-per-prompt",
}


def run_sft_from_responses(
    source: str, out: str, *, min_score: float | None, max_per_prompt: int | None, prompt_key: str
) -> int:
    """Writes the conversations; 0.

    Raises:
        ConfigError: a wrong request; nothing was written.
        DataError: the responses cannot be used, or none is good enough.
    """
    path: Path = check_out(out, [source])
    taken = take_responses(source, min_score=min_score, max_per_prompt=max_per_prompt, prompt_key=prompt_key)
    if not taken.rows:
        raise DataError(f"{source}: no response is left to learn from. {_left_out(taken) or 'It holds none.'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, taken.rows)
    console.print(f"{path}: {len(taken.rows)} conversations of {taken.num_prompts} prompts.", soft_wrap=True)
    if told := _left_out(taken):
        console.print(told, soft_wrap=True)
    return 0


def _left_out(taken: Taken) -> str:
    said = [f"{taken.counts[name]} {words}" for name, words in _WORDS.items() if taken.counts[name]]
    return f"Left out: {', '.join(said)}." if said else ""
