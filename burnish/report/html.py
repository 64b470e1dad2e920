"""The page: one HTML file that needs nothing else, no network and no other file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from burnish.report.choose import MOST_ROWS
from burnish.report.payload import choose_rollouts, describe, describe_rollouts, load_pieces, payload, plain
from burnish.report.read import RunFolder
from burnish.utils.errors import ConfigError
from burnish.utils.json_lines import replacing

_PAGE = files("burnish.report") / "page"
# In this order they become one script.
_SCRIPTS = (
    "basics.js",
    "charts.js",
    "curves.js",
    "overview.js",
    "stages.js",
    "distributions.js",
    "chunks.js",
    "browser.js",
    "tokens.js",
    "diff.js",
    "tables.js",
    "main.js",
)
_STYLES = ("colours.css", "layout.css", "charts.css", "parts.css")
MEGABYTE = 1_000_000
# For sentences on what was left out.
_SPARE = 4096


def write_report(runs: Sequence[RunFolder], out: Path, *, most_mb: float = 20.0, tokenizer: str | None = None) -> int:
    """Writes the page of ``runs`` to ``out``, whole or not at all.

    Args:
        most_mb: size that the file does not exceed, in units of 10^6 bytes; older rollouts are left out for it.
        tokenizer: folder of the tokenizer that gives tokens their texts, where the run's own is not on this computer.

    Returns:
        the file's size in bytes.

    Raises:
        ConfigError: the file cannot be written, or is too small for the metrics alone.
    """
    html = render(runs, most_mb=most_mb, tokenizer=tokenizer)
    try:
        with replacing(out) as temporary:
            temporary.write_bytes(html)
    except OSError as error:
        raise ConfigError(f"--out={out}: the file cannot be written: {error.strerror}.") from error
    return len(html)


def render(runs: Sequence[RunFolder], *, most_mb: float, tokenizer: str | None = None) -> bytes:
    """The page of ``runs`` as UTF-8."""
    most = int(most_mb * MEGABYTE)
    entries = [describe(run, {}) for run in runs]
    tokenizers = [load_pieces(run, tokenizer) for run in runs]
    data = payload(entries, live=False, tokens_have_text=any(tokenizers))
    left = most - len(page(data, {})) - _SPARE
    chunks: dict[str, str] = {}
    for number, run in enumerate(runs):
        chosen = choose_rollouts(run, left // (len(runs) - number), tokenizers[number], MOST_ROWS // len(runs))
        left -= sum(part.size for part in chosen.values())
        entries[number] |= describe_rollouts(run, chosen)
        for kind, part in chosen.items():
            chunks |= {f"{number}-{kind}-{step}": chunk for step, chunk in part.chunks.items()}
    html = page(data, chunks)
    if len(html) > most:
        raise ConfigError(
            f"--max-mb={most_mb:g}: curves and settings of these runs alone take {len(html) / MEGABYTE:.1f} MB. Allow more, or "
            f"name fewer runs."
        )
    return html


def page(data: dict[str, Any], chunks: dict[str, str]) -> bytes:
    """The page with its data. Texts of runs cannot leave the element that they are in, and no script but the page's own runs."""
    script = f'"use strict";\n(() => {{\n{_together(_SCRIPTS)}\n}})();\n'
    style = _together(_STYLES)
    environment = Environment(autoescape=True)
    template = environment.from_string((_PAGE / "template.html.j2").read_text(encoding="utf-8"))
    html = template.render(
        title=", ".join(run["name"] for run in data["runs"]) or "burnish",
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        connect="'self'" if data.get("live") else "'none'",
        data=script_safe(data),
        chunks=chunks,
    )
    return html.encode("utf-8", "backslashreplace")


def _together(names: Sequence[str]) -> str:
    return "\n".join((_PAGE / name).read_text(encoding="utf-8") for name in names)


def script_safe(value: Any) -> str:
    """JSON that may stand inside a ``<script>`` element whatever texts it holds."""
    text = json.dumps(plain(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """The text's hash as the policy of the page names the one script and the one style that may apply."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
