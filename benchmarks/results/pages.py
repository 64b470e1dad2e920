"""Puts tables and figures of results into pages, between comments that say which.

    python -m benchmarks.results.pages README.md examples/reasoning/README.md

A page has blocks of two kinds. What stands between the comments is written anew; patterns are of docs/results, without ``.json``,
and a pattern with no result behind it leaves the words "No results yet.":

    <!-- results: grpo-chain_sum ppo-chain_sum *-countdown -->
    <!-- end of results -->

    <!-- figure: chain_sum.png of *-chain_sum -->
    <!-- end of figure -->
"""

import argparse
import os
import re
from pathlib import Path

from benchmarks import results

_BLOCK = re.compile(r"(<!-- (results|figure): (.*?) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def fill(text: str, page: Path, folder: Path = results.RESULTS, *, draw: bool = True) -> str:
    """The page's text with its blocks written anew.

    Args:
        page: where the page is, for the paths of figures.
        draw: draw the figures; otherwise only the text is made.
    """

    def block(found: re.Match[str]) -> str:
        begin, kind, words, end = found.groups()
        if kind == "results":
            paths = chosen(words.split(), folder)
            inside = results.table(paths) + "\n\n" + ran_on(paths) if paths else "No results yet."
            return f"{begin}{inside}\n{end}"
        name, _, patterns = words.partition(" of ")
        paths = chosen(patterns.split(), folder)
        png = folder / name
        if paths and draw:
            results.plot(paths, png)
        place = os.path.relpath(png, page.parent)
        inside = f"![{Path(name).stem}: accuracy and score over the steps]({place})" if paths else "No results yet."
        return f"{begin}{inside}\n{end}"

    return _BLOCK.sub(block, text)


def chosen(patterns: list[str], folder: Path) -> list[Path]:
    """The results that the patterns name, in the patterns' order, each once."""
    found = [path for pattern in patterns for path in sorted(folder.glob(f"{pattern}.json"))]
    return list(dict.fromkeys(found))


def ran_on(paths: list[Path]) -> str:
    """Machines and commits of results, in a line."""
    places: dict[str, list[str]] = {}
    for path in paths:
        result = results.read_result(path)
        for run in result["runs"]:
            commits = places.setdefault(run.get("machine", result["machine"]), [])
            commits += [commit for commit in [run.get("commit", result["commit"])] if commit and commit not in commits]
    return (
        "; ".join(f"{machine}, commit {', '.join(commits) or 'unknown'}" for machine, commits in places.items()) + "."
    )


def main() -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page is not up to date")
    args = parser.parse_args()
    stale = 0
    for page in args.pages:
        text = page.read_text(encoding="utf-8")
        new = fill(text, page.absolute(), draw=not args.check)
        stale += new != text
        if new != text and not args.check:
            page.write_text(new, encoding="utf-8")
        print(f"{page}: {'as it was' if new == text else 'not up to date' if args.check else 'written'}")
    parser.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
