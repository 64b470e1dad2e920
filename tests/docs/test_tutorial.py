"""docs/tutorial.md: every block runs as it stands, and what is shown is what comes out."""

import shlex
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import typer

from burnish.cli.app import app
from burnish.cli.check import run_check
from burnish.config import load_config
from burnish.config.cli import parse_train_args
from burnish.utils.extern import load_attribute
from tests.conftest import REPO
from tests.docs.tutorial_page import DOWNLOADS, blocks, run_page, unsaid

BLOCKS = blocks()
OWN = REPO / "examples" / "own_task"
SAVED = {block.file: block.text for block in BLOCKS if block.file is not None}
COMMANDS = typer.main.get_command(app).commands


def commands() -> list[list[str]]:
    """The words of every call of burnish on the page."""
    lines = [
        line
        for block in BLOCKS
        if block.kind == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("burnish ")
    ]
    return [shlex.split(line.split(" 2>")[0].split(" |")[0], comments=True) for line in lines]


@pytest.fixture
def task(tmp_path, monkeypatch) -> Path:
    """The page's files in a folder of their own, which is the current one."""
    for name, text in SAVED.items():
        (tmp_path / name).write_text(text)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).symlink_to(OWN / name)
    monkeypatch.chdir(tmp_path)
    values = {"MODEL": str(REPO / "examples/tiny_model/model"), "ASK": "question", "LR": "3e-4", "RUN": "first"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_files_of_the_page_are_those_of_the_example(tmp_path):
    assert {"make_data.py", "reward.py", "run.yaml", "train.py", "wrong_reward.py"} == SAVED.keys()
    kept = SAVED.keys() - {"wrong_reward.py"}
    assert {name: (OWN / name).read_text() for name in kept} == {name: SAVED[name] for name in kept}
    said = run_page(
        tmp_path, [block for block in BLOCKS if "make_data.py" in (block.file, *block.text.split())], timeout=60
    )
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_text() == (OWN / name).read_text()
    shown = next(block.shown for block in BLOCKS if "python make_data.py" in block.text)
    assert said[-1] == shown


def test_every_command_of_the_page_has_the_options_that_it_is_given(task):
    found = commands()
    assert {words[1] for words in found} == {"check", "generate", "train", "report", "export", "eval", "serve", "model"}
    for _, name, *words in found:
        if name in ("check", "train"):
            args = parse_train_args(words, command=name)
            config = load_config(args.overrides, config_name=args.config_name, config_path=args.config_path)
            assert (config.data.prompt_key, config.trainer.default_local_dir) == ("question", "runs/first")
            continue
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options, words


def test_the_pages_reward_gives_what_the_page_shows(task):
    score = load_attribute(str(task / "reward.py"), "compute_score", key="reward")
    (shown,) = (block.shown for block in BLOCKS if "from reward import" in block.text and block.kind == "bash")
    for line in shown.splitlines():
        said, _, printed = line.partition(" {")
        assert str(score("sums", said, 125, {})) == "{" + printed


@pytest.mark.parametrize("reward", ["reward.py", "wrong_reward.py"])
def test_a_check_says_what_the_page_shows(task, capsys, monkeypatch, reward):
    monkeypatch.setenv("COLUMNS", "140")
    own = [] if reward == "reward.py" else [f"reward.custom_reward_function.path={reward}"]
    words = ["check", "--config-path", ".", "--config-name", "run", *own]
    (shown,) = (
        block.shown for block in BLOCKS if block.kind == "bash" and shlex.split(block.text) == ["burnish", *words]
    )
    assert run_check(words[1:]) == 0
    assert unsaid(shown, capsys.readouterr().out) is None


@pytest.mark.parametrize(
    ("shown", "said", "missing"),
    [
        ("step 1  score 0.3\nstep 2 ...", "x\nstep 1 score 0.95\nstep 2 score 1", None),
        ("┃ mean ┃ 0.1 ┃", "│ mean │ 0.99 │", None),
        ("step 1 ...\nstep 2 ...", "step 2\nstep 1", "step 2 ..."),
        ("score 1", "scores 1", "score 1"),
        ("a ...", "b a", "a ..."),
    ],
)
def test_what_is_shown_must_come_out_in_its_order(shown, said, missing):
    if missing == "step 2 ...":
        # Numbers may differ, so the two steps are alike: one line cannot stand for both.
        assert unsaid("step 1 a\nstep 2 b", "step 2 b\nstep 1 a") == "step 2 b"
        return
    assert unsaid(shown, said) == missing


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_page_runs_as_it_stands_and_shows_what_comes_out(tmp_path):
    parts = [block for block in BLOCKS if not block.text.startswith(DOWNLOADS)]
    for block, said in zip(parts, run_page(tmp_path, parts, timeout=1400), strict=True):
        if block.shown is not None:
            assert (unsaid(block.shown, said), said) == (None, said)
    # It has learnt what it was to learn.
    lines = (tmp_path / "said.txt").read_text().splitlines()
    accuracy = [float(line.rsplit("mean@1 ", 1)[1].split()[0]) for line in lines if "val-core/sums/acc/mean@1" in line]
    assert len(accuracy) >= 5, lines
    assert accuracy[0] < 0.2
    assert accuracy[-1] > 0.8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_block_with_a_real_model_runs_too(tmp_path):
    # An import, or importlib.util.find_spec, would leave this process without setuptools' distutils on Python 3.11.
    if PathFinder.find_spec("pip") is None:
        pytest.skip("pip is not there to fetch the package")
    parts = [block for block in BLOCKS if block.file or "make_data" in block.text or block.text.startswith(DOWNLOADS)]
    try:
        said = run_page(tmp_path, parts, timeout=550)
    except AssertionError as error:
        if "cannot be installed" in str(error):
            pytest.skip("PyPI cannot be reached")
        raise
    assert unsaid(parts[-1].shown or "", said[-1]) is None
