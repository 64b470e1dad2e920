"""burnish: reinforcement learning for large language models, from a laptop to a cluster by one command."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__", "load_config", "sft", "train"]

if TYPE_CHECKING:
    from burnish.config import load_config
    from burnish.protocol import DataProto
    from burnish.trainer.api import sft, train

_HOMES = {
    "train": "burnish.trainer.api",
    "sft": "burnish.trainer.api",
    "load_config": "burnish.config",
    "DataProto": "burnish.protocol",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: `import burnish` and `burnish --help` must not load torch.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")
