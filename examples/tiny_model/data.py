"""Two-digit sums and differences, some of which need a carry or a borrow, as rows for training and for testing.

    python -m examples.tiny_model.data          # writes data/train.jsonl and data/test.jsonl beside this file

The test problems are held out of everything: neither the training rows nor the making of the model has seen them,
nor, for sums, the same two numbers the other way round.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
DATA_SOURCE = "burnish/arithmetic"
MAX_OPERAND = 99
NUM_TRAIN = 3072
NUM_TEST = 512
CARRY_SHARE = 0.85
"""Share of the rows that need a carry or a borrow."""
SEED = 0


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """`left op right`, with `left >= right` for a difference, so that no answer is negative."""

    left: int
    op: Literal["+", "-"]
    right: int

    @property
    def prompt(self) -> str:
        """What the user says, for example `17+25=`."""
        return f"{self.left}{self.op}{self.right}="

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.left + self.right if self.op == "+" else self.left - self.right

    @property
    def needs_carry(self) -> bool:
        """Whether the ones carry into the tens, or borrow from them."""
        ones_left, ones_right = self.left % 10, self.right % 10
        return ones_left + ones_right > 9 if self.op == "+" else ones_left < ones_right

    @property
    def careless_answer(self) -> int:
        """The answer of somebody who forgets the carry or the borrow: `17+25=32`, `52-17=45`."""
        if not self.needs_carry:
            return self.answer
        return self.answer - 10 if self.op == "+" else self.answer + 10

    @property
    def mirrored(self) -> "Problem":
        """The same sum the other way round; a difference is its own mirror image."""
        return Problem(self.right, "+", self.left) if self.op == "+" else self


def all_problems() -> list[Problem]:
    """Every sum of two numbers in 0..99 and every difference of them that is not negative."""
    numbers = range(MAX_OPERAND + 1)
    sums = [Problem(left, "+", right) for left in numbers for right in numbers]
    differences = [Problem(left, "-", right) for left in numbers for right in numbers if left >= right]
    return sums + differences


def split_problems(seed: int = SEED) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Draw the test problems, set their mirror images aside, and draw the training problems from the rest.

    Returns:
        `(train, test, rest)`: the rows of the two files, in order, and everything that is not held out
        (which contains `train`).
    """
    rng = random.Random(seed)
    problems = all_problems()
    test = _draw(problems, NUM_TEST, rng)
    held_out = set(test) | {problem.mirrored for problem in test}
    rest = [problem for problem in problems if problem not in held_out]
    return _draw(rest, NUM_TRAIN, rng), test, rest


def _draw(problems: list[Problem], count: int, rng: random.Random) -> list[Problem]:
    """Draw `count` different problems, `CARRY_SHARE` of them with a carry or a borrow, in random order."""
    num_carry = round(count * CARRY_SHARE)
    drawn = rng.sample([problem for problem in problems if problem.needs_carry], num_carry)
    drawn += rng.sample([problem for problem in problems if not problem.needs_carry], count - num_carry)
    rng.shuffle(drawn)
    return drawn


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row of a data file: the prompt as messages, and what the reward function needs."""
    return {
        "prompt": [{"role": "user", "content": problem.prompt}],
        "data_source": DATA_SOURCE,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index},
    }


def write_data(folder: Path, seed: int = SEED) -> None:
    """Write `train.jsonl` and `test.jsonl` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test, _ = split_problems(seed)
    for split, problems in (("train", train), ("test", test)):
        rows = [json.dumps(to_row(problem, split, index)) for index, problem in enumerate(problems)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_data(FOLDER / "data")
