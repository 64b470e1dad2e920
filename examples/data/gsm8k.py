"""GSM8K as rows of training, from the hub or from a copy of it.

python -m examples.data.gsm8k
python -m examples.data.gsm8k --train gsm8k/main/train-*.parquet --test gsm8k/main/test-*.parquet --out data/gsm8k
"""

from burnish.utils.errors import DataError
from examples.data.common import Row, field, make_row, run

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def convert(row: Row, split: str, index: int) -> Row:
    """A row with `question` and `answer`, a solution that ends in "#### 72".

    Raises:
        DataError: the answer has no "####".
    """
    question, answer = field(row, "question"), field(row, "answer")
    _, mark, solution = answer.rpartition("####")
    if not mark:
        raise DataError(f"column answer: {answer[-60:]!r} has no #### before its answer.")
    return make_row(
        data_source="openai/gsm8k",
        prompt=f"{question} {INSTRUCTION}",
        ability="math",
        ground_truth=solution.strip().replace(",", ""),
        split=split,
        index=index,
        question=question,
        answer=answer,
    )


def main() -> None:
    """Writes both files."""
    run(
        "GSM8K as rows of training.",
        convert,
        train=["openai/gsm8k:main:train"],
        test=["openai/gsm8k:main:test"],
        out="~/data/gsm8k",
    )


if __name__ == "__main__":
    main()
