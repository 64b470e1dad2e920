import pytest

from burnish.utils.errors import ConfigError
from burnish.utils.extern import load_attribute


def test_an_attribute_of_a_file(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("class A:\n    def f(): return 5\n")
    assert load_attribute(str(file), "A.f")() == 5


def test_a_file_runs_once_and_again_when_it_was_edited(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("value = object()\n")
    assert load_attribute(str(file), "value") is load_attribute(str(file), "value")
    file.write_text("value = 2\n")
    assert load_attribute(str(file), "value") == 2


def test_files_of_one_name_do_not_meet(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"value = {folder!r}\n")
    assert [load_attribute(str(tmp_path / folder / "reward.py"), "value") for folder in "ab"] == ["a", "b"]


def test_dataclasses_in_a_file_work(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\nfrom typing import ClassVar\n"
        "@dataclass\nclass A:\n    kind: ClassVar[int] = 1\n    x: list[int] = field(default_factory=list)\n"
    )
    assert load_attribute(str(file), "A")().x == []


def test_an_installed_module():
    assert load_attribute("pkg://math", "floor")(1.5) == 1
    with pytest.raises(ConfigError, match="k=pkg://no_such: the module cannot be imported"):
        load_attribute("pkg://no_such", "x", key="k")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("missing.py", None, "there is no such file"),
        ("a.txt", "x = 1", r"ends in \.py"),
        ("a.py", "y = 1", "there is no 'x' in it. It defines: y"),
        ("a.py", "def x(:", "not valid Python"),
        ("a.py", "import no_such_module_anywhere", "imports something that is not there.*PYTHONPATH"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_the_key(tmp_path, name, text, what):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"some.key={tmp_path}/{name}: .*{what}"):
        load_attribute(str(tmp_path / name), "x", key="some.key")


def test_an_error_of_the_file_itself_is_shown_as_it_is(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_attribute(str(file), "x")
