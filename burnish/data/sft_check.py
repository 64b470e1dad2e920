"""Everything that is wrong with conversations, instead of the first thing."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from burnish.config.sft import SFTDataConfig
from burnish.data.check import problem_of, readable_rows
from burnish.data.files import sources_of
from burnish.data.prepare import prepare_rows
from burnish.data.problems import RowError, RowProblem
from burnish.data.sft_prepare import ConversationPreparer
from burnish.utils.errors import DataError


def check_conversations(
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "val"] = "train",
    max_problems: int = 100,
) -> list[RowProblem]:
    """Reads and renders the rows of a split as `SFTDataset` would, and says what is wrong with each.

    A file that cannot be read any further is one problem, and the other files are read.

    Args:
        max_problems: looks for no more.
    """
    files = config.train_files if split == "train" else config.val_files
    max_samples = config.train_max_samples if split == "train" else config.val_max_samples
    key = f"data.{split}_files"
    try:
        sources = sources_of(files, key)
    except DataError as error:
        return [problem_of(error, key)]
    problems: list[RowProblem] = []
    rows = readable_rows(sources, split, max_samples)
    preparer = ConversationPreparer(tokenizer, config)
    for row in prepare_rows(rows, preparer, preparer.num_workers):
        if isinstance(row, RowError):
            problems.append(row.problem)
        if len(problems) >= max_problems:
            break
    return problems[:max_problems]
