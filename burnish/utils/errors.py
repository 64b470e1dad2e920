"""Every error burnish raises on purpose, drawn as one tree.

BurnishError
├── ConfigError       a key, a value, or several keys together (before anything heavy starts)
├── DataError         a file, a row or a prompt of a dataset
│   └── RowError      one row, with its column, what is there and what should be (burnish.data.problems)
├── BatchError        a DataProto whose keys, shapes or rows do not fit together (also a ValueError)
├── RewardError       a reward function or what it returned
├── ModelError        a model folder, its tokenizer or its architecture
├── RolloutError      a generation request or a rollout engine
├── TrainingError     an update that must not go on (non-finite gradients, empty batches)
├── CheckpointError   saving, finding or loading a checkpoint
│   └── DiskError         the disk does not take it
├── StorageError      a place that a URL names (burnish.utils.storage)
├── ResourceError     the cluster cannot give what was asked for
│   └── MemoryExceededError   a stage of training needed more memory than its device has
└── WorkerError       a worker process failed or died: names the worker, the stage and the cause
    ├── WorkerDiedError   its process is gone
    └── StalledError      it got no further for too long

A message is a sentence: what was given, what is wrong with it, what to do.
"""


class BurnishError(Exception):
    """Base of every error that burnish raises on purpose."""


class ConfigError(BurnishError):
    """A configuration key or value is wrong, or several contradict each other."""


class DataError(BurnishError):
    """A dataset file or row cannot be used."""


class BatchError(BurnishError, ValueError):
    """The keys, shapes or rows of a batch do not fit together."""


class RewardError(BurnishError):
    """A reward function failed or returned something that is no score."""


class ModelError(BurnishError):
    """A model folder, tokenizer or architecture cannot be used."""


class RolloutError(BurnishError):
    """A generation request cannot be served."""


class TrainingError(BurnishError):
    """Training cannot go on without going wrong."""


class CheckpointError(BurnishError):
    """A checkpoint cannot be written, found or read."""


class DiskError(CheckpointError):
    """The disk does not take a checkpoint: it is full, gone or read-only."""


class StorageError(BurnishError):
    """A place that a URL names cannot be reached, read or written."""


class ResourceError(BurnishError):
    """The cluster does not have the resources that the configuration asks for."""


class MemoryExceededError(ResourceError):
    """A stage needed more memory than its device has: names the stage, the sizes and the keys to turn."""


class WorkerError(BurnishError):
    """A worker process raised or died."""


class WorkerDiedError(WorkerError):
    """A worker's process is gone."""


class StalledError(WorkerError):
    """A stage got no further for longer than it may."""
