"""The checkpoints of a run.

`run` knows the trainer: what its state is, when to save, how to stop. `manager` writes, keeps and removes; `folders` and
`manifest` say what lies on the disk, `state` and `values` what the trainer's own part holds; `resume` goes on from it, and
`remote` copies it to a URL and back.
"""

from burnish.trainer.ppo.checkpoints.folders import RunFolder, best_checkpoint, newest_checkpoint
from burnish.trainer.ppo.checkpoints.manager import CheckpointManager
from burnish.trainer.ppo.checkpoints.manifest import MANIFEST, STATE, Manifest, problem_of, read_manifest
from burnish.trainer.ppo.checkpoints.run import RunCheckpoints

__all__ = [
    "MANIFEST",
    "STATE",
    "CheckpointManager",
    "Manifest",
    "RunCheckpoints",
    "RunFolder",
    "best_checkpoint",
    "newest_checkpoint",
    "problem_of",
    "read_manifest",
]
