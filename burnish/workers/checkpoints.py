"""What every worker that trains a model does alike: it saves and loads it, and tells which keys were read."""

from burnish.config.actor_rollout_ref import CheckpointConfig
from burnish.config.usage import reads
from burnish.engine import FSDPEngine
from burnish.single_controller import Dispatch, register
from burnish.workers.handed_back import hands_back_errors


class SavesItsModel:
    """Part of a `Worker` that has an ``engine``; it says in `checkpoint_config` what a checkpoint holds."""

    engine: FSDPEngine

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """Contents of the model's checkpoints."""
        raise TypeError(f"{type(self).__name__} does not say what its checkpoints hold: define checkpoint_config.")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @hands_back_errors
    def save_checkpoint(self, folder: str, blocking: bool = True) -> None:
        """Model in Hugging Face format (and value head), optimizer and generators beside it, as `save_contents` says.

        Args:
            blocking: False returns when everything is copied, and a thread of each rank writes it (`checkpoint_written`).
        """
        self.engine.save_checkpoint(folder, self.checkpoint_config.save_contents, blocking=blocking)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @hands_back_errors
    def checkpoint_written(self, wait: bool) -> bool:
        """Whether this rank has nothing left to write; hands back what could not be written (CheckpointError)."""
        return self.engine.checkpoint_written(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @hands_back_errors
    def load_checkpoint(self, folder: str) -> None:
        """Continues from what `save_checkpoint` wrote, on any number of ranks."""
        self.engine.load_checkpoint(folder, self.checkpoint_config.load_contents)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def config_reads(self) -> frozenset[str]:
        """Configuration keys that this process has read."""
        return reads()
