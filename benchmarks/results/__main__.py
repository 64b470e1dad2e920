"""The command line of `benchmarks.results`."""

import argparse
from pathlib import Path

from benchmarks import results


def main() -> None:
    """Prints tables, draws figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=results.__doc__.splitlines()[0])
    parser.add_argument("results", nargs="*", metavar="RESULT.json", help="default: all of docs/results with runs")
    parser.add_argument("--table", action="store_true", help="a table in Markdown (what is done without --plot)")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves into this file")
    parser.add_argument(
        "--save", metavar="TEXT", help="file with results as --json prints them: written into docs/results"
    )
    args = parser.parse_args()
    if args.save:
        print(*results.save_printed(Path(args.save).read_text(encoding="utf-8")), sep="\n")
        return
    paths = args.results or [str(path) for path in sorted(results.RESULTS.glob("*.json"))]
    paths = [path for path in paths if "curve" in results.read_result(path).get("summary", {})]
    if not paths:
        parser.exit(2, "None of the files is a result with runs.\n")
    if args.plot:
        print(results.plot(paths, args.plot))
    if args.table or not args.plot:
        print(results.table(paths))


if __name__ == "__main__":
    main()
