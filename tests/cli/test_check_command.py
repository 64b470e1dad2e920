"""``burnish check``: every mistake of a run at once, before it starts, in seconds; right runs pass."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.cli.check import run_check
from tests.e2e.runs import TINY

MODEL = f"actor_rollout_ref.model.path={TINY / 'model'}"
DATA = TINY / "data" / "train.jsonl"


def base(tmp_path, *overrides: str, train=None) -> list[str]:
    """A sound run, on the first rows of the demo's: rendering thousands of them would take longer than all other checks."""
    if train is None:
        train = tmp_path / "first.jsonl"
        train.write_text("".join(DATA.read_text().splitlines(keepends=True)[:256]))
    return [
        "algorithm.adv_estimator=grpo",
        MODEL,
        f"data.train_files={train}",
        "data.val_files=null",
        "data.train_batch_size=8",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        *overrides,
    ]


def report(capsys, argv) -> tuple[int, dict]:
    """The exit status and the JSON."""
    capsys.readouterr()
    status = run_check([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def errors(result, area=None) -> list[str]:
    return [one["message"] for one in result["findings"] if one["level"] == "error" and area in (None, one["area"])]


def warnings(result, area=None) -> list[str]:
    return [one["message"] for one in result["findings"] if one["level"] == "warning" and area in (None, one["area"])]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number=1, **extra):
    return {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "data_source": "burnish/arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {},
        **extra,
    }


def test_a_sound_run_passes_and_says_what_it_will_be(tmp_path, capsys):
    status, result = report(capsys, base(tmp_path, train=DATA))
    assert (status, result["ok"], result["errors"]) == (0, True, 0)
    assert result["plan"]["samples"] == 32
    assert result["data"]["train"]["rows"] == 3072
    assert set(result["memory"]["policy"]["stages"]) == {"gen", "update_actor"}
    assert result["reward"]["data.train_files"]["best_scores"] == [1.0, 1.0, 1.0]
    assert not (tmp_path / "run").exists(), "a check leaves nothing behind"


def test_the_report_for_people_has_the_plan_and_a_verdict(tmp_path, capsys):
    assert run_check(base(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "8 prompts x 4 responses = 32 samples" in shown
    assert shown.strip().splitlines()[-1].startswith("Ready to train")
    assert run_check(base(tmp_path, "data.train_batchsize=8")) == 1
    assert "Not ready: 1 error to mend" in capsys.readouterr().out


def test_several_wrong_settings_are_told_at_once(tmp_path, capsys):
    wrong = ["data.train_batchsize=4", "algorithm.adv_estimator=grpoo", "actor_rollout_ref.rollout.temperature=-1"]
    status, result = report(capsys, base(tmp_path, *wrong))
    assert status == 1
    for words in ("data.train_batch_size", "grpoo", "temperature=-1"):
        assert any(words in message for message in errors(result, "config")), words
    assert len(errors(result)) == 3, "what follows from a setting that is left out is not told"


# C01
@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.actor.ppo_mini_batch_size=0"],
        ["data.train_batch_size=9", "actor_rollout_ref.actor.ppo_mini_batch_size=3", "trainer.n_gpus_per_node=5"],
    ],
)
def test_batches_that_cannot_be_cut_are_errors(tmp_path, capsys, overrides):
    status, result = report(capsys, base(tmp_path, *overrides))
    assert status == 1
    assert any("ppo_mini_batch_size" in message for message in errors(result, "config"))


# C03
def test_prompts_and_samples_are_told_apart(tmp_path, capsys):
    _, result = report(
        capsys,
        base(tmp_path, "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    )
    plan = result["plan"]
    assert (plan["prompts"], plan["samples"], plan["updates"], plan["samples_per_update"]) == (8, 40, 2, 20)


# C05
@pytest.mark.parametrize(
    ("override", "words"),
    [("+data.unknown_thing=1", "data.unknown_thing"), ("actor_rollout_ref.rollout.tempratur=1", "temperature")],
)
def test_an_unknown_key_is_an_error_with_a_guess(tmp_path, capsys, override, words):
    status, result = report(capsys, base(tmp_path, override))
    assert status == 1
    assert any(words in message for message in errors(result, "config"))


# C07
def test_validation_has_a_number_of_samples_of_its_own(tmp_path, capsys):
    val = [f"data.val_files={TINY / 'data' / 'test.jsonl'}", "data.val_batch_size=3"]
    keys = "actor_rollout_ref.rollout.val_kwargs"
    status, result = report(
        capsys, base(tmp_path, *val, f"{keys}.n=3", f"{keys}.do_sample=true", f"{keys}.temperature=1")
    )
    assert (status, errors(result)) == (0, [])


# C09
@pytest.mark.parametrize(
    ("override", "is_right"),
    [
        ('actor_rollout_ref.actor.optim.lr="1e-6"', True),
        ("actor_rollout_ref.actor.optim.lr=small", False),
        ("data.shuffle=maybe", False),
        ("data.train_max_samples=none", False),
        ("trainer.experiment_name=${oc.env:NO_SUCH_VARIABLE_HERE}", False),
    ],
)
def test_values_are_typed_or_refused(tmp_path, capsys, override, is_right):
    status, result = report(capsys, base(tmp_path, override))
    assert (status == 0) is is_right, errors(result)


# D14
def test_one_bad_row_among_a_thousand_is_named_in_seconds(tmp_path, capsys):
    rows = [row(number) for number in range(1000)]
    rows[900]["prompt"] = 17
    start = time.perf_counter()
    status, result = report(capsys, base(tmp_path, train=write(tmp_path / "train.jsonl", rows)))
    assert time.perf_counter() - start < 15
    assert status == 1
    (message,) = errors(result, "data")
    assert "train.jsonl, row 900" in message


def test_all_bad_rows_are_told_with_column_and_what_was_expected(tmp_path, capsys):
    rows = [row(number) for number in range(30)]
    rows[3]["prompt"], rows[21]["prompt"] = 17, None
    del rows[25]["prompt"]
    status, result = report(capsys, base(tmp_path, train=write(tmp_path / "train.jsonl", rows)))
    assert status == 1
    problems = result["data_problems"]["train"]
    assert [problem["row"] for problem in problems] == [3, 21, 25]
    assert all(problem["column"] == "prompt" for problem in problems)
    assert len(errors(result, "data")) == 3


# R17
@pytest.mark.parametrize("source", ["", "my/own", "/data/gsm8k"])
def test_a_data_source_without_a_function_is_named_with_the_known_ones(tmp_path, capsys, source):
    rows = [row(number) for number in range(20)]
    rows[7]["data_source"] = source
    status, result = report(capsys, base(tmp_path, train=write(tmp_path / "train.jsonl", rows)))
    assert status == 1
    messages = " ".join(errors(result))
    assert "row 7" in messages
    assert "openai/gsm8k" in messages
    assert "reward.custom_reward_function.path" in messages


def custom(tmp_path, body: str) -> str:
    path = tmp_path / "own_reward.py"
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n")
    return f"reward.custom_reward_function.path={path}"


def test_a_function_that_gives_its_own_truth_nothing_is_found_out(tmp_path, capsys):
    never = custom(tmp_path, "    return 1.0 if solution_str == '<final>' + str(ground_truth) else 0.0")
    status, result = report(capsys, base(tmp_path, never))
    assert status == 0, errors(result)
    (message, *_) = warnings(result, "reward")
    assert "scores 0 at best" in message
    assert "row 0" in message


@pytest.mark.parametrize("form", ["f'#### {ground_truth}'", "str(ground_truth)", "f'\\\\boxed{{{ground_truth}}}'"])
def test_a_function_finds_the_truth_in_one_of_the_usual_forms(tmp_path, capsys, form):
    right = custom(tmp_path, f"    return float({form} in solution_str)")
    status, result = report(capsys, base(tmp_path, right))
    assert (status, warnings(result, "reward")) == (0, []), errors(result)
    assert result["reward"]["data.train_files"]["best_scores"] == [1.0, 1.0, 1.0]


def test_a_function_that_rewards_everything_alike_is_found_out(tmp_path, capsys):
    status, result = report(capsys, base(tmp_path, custom(tmp_path, "    return 1.0")))
    assert status == 0
    assert any("an empty response 1" in message for message in warnings(result, "reward"))


def test_a_function_that_fails_is_an_error_with_its_reason(tmp_path, capsys):
    status, result = report(capsys, base(tmp_path, custom(tmp_path, "    return ground_truth['no such']")))
    assert status == 1
    assert any("TypeError" in message or "no score" in message for message in errors(result, "reward")), result


def test_memory_is_planned_for_a_device_that_is_not_here(tmp_path, capsys):
    status, result = report(capsys, [*base(tmp_path), "--device", "H100 80GB"])
    assert status == 0
    assert result["memory"]["policy"]["device"] == "H100"
    assert result["time"]["seconds"] > 0
    status, result = report(capsys, [*base(tmp_path), "--device=Abacus"])
    assert status == 1
    assert "Abacus" in errors(result)[0]


def test_checkpoints_that_the_disk_does_not_hold_are_an_error(tmp_path, capsys, monkeypatch):
    from burnish.trainer.preflight import disk

    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    status, result = report(capsys, base(tmp_path, "trainer.save_freq=1"))
    assert status == 1
    assert "max_actor_ckpt_to_keep" in errors(result, "disk")[0]


def test_a_cluster_that_does_not_answer_is_an_error_at_once(tmp_path, capsys):
    argv = base(tmp_path, "trainer.controller=ray", "ray_kwargs.ray_init.address=127.0.0.1:1")
    start = time.perf_counter()
    status, result = report(capsys, argv)
    assert time.perf_counter() - start < 20
    assert status == 1
    assert "The Ray cluster at 127.0.0.1:1 does not answer" in errors(result, "cluster")[0]


@pytest.mark.slow
def test_ten_thousand_rows_are_checked_in_fifteen_seconds(tmp_path, capsys):
    path = write(tmp_path / "train.jsonl", [row(number) for number in range(10_000)])
    start = time.perf_counter()
    status, result = report(capsys, base(tmp_path, train=path))
    assert status == 0
    assert result["data"]["train"]["rows"] == 10_000
    assert time.perf_counter() - start < 15


KEYS = [
    "data.train_batch_size", "data.max_prompt_length", "actor_rollout_ref.rollout.n", "algorithm.adv_estimator",
    "actor_rollout_ref.actor.optim.lr", "trainer.device", "trainer.nnodes", "critic.enable", "reward.on_error",
    "actor_rollout_ref.model.path", "data.train_files", "trainer.logger", "actor_rollout_ref.rollout.name", "recipe",
    "data.truncation", "reward.reward_manager.name", "actor_rollout_ref.actor.policy_loss.loss_mode", "no.such.key", "",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["-1", "0", "null", "true", "[]", "{}", "[1,2]", "{a:1}", "1e400", "nan", "'", "${x", "é", "a=b", "a,b"]
    ),
    st.text(max_size=12),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["", "+", "~", "++"]), st.sampled_from(KEYS), VALUES), min_size=1, max_size=3)
)
def test_no_setting_whatever_ends_in_a_traceback(tmp_path, capsys, wrong):
    rows = write(tmp_path / "few.jsonl", [row(number) for number in range(16)])
    argv = base(tmp_path, *(f"{sign}{key}={value}" for sign, key, value in wrong), train=rows)
    status, result = report(capsys, argv)
    assert status in (0, 1)
    assert result["ok"] is (status == 0)


