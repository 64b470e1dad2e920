"""The examples of docs/rollout.md run, and the names on the page are those of the code."""

import re
from typing import Any

import pytest

from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.fast import _STATIC_ROPE_TYPES
from tests.conftest import REPO
from tests.rollout.contract import RolloutContract

PAGE = (REPO / "docs" / "rollout.md").read_text(encoding="utf-8")
EXAMPLE, ENGINE, CONTRACT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPO)
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    lines = capsys.readouterr().out.splitlines()
    prompt, responses = names["prompt_ids"], names["responses"]
    # The last token of a prompt is decoded, not prefilled.
    assert f"{len(prompt) - 1} of {4 * len(prompt)} prompt tokens were prefilled" in lines[-1]
    assert sorted(lines[:4]) == [f"{response.request_id} is finished" for response in responses]
    # The session asks for other uids, so its tokens are its own.
    assert set(names["streamed"]) == {"first", "second"}
    assert 1 <= len(names["streamed"]["second"]) <= 3


_names: dict[str, Any] = {}
exec(ENGINE, _names)


@pytest.mark.slow
class TestTheEngineOfThePage(RolloutContract):
    engine_cls = _names["NaiveRollout"]


def test_the_lines_that_test_it_name_the_contract() -> None:
    assert f"from {RolloutContract.__module__} import {RolloutContract.__name__}" in CONTRACT
    assert "engine_cls = NaiveRollout" in CONTRACT


def test_the_files_on_the_page_are_those_of_the_engine() -> None:
    folder = REPO / "burnish" / "rollout" / "native"
    table = PAGE.split("## Files", 1)[1].split("Beside them", 1)[0]
    listed = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([\w/.]+)`", row.split("|")[1] if "|" in row else "")
    }
    there = {file.name for file in folder.glob("*.py")} | {"kernels/"}
    assert listed == there - {"__init__.py"}


def test_the_calls_on_the_page_are_those_of_the_engine() -> None:
    table = PAGE.split("| call | from |", 1)[1].split("\n\n", 1)[0]
    called = set(re.findall(r"`(\w+)`", table)) - {"step", "on_finished"}
    assert {name for name in called if not hasattr(NativeRollout, name)} == set()


def test_the_rotary_embeddings_of_the_fast_path_are_on_the_page() -> None:
    quoted = ", ".join(f"`{kind}`" for kind in _STATIC_ROPE_TYPES)
    assert f"({quoted})" in " ".join(PAGE.split())
