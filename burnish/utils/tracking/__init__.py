"""Where the metrics of a step go: ``trainer.logger`` names one or several of console, file, tensorboard, wandb, mlflow, swanlab,
trackio, or a logger of one's own. A file for each, `hub` for what holds for all."""

from burnish.utils.tracking.base import LOGGERS, Logger, RunInfo, check_loggers
from burnish.utils.tracking.console import ConsoleLogger
from burnish.utils.tracking.file import METRICS_FILE, FileLogger
from burnish.utils.tracking.hub import Tracking
from burnish.utils.tracking.mlflow import MlflowLogger
from burnish.utils.tracking.swanlab import SwanlabLogger
from burnish.utils.tracking.tensorboard import TensorboardLogger
from burnish.utils.tracking.trackio import TrackioLogger
from burnish.utils.tracking.wandb import WandbLogger

__all__ = [
    "LOGGERS",
    "METRICS_FILE",
    "ConsoleLogger",
    "FileLogger",
    "Logger",
    "MlflowLogger",
    "RunInfo",
    "SwanlabLogger",
    "TensorboardLogger",
    "Tracking",
    "TrackioLogger",
    "WandbLogger",
    "check_loggers",
]