def test_help_is_of_this_command_and_names_its_own_options(capsys):
    with pytest.raises(SystemExit) as ended:
        run_check(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "usage: burnish check" in told
    assert "--json" in told
    assert "--device" in told


def test_a_model_that_neither_disk_nor_hub_has_is_told_once_with_its_key_and_the_ways_out(tmp_path, capsys):
    status, result = report(capsys, base(tmp_path, "actor_rollout_ref.model.path=no/such"))
    assert status == 1
    (error,) = errors(result)
    assert error.startswith("actor_rollout_ref.model.path=no/such: the hub is not asked (HF_HUB_OFFLINE")
    assert "burnish model smollm2 DIR" in error


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor_rollout_ref.model.tokenizer_path=no/such"], "actor_rollout_ref.model.tokenizer_path"),
        (["algorithm.adv_estimator=gae", "critic.model.path=no/such"], "critic.model.path"),
        (
            ["reward.reward_model.enable=true", "reward.reward_model.model_path=no/such"],
            "reward.reward_model.model_path",
        ),
    ],
)
def test_every_model_that_the_hub_is_to_give_is_looked_for_before_the_run(tmp_path, capsys, overrides, key):
    status, result = report(capsys, base(tmp_path, *overrides))
    assert status == 1
    assert [error for error in errors(result) if error.startswith(f"{key}=no/such: the hub is not asked")]


