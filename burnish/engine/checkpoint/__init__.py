"""A model's folder in a checkpoint, in files that any number of ranks reads: see `EngineCheckpoint`.

`tensor_file` writes safetensors, `saving` the files of one save (at once or in the background), `model_files`,
`optimizer_files` and `extra_files` say what they hold, `verl` reads another system's, and `engine_checkpoint` puts it
together for an engine.
"""

from burnish.engine.checkpoint.engine_checkpoint import EngineCheckpoint
from burnish.engine.checkpoint.model_files import HF_FOLDER, has_value_head, load_value_head
from burnish.engine.checkpoint.optimizer_files import read_optimizer

__all__ = ["HF_FOLDER", "EngineCheckpoint", "has_value_head", "load_value_head", "read_optimizer"]
