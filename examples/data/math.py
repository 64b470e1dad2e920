"""MATH as rows of training, from the hub or from a copy of it.

python -m examples.data.math
python -m examples.data.math --train MATH/train.jsonl --test MATH-500/test.jsonl --out data/math
"""

from burnish.reward.functions.answer import last_boxed
from burnish.utils.errors import DataError
from examples.data.common import Row, field, make_row, run

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def convert(row: Row, split: str, index: int) -> Row:
    r"""A row with `problem` and `solution`, whose last box is the answer (or an `answer`, as MATH-500 has).

    Raises:
        DataError: the solution has no box.
    """
    problem, solution = field(row, "problem"), field(row, "solution", "answer")
    boxed = last_boxed(solution)
    answer = row.get("answer") or (boxed[1] if boxed else None)
    if answer is None:
        raise DataError(f"column solution: {solution[-60:]!r} has no \\boxed answer.")
    return make_row(
        data_source=DATA_SOURCE,
        prompt=f"{problem} {INSTRUCTION}",
        ability="math",
        ground_truth=answer,
        split=split,
        index=index,
        level=str(row.get("level", "")),
        subject=str(row.get("type") or row.get("subject") or ""),
    )


def main() -> None:
    """Writes both files."""
    run(
        "MATH as rows of training.",
        convert,
        train=[f"{DATA_SOURCE}:default:train"],
        test=[f"{DATA_SOURCE}:default:test"],
        out="~/data/math",
    )


if __name__ == "__main__":
    main()