def test_a_function_that_fails_on_some_responses_is_a_warning_with_their_number(tmp_path, capsys):
    file = tmp_path / "often.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float('nan') if not solution_str else float(ground_truth in solution_str)\n"
    )
    status, result = report(
        capsys, base(tmp_path, f"reward.custom_reward_function.path={file}", "reward.num_workers=0")
    )
    assert status == 0
    assert "fails on 3 of" in warnings(result, "reward")[0]


def test_a_data_source_without_a_function_is_told_once_without_a_traceback(tmp_path, capsys):
    path = write(tmp_path / "train.jsonl", [row(number) | {"data_source": "nobody"} for number in range(16)])
    status, result = report(capsys, base(tmp_path, train=path))
    assert status == 1
    assert [one["area"] for one in result["findings"] if "nobody" in one["message"]] == ["data"]
    assert "Traceback" not in str(result)


def test_a_reward_file_that_is_not_there_is_told_once(tmp_path, capsys):
    status, result = report(capsys, base(tmp_path, "reward.custom_reward_function.path=nowhere.py"))
    assert status == 1
    (said,) = [message for message in errors(result) if "nowhere.py" in message]
    assert said.startswith("reward.custom_reward_function.path=nowhere.py: there is no such file")


def test_it_says_what_right_and_empty_answers_score(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 2.0 if solution_str == str(ground_truth) else 0.5 * bool(solution_str) - 1\n"
    )
    _, result = report(capsys, base(tmp_path, f"reward.custom_reward_function.path={tmp_path / 'own.py'}"))
    notes = [one["message"] for one in result["findings"] if (one["area"], one["level"]) == ("reward", "note")]
    assert notes == ["data.train_files: right answers to 3 sample rows score 2, empty ones -1."]


