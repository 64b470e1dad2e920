"""The countdown game as rows of training, made here: every game has a solution, and none is in both files.

python -m examples.data.countdown --train 10000 --test 500 --out data/countdown
"""

import argparse
import random
from fractions import Fraction

from burnish.utils import local_paths
from burnish.utils.errors import BurnishError, DataError
from examples.data.common import Row, make_row, write

PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number must be used exactly once. Think first, and give the final equation in <answer> </answer> "
    "tags, for example <answer> (1 + 2) / 3 </answer>."
)
LARGEST_NUMBER = 99
LARGEST_TARGET = 999
Game = tuple[tuple[int, ...], int]


def draw_game(rng: random.Random, num_numbers: tuple[int, ...] = (3, 4)) -> Game:
    """Numbers, and a target that an expression of all of them has: whole and positive."""
    while True:
        numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(rng.choice(num_numbers))]
        values = [Fraction(number) for number in numbers]
        while len(values) > 1:
            rng.shuffle(values)
            a, b = values.pop(), values.pop()
            made = [a + b, a - b, a * b]
            values.append(rng.choice([*made, a / b] if b else made))
        target = values[0]
        if target.denominator == 1 and 1 <= target <= LARGEST_TARGET and target not in numbers:
            return tuple(numbers), int(target)


def draw_games(count: int, seed: int) -> list[Game]:
    """Different games: no two with the same numbers, in whatever order, and the same target.

    Raises:
        DataError: so many different games are hardly to be found.
    """
    rng = random.Random(seed)
    games: dict[Game, Game] = {}
    for _ in range(20 * count + 1000):
        numbers, target = draw_game(rng)
        games.setdefault((tuple(sorted(numbers)), target), (numbers, target))
        if len(games) == count:
            return list(games.values())
    raise DataError(f"{count} different games are more than can be drawn; ask for fewer.")


def to_row(game: Game, split: str, index: int) -> Row:
    """A game as a row of training."""
    numbers, target = list(game[0]), game[1]
    return make_row(
        data_source="countdown",
        prompt=PROMPT.format(numbers=numbers, target=target),
        ability="math",
        ground_truth={"target": target, "numbers": numbers},
        split=split,
        index=index,
    )


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description="The countdown game as rows of training.")
    parser.add_argument("--train", type=int, default=10_000, help="rows of training")
    parser.add_argument("--test", type=int, default=500, help="rows of testing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="~/data/countdown", help="folder for train.parquet and test.parquet")
    options = parser.parse_args()
    if options.train < 1 or options.test < 1:
        parser.exit(2, "--train and --test must be at least 1.\n")
    try:
        folder = local_paths.named("--out", options.out)
        games = draw_games(options.train + options.test, options.seed)
        for split, part in (("train", games[: options.train]), ("test", games[options.train :])):
            rows = [to_row(game, split, index) for index, game in enumerate(part)]
            print(f"{folder / split}.parquet: {write(rows, folder / f'{split}.parquet')} rows")
    except BurnishError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
