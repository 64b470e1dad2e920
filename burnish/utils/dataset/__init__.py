"""The dataset at the path where verl's scripts import it; it lives in `burnish.data`."""

from burnish.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