def test_prompts_that_ask_nothing_are_a_warning_with_their_number_and_the_first(tmp_path, capsys):
    rows = [row(number, prompt=" " if number in (3, 5) else f"{number}+1=") for number in range(8)]
    file = write(tmp_path / "train.jsonl", rows)
    status, result = report(capsys, base(tmp_path, train=file))
    (warning,) = warnings(result, "data")
    assert status == 0
    assert warning.startswith("data.train_files: 2 of 8 prompts are empty")
    assert f"the first: {file}, row 3 (line 4)" in warning
    assert result["data"]["train"]["empty"] == 2


def test_an_empty_file_is_called_empty(tmp_path, capsys):
    empty = write(tmp_path / "empty.jsonl", [])
    _, result = report(capsys, base(tmp_path, train=empty))
    assert errors(result) == [
        f"data.train_files=['{empty}']: it holds no rows. A row is a line of .jsonl, an entry of .json, a record."
    ]


def test_an_entry_that_the_models_configuration_does_not_have_is_an_error(tmp_path, capsys):
    override = "+actor_rollout_ref.model.override_config.rms_norm_epps=1e-5"
    status, result = report(capsys, base(tmp_path, override))
    assert status == 1
    assert any("override_config.rms_norm_epps" in message for message in errors(result, "config"))
