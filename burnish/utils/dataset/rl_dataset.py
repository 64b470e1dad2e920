"""`burnish.data` at verl's path."""

from burnish.data.collate import collate_fn
from burnish.data.rl_dataset import RLHFDataset

__all__ = ["RLHFDataset", "collate_fn"]
