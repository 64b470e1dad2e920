"""What all tests share: shapes are checked in the rooms of mathematics, and no test touches the network or the user's folders."""

import os
import signal
from pathlib import Path

import pytest

from burnish.utils import env

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

REPO = Path(__file__).resolve().parents[1]

env.calm_threads()

# What a shell starts in the background ignores Ctrl-C, and what nohup starts ignores SIGHUP; so would every command that a test
# starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Shape annotations are enforced here and free in production.
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("burnish.core_algos", "beartype.beartype")


@pytest.fixture(scope="session")
def tiny_model_path() -> str:
    """The demo's model: a Llama-type decoder of about a million parameters."""
    return str(REPO / "examples" / "tiny_model" / "model")


@pytest.fixture(scope="session")
def tiny_data_path() -> Path:
    """The folder of the demo's train.jsonl and test.jsonl."""
    return REPO / "examples" / "tiny_model" / "data"
