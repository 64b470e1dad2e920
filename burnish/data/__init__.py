"""Files to batches of prompts, or of conversations."""

from burnish.data.check import check_rows
from burnish.data.collate import collate_fn
from burnish.data.files import read_rows, resolve_files
from burnish.data.loader import create_dataloader
from burnish.data.problems import RowError, RowProblem
from burnish.data.rl_dataset import RLHFDataset, create_rl_dataset
from burnish.data.sampler import EpochSampler, create_rl_sampler, takes_feedback
from burnish.data.sft_dataset import SFTDataset, sft_collate

__all__ = [
    "EpochSampler",
    "RLHFDataset",
    "RowError",
    "RowProblem",
    "SFTDataset",
    "check_rows",
    "collate_fn",
    "create_dataloader",
    "create_rl_dataset",
    "create_rl_sampler",
    "read_rows",
    "resolve_files",
    "sft_collate",
    "takes_feedback",
]
