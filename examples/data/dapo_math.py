"""DAPO's mathematics (17k problems) and AIME 2024 as rows of training, from the hub or from copies.

    python -m examples.data.dapo_math
    python -m examples.data.dapo_math --train dapo-math-17k.parquet --test aime-2024.parquet --out data/dapo_math

The published file of training repeats each problem about a hundred times, and that of testing 32 times: here each stands
once. Rows that have messages keep them; a problem in plain text gets DAPO's prompt.
"""

import argparse
import json
from collections.abc import Iterator

from burnish.utils import local_paths
from burnish.utils.errors import BurnishError, DataError
from examples.data.common import Row, field, make_row, read, write

TRAIN = ["BytedTsinghua-SIA/DAPO-Math-17k"]
TEST = ["BytedTsinghua-SIA/AIME-2024"]
PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def convert(row: Row, split: str, index: int) -> Row:
    """A row with `prompt` (messages or a text) or `problem`, and `reward_model.ground_truth`, `solution` or `answer`."""
    prompt = field(row, "prompt", "problem", "Problem")
    given = row.get("reward_model") or {}
    truth = given.get("ground_truth") if isinstance(given, dict) else None
    made = make_row(
        data_source="math_dapo" if split == "train" else "aime_2024",
        prompt=PROMPT.format(prompt) if isinstance(prompt, str) else "",
        ability="math",
        ground_truth=str(field(row, "answer", "Answer", "solution") if truth is None else truth),
        split=split,
        index=index,
    )
    return made if isinstance(prompt, str) else made | {"prompt": prompt}


def convert_once(names: list[str], split: str) -> Iterator[Row]:
    """The rows, each problem once.

    Raises:
        DataError: two answers to one problem, or columns that are missing.
    """
    truths: dict[str, str] = {}
    for place, row in read(names, split):
        try:
            made = convert(row, split, len(truths))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        problem, truth = json.dumps(made["prompt"]), made["reward_model"]["ground_truth"]
        if truths.setdefault(problem, truth) != truth:
            raise DataError(f"{place}: the answer is {truth!r}, but the same problem had {truths[problem]!r} before.")
        if made["extra_info"]["index"] < len(truths):
            yield made


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description="DAPO's mathematics and AIME 2024 as rows of training.")
    parser.add_argument("--train", nargs="+", default=TRAIN, help=f"file or data set; default {TRAIN[0]}")
    parser.add_argument("--test", nargs="+", default=TEST, help=f"likewise; default {TEST[0]}")
    parser.add_argument("--out", default="~/data/dapo_math", help="folder for train.parquet and test.parquet")
    options = parser.parse_args()
    try:
        folder = local_paths.named("--out", options.out)
        for split, names in (("train", options.train), ("test", options.test)):
            print(f"{folder / split}.parquet: {write(convert_once(names, split), folder / f'{split}.parquet')} rows")
    except BurnishError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
