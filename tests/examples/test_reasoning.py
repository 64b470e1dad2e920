"""examples/reasoning: its data, its reward, its scripts."""

import json
import os
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.results import pages
from burnish.config import load_config, load_sft_config
from burnish.reward.functions.countdown import evaluate
from examples.reasoning import data
from examples.reasoning.reward import FORMAT_SCORE, compute_score

pytest.importorskip("reasoning_gym")
ROOT = Path(__file__).parents[2]
SCRIPTS = ("grpo", "dapo", "ppo", "lora", "vllm")


def read(path):
    return [json.loads(line) for line in path.open(encoding="utf-8")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of every task: {task: {split: rows}}."""
    found = {}
    for task in data.TASKS:
        folder = tmp_path_factory.mktemp(task)
        paths = data.make_task(task, train=40, test=20, seed=0, parameters={}, folder=folder)
        assert [path.name for path in paths] == ["train.jsonl", "test.jsonl", "sft.jsonl"]
        found[task] = {path.stem: read(path) for path in paths}
    return found


@pytest.mark.parametrize("task", data.TASKS)
def test_the_answers_that_are_taught_score_one(task, made):
    for row, conversation in zip(made[task]["train"], made[task]["sft"], strict=True):
        question, answer = conversation["messages"]
        assert [question] == row["prompt"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        result = score(row, answer["content"])
        assert result["acc"] is True
        assert result["score"] == 1.0


def score(row, response):
    return compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic"])
def test_the_right_answer_is_the_expressions_value(task, made):
    for row in made[task]["train"] + made[task]["test"]:
        question = row["prompt"][0]["content"].splitlines()[0].rstrip(".= ")
        expression = question.partition(": ")[2] or question.removeprefix("Calculate ")
        assert evaluate(expression)[0] == Fraction(row["reward_model"]["ground_truth"])


def test_no_held_out_problem_is_trained_on_in_whatever_wording(made):
    def summands(row):
        expression = row["prompt"][0]["content"].partition(": ")[2].partition("=")[0].replace(" ", "")
        return sorted(int(term) for term in expression.replace("-", "+-").split("+") if term)

    def games(row):
        return sorted(row["extra_info"]["numbers"]), row["extra_info"]["target"]

    def value_of_numbers(row):
        expression = row["prompt"][0]["content"].splitlines()[0].removeprefix("Calculate ")
        return sorted(re.findall(r"\d+", expression)), row["reward_model"]["ground_truth"]

    for task, key in (("chain_sum", summands), ("countdown", games), ("basic_arithmetic", value_of_numbers)):
        problems = [key(row) for split in ("train", "test") for row in made[task][split]]
        assert all(problem not in problems[:place] for place, problem in enumerate(problems))


def test_the_same_seed_makes_the_same_rows_and_another_one_others(tmp_path):
    def rows(seed):
        paths = data.make_task("chain_sum", train=10, test=5, seed=seed, parameters={}, folder=tmp_path / str(seed))
        return [path.read_text() for path in paths]

    first = rows(3)
    assert rows(3) == first
    assert rows(100_000) != first


def test_too_few_problems_and_unknown_parameters_are_sentences(monkeypatch, capsys, tmp_path):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["data", "--task", "chain_sum", "--out", str(tmp_path / "x"), *words])
        with pytest.raises(SystemExit) as ended:
            data.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    small = ("--set", "max_terms=2", "--set", "max_digits=1", "--train", "300")
    assert "different problems were found in" in run(*small)
    assert "max_digit" in run("--set", "max_digit=1")
    assert "must be at least 1" in run("--test", "0")
    assert not (tmp_path / "x").exists()


NUMBER = ("reasoning/chain_sum", "9", None)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("9", True), (" 9.\n", True), ("9.0", True), ("The answer is 9.", True), ("4 + 7 = 11, 11 - 2 = 9", True),
        ("<answer>9</answer>", True), (r"So it is \boxed{9}.", True), ("8, no, 9", True),
        ("The answer is 9 (since 11 - 2 = 9)", True),
        ("", False), ("nine", False), ("-9", False), ("9, no, 10", False), ("90", False), ("0.9", False), ("19", False),
        ("<answer>8</answer>, or 9", False), ("9/2", False), ("18 / 2", False), ("18 - 9", False), ("( 0 + 9 )", False),
        (r"\frac{18}{2}", False), ("1 * (9)", False), (r"18 \div 2", False), ("The answer is 18/2.", False), ("18 / 2 =", False),
        ("4 + 7 - 2 is 9", True), ("18 / 2 = 9", True), ("- it is 9", True), (r"\frac{18}{2} = 9", True), ("18 - 9 = 9.", True),
    ],
)  # fmt: skip
def test_the_last_number_of_an_answer_counts(response, right):
    result = compute_score(NUMBER[0], response, NUMBER[1], NUMBER[2])
    assert (result["acc"], result["score"]) == (right, float(right))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("5 - 2 + 7", 1.0), ("(7 + 5) - 2 = 10", 1.0), ("<answer>7+5-2</answer>", 1.0), ("We try.\n7 + 5 - 2.", 1.0),
        ("7 + 5 + 2", FORMAT_SCORE), ("7 * 5 * 2 = 10", FORMAT_SCORE), ("2 * 5", 0.0), ("5 + 5", 0.0), ("10", 0.0),
        ("7 + 5 - 2 + 0", 0.0), ("72 - 5", 0.0), ("7 ** 5 ** 2", 0.0), ("", 0.0), ("it cannot be done", 0.0),
        ("10 = 7 + 5 - 2", 1.0), ("(5 − 2) + 7", 1.0), ("**5 - 2 + 7**", 1.0), ("**5 - 2 + 7 = 10**.", 1.0), ("`5-2+7`", 1.0),
        (r"\boxed{7 + 5 \times 1}", 0.0), ("$7 + 5 - 2$", 1.0), (r"\(7 + 5 - 2\)", 1.0), ("7 + 5 - 2 = 11", FORMAT_SCORE),
        ("7 + 5 + 2 = 7 + 5 - 2", FORMAT_SCORE), ("7 + 5 - 2 =", 1.0), ("10 = 10", 0.0),
        ("__import__('os').getcwd() + 7 + 5 - 2", 0.0), ("7 + 5 - 2\n\nor so", 0.0), ("7 / (5 - 5)", 0.0),
    ],
)  # fmt: skip
def test_countdown_wants_every_number_once_and_the_target(response, expected):
    result = compute_score("reasoning/countdown", response, "10", {"numbers": [2, 7, 5]})
    assert result["score"] == expected
    assert result["acc"] == (expected == 1.0)


@pytest.mark.parametrize("task", data.TASKS)
def test_who_repeats_the_question_has_not_answered_it(task, made):
    for row in made[task]["train"] + made[task]["test"]:
        question = row["prompt"][0]["content"]
        for said in (question, question.splitlines()[0], question.splitlines()[0].partition(": ")[2]):
            assert score(row, said)["score"] == 0.0, said


def test_a_sign_may_stand_apart_from_its_number():
    assert compute_score(NUMBER[0], "27 - 40 = - 13", "-13", None)["acc"]
    assert not compute_score(NUMBER[0], "40 - 27 = - 13", "13", None)["acc"]


def test_countdown_agrees_with_reasoning_gyms_own_scorer():
    import reasoning_gym

    task = reasoning_gym.create_dataset("countdown", seed=5, size=1)
    draw = random.Random(0)
    num_right = 0
    for _ in range(60):
        numbers = [draw.randint(1, 9) for _ in range(3)]
        used = numbers if draw.random() < 0.8 else [*numbers[:2], draw.randint(1, 9)]
        a, b, c = draw.sample(used, 3)
        first, second = draw.choice("+-*/"), draw.choice("+-*/")
        expression = draw.choice(
            (f"{a} {first} {b} {second} {c}", f"({a} {first} {b}) {second} {c}", f"{a} {first} ({b})")
        )
        target = draw.choice((10, round(float(evaluate_or(expression, 10)))))
        entry = {"metadata": {"numbers": numbers, "target": target}}
        theirs = task.score_answer(expression, entry) == 1.0
        ours = compute_score("reasoning/countdown", expression, str(target), {"numbers": numbers})["acc"]
        assert ours == theirs, (expression, entry)
        num_right += ours
    assert 5 < num_right < 55


def evaluate_or(expression, otherwise):
    try:
        return evaluate(expression)[0]
    except ValueError:
        return otherwise


def test_a_game_without_its_numbers_is_an_error():
    with pytest.raises(ValueError, match=r"extra_info\['numbers'\]"):
        compute_score("reasoning/countdown", "1 + 2", "3", {})


@pytest.mark.parametrize("page", ["README.md", "examples/reasoning/README.md"])
def test_the_tables_of_a_page_are_those_of_its_results(page):
    """Where this fails: python -m benchmarks.results.pages README.md examples/reasoning/README.md"""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    assert pages.fill(text, path, draw=False) == text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target


# ----------------------------------------------------------------------------------------------------- the scripts


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """What each script hands to burnish: a stand-in for Python writes its arguments down."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "data").mkdir()
    for name in ("train", "test", "sft"):
        (folder / "data" / f"{name}.jsonl").write_text("{}\n")
    stand_in = folder / "python"
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)

    def run(script, *words, **variables):
        environment = os.environ | {
            "PYTHON": str(stand_in), "DATA": str(folder / "data"), "MODEL": "examples/tiny_model/model", "SEED": "3",
            "RUN": str(folder / "run"), **variables,
        }  # fmt: skip
        command = ["bash", str(ROOT / "examples" / "reasoning" / f"{script}.sh"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
        return done.stdout.splitlines()

    return run


@pytest.fixture
def in_root(monkeypatch):
    """Scripts name files of the source tree."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("script", ["grpo", "dapo", "ppo"])
def test_a_run_of_few_prompts_is_one_variable(script, typed, in_root):
    words = typed(script, "actor_rollout_ref.rollout.name=native", PROMPTS="16")
    config = load_config(words[3:])
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n in (64, 128)
    assert config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size in (1, 2)


def test_the_commands_of_the_page_load(typed, in_root):
    page = (ROOT / "examples" / "reasoning" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^((?:\w+=\S+ )*)bash examples/reasoning/(\w+)\.sh([^#\n]*)", page, re.MULTILINE)
    assert len(found) >= 4
    for variables, script, words in found:
        given = dict(word.split("=", 1) for word in variables.split())
        given.pop("MODEL", None)
        load_config(typed(script, *words.split(), **given)[3:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_one_training_command_that_takes_further_keys(script, typed, in_root):
    words = typed(script, "trainer.total_training_steps=7", "actor_rollout_ref.rollout.name=native")
    assert words[:3] == ["-m", "burnish.cli", "train"]
    config = load_config(words[3:])
    assert config.trainer.total_training_steps == 7
    assert (config.trainer.seed, config.data.seed, config.actor_rollout_ref.rollout.seed) == (3, 3, 3)
    assert config.data.max_response_length == 24
    # As many responses a step for every recipe, so that curves over steps compare.
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n in (512, 1024)


def test_recipes_differ_in_what_they_are_called_after(typed, in_root):
    loaded = {name: load_config([*typed(name)[3:], "actor_rollout_ref.rollout.name=native"]) for name in SCRIPTS}
    estimators = {name: config.algorithm.adv_estimator for name, config in loaded.items()}
    assert estimators == {"grpo": "grpo", "dapo": "grpo", "ppo": "gae", "lora": "grpo", "vllm": "grpo"}
    assert [name for name, config in loaded.items() if config.actor_rollout_ref.actor.use_kl_loss] == [
        "grpo",
        "lora",
        "vllm",
    ]
    assert [name for name, config in loaded.items() if config.algorithm.filter_groups.enable] == ["dapo"]
    assert [name for name, config in loaded.items() if config.actor_rollout_ref.model.lora_rank] == ["lora"]
    assert "actor_rollout_ref.rollout.name=vllm" in typed("vllm")


def test_the_supervised_start_is_one_command_and_the_export_of_what_it_leaves(typed, in_root):
    words = typed("sft", "optim.lr=1e-4")
    end = words.index("-m", 3)
    assert words[:3] == ["-m", "burnish.cli", "sft"]
    config = load_sft_config(words[3:end])
    assert (config.optim.lr, config.trainer.seed) == (1e-4, 3)
    assert config.data.train_files == [words[3].partition("=")[2]]
    assert words[end : end + 3] == ["-m", "burnish.cli", "export"]
    assert words[end + 3] == config.trainer.default_local_dir
