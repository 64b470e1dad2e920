"""Training and reading one model, on one or many ranks."""

from burnish.engine.base import BaseEngine, LossFn
from burnish.engine.fsdp import FSDPEngine

__all__ = ["BaseEngine", "FSDPEngine", "LossFn"]
