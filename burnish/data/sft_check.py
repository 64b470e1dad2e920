"""Everything that is wrong with conversations, instead of the first thing."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from burnish.config.sft import SFTDataConfig
from burnish.data.check import guarded_rows, problem_of
from burnish.data.files import read_source, sources_of
from burnish.data.prepare import prepare_rows
from burnish.data.prepared_dataset import first_rows
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
    rows = (row for source in sources for row in guarded_rows(read_source(source, split), str(source), problems))
    preparer = ConversationPreparer(tokenizer, config)
    for row in prepare_rows(first_rows(rows, max_samples), preparer, preparer.num_workers):
        if isinstance(row, RowError):
            problems.append(row.problem)
        if len(problems) >= max_problems:
            break
    return problems[:max_problems]
