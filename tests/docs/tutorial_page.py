"""The blocks of docs/tutorial.md, run as they stand; ``python -m tests.docs.tutorial_page --model DIR --lr 1e-5`` runs them with
another model and prints what comes out."""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "tutorial.md"
DOWNLOADS = "burnish model smollm2"
"""What the one block begins with that fetches something."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"Save this as\s+`([\w.]+)`:\s*\Z")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
_FRAME = re.compile(r"[\s─-╿]+")
_MARK = "@@ block"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the page.

    Attributes:
        kind: "bash", "python", "yaml" or "text".
        file: the name under which the page has it saved; None where it does not.
        shown: of a bash block the output below it; None where none is shown.
    """

    kind: str
    text: str
    file: str | None = None
    shown: str | None = None


def blocks() -> list[Block]:
    """The blocks in their order, outputs beside their commands."""
    page = PAGE.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(page):
        kind, text = match.groups()
        between = page[end : match.start()]
        end = match.end()
        if kind == "text":
            before = found[-1]
            assert (before.kind, between.strip()) == ("bash", ""), f"an output without a command: {text[:80]}"
            found[-1] = Block(kind="bash", text=before.text, shown=text)
            continue
        saved = _SAVED.search(between)
        found.append(Block(kind=kind, text=text, file=saved.group(1) if saved else None))
    return found


def run_page(
    folder: Path, parts: list[Block], *, timeout: float, changes: Mapping[str, str] | None = None
) -> list[str]:
    """Runs blocks one after the other in one shell, and returns what each printed; those that are saved are.

    Args:
        folder: to work in; the page's paths begin at the root of the source tree, of which it gets a link to the examples.
        changes: texts of blocks that are replaced.

    Raises:
        AssertionError: a command failed, with all that was printed until then.
    """
    (folder / "examples").symlink_to(REPO / "examples")
    script = ["set -eo pipefail"]
    for number, block in enumerate(parts):
        text = block.text
        for old, new in (changes or {}).items():
            text = text.replace(old, new)
        script.append(f"echo '{_MARK} {number}'")
        if block.file is not None:
            script += [f"cat > {block.file} <<'END_OF_FILE'", f"{text}END_OF_FILE"]
            continue
        assert block.kind == "bash", f"a block of {block.kind} that is neither run nor saved: {text[:80]}"
        script.append(text)
    with (folder / "said.txt").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            env=_environment(),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        finally:
            _end_group(process.pid)
            process.wait()
        said.seek(0)
        text = said.read()
    assert status == 0, f"status {status}:\n{text}"
    return [part.partition("\n")[2] for part in text.split(_MARK)[1:]]


def _environment() -> dict[str, str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(port),
        "COLUMNS": "140",
    }
    # A terminal's colours are no part of what is said.
    return {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | own | {"NO_COLOR": "1"}


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def unsaid(shown: str, said: str) -> str | None:
    """The first line of ``shown`` that does not come in ``said`` at its place; None where all do.

    Numbers, frames of tables and white space may differ. A line that ends in "..." is the beginning of one.
    """
    lines: Iterator[str] = iter([_plain(line) for line in said.splitlines()])
    for line in filter(str.strip, shown.splitlines()):
        wanted = _plain(line)
        beginning = wanted.removesuffix("...").rstrip() if wanted.endswith("...") else None
        if not any(one.startswith(beginning) if beginning is not None else one == wanted for one in lines):
            return line
    return None


def _plain(line: str) -> str:
    return _FRAME.sub(" ", _NUMBER.sub("#", line)).strip()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--lr", required=True, help="learning rate")
    parser.add_argument("--ask", default="in_words", help="column with the questions")
    parser.add_argument("--steps", type=int, default=10, help="of the first run; the second has as many again")
    parser.add_argument("--timeout", type=float, default=550)
    options = parser.parse_args()
    parts = [block for block in blocks() if not block.text.startswith(DOWNLOADS)]
    changes = {
        "MODEL=../examples/tiny_model/model": f"MODEL={Path(options.model).absolute()}",
        "ASK=question LR=3e-4": f"ASK={options.ask} LR={options.lr}",
        "total_training_steps: 10": f"total_training_steps: {options.steps}",
        "total_training_steps=20": f"total_training_steps={2 * options.steps}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for block, said in zip(
            parts, run_page(Path(folder), parts, timeout=options.timeout, changes=changes), strict=True
        ):
            if block.kind == "bash":
                sys.stdout.write(f"$ {block.text}{said}")


if __name__ == "__main__":
    _main()
