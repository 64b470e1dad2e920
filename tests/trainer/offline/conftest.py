"""A small run whose checkpoint the tests export, ask and measure."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import TINY, tiny_run

VALIDATION = [
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.7",
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of one step, validated and saved."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny_run(
        folder,
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        f"trainer.validation_data_dir={folder}/validation",
        *VALIDATION,
    )
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def test_data() -> str:
    """The file that the run validates on."""
    return str(TINY / "data" / "test.jsonl")
