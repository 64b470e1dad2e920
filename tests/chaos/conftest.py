"""Runs in which nothing happens, to compare with; each is made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.harness import run_to_the_end


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Callable[..., Path]:
    """The folder of the uninterrupted run with these overrides."""
    made: dict[tuple[str | bool, ...], Path] = {}

    def of(*overrides: str, is_sft: bool = False) -> Path:
        kind = (is_sft, *overrides)
        if kind not in made:
            folder = tmp_path_factory.mktemp("reference") / "run"
            run_to_the_end(folder, *overrides, is_sft=is_sft)
            made[kind] = folder
        return made[kind]

    return of
