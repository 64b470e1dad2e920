"""docs/serve.md names every field and option there is, and no other."""

import re

import typer

from burnish.cli.app import app
from burnish.rollout.server.protocol import ChatRequest, CompletionRequest
from tests.conftest import REPO

PAGE = (REPO / "docs" / "serve.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[tuple[str, str]]:
    """The names of each row of the table under a line that begins so, with the second cell."""
    table = PAGE.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    return [(name, row[1]) for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_the_table_of_fields_is_what_the_endpoints_take():
    kinds = {"completions": CompletionRequest, "chat": ChatRequest}
    listed = {
        kind: {name for name, of in first_cells("field") if of in ("both", kind)} for kind, model in kinds.items()
    }
    assert listed == {kind: set(model.model_fields) for kind, model in kinds.items()}


def test_fields_without_effect_are_listed():
    neutral, ignored = PAGE.split("Taken where they ask for nothing:")[1].split("Taken and not read:")
    models = (CompletionRequest, ChatRequest)
    assert set(re.findall(r"`(\w+)`", neutral)) == {name for model in models for name in model.neutral}
    assert set(re.findall(r"`(\w+)`", ignored.split("\n\n")[0])) == set(ChatRequest.ignored)


def test_the_table_of_options_is_the_commands():
    command = typer.main.get_command(app).commands["serve"]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert {name for name, _ in first_cells("option")} == options - {"--help"}
