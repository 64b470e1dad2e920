"""The error of batches: rows that cannot be combined, split, packed or stored as asked."""

from burnish.utils.errors import BurnishError


class BatchError(BurnishError, ValueError):
    """Rows or keys of a batch cannot be combined, split, packed or stored as asked."""
