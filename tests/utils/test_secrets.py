"""Tokens, keys and passwords are nowhere in what a run shows, logs or writes."""

import logging
from pathlib import Path

import pytest
import yaml

from burnish.config import load_config, to_shown_yaml, to_yaml
from burnish.config.schema import leaves
from burnish.trainer.main_ppo import main, ray_init_kwargs
from burnish.utils import secrets
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import HIDDEN, HidingFormatter, is_secret_name, redact, redact_text
from tests.e2e.runs import tiny_config, tiny_run

PLANTED = "sk-planted-3f9a77c1"


@pytest.fixture(autouse=True)
def forget():
    """What one test hides is not known to the next."""
    secrets._known.clear()
    yield
    secrets._known.clear()


@pytest.mark.parametrize(
    "name",
    ["hf_token", "HF_TOKEN", "WANDB_API_KEY", "api_key", "apiKey", "reward.reward_kwargs.password", "AWS_SECRET_ACCESS_KEY",
     "db_credentials", "client_secret", "Authorization"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["api_key_env", "tokenizer_path", "stop_token_ids", "max_num_batched_tokens", "prompt_key", "key", "pad_token", "eos_token",
     "token_file", "", "loss_agg_mode", "estimated_tokens_per_request"],
)  # fmt: skip
def test_names_that_look_like_them_are_left_alone(name):
    assert not is_secret_name(name)


def test_no_key_of_the_tree_is_hidden_by_its_name():
    assert [key for key in leaves() if is_secret_name(key)] == []


def test_a_configuration_keeps_its_shape_and_its_other_values():
    given = {"a": {"api_key": PLANTED, "n": 3}, "list": [{"token": PLANTED}, "x"], "max_token": 5, "password": None}
    assert redact(given) == {
        "a": {"api_key": HIDDEN, "n": 3}, "list": [{"token": HIDDEN}, "x"], "max_token": 5, "password": None,
    }  # fmt: skip
    assert given["a"]["api_key"] == PLANTED, "the run itself needs it"


@pytest.mark.parametrize(
    "text",
    [f"x.api_key={PLANTED}: no such key", f"{{'token': '{PLANTED}'}}", f"token='{PLANTED}'", f"++a.b.password={PLANTED}",
     f"https://me:{PLANTED}@host/x", f"Authorization: Bearer {PLANTED}", f"{{api_key:{PLANTED},n:1}}",
     f"error:token={PLANTED}", f"Failed: api_key={PLANTED}", f"env=HF_TOKEN={PLANTED}", f"2token={PLANTED}"],
)  # fmt: skip
def test_texts_lose_the_value_and_keep_the_rest(text):
    shown = redact_text(text)
    assert PLANTED not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text",
    ["the token: it ends a turn", "eos_token='<eos>'", "max_token=5", "loss_agg_mode=token-mean", "token_ids=[1,2]",
     "reward.api_key_env=MY_KEY", "see http://host:8000/v1"],
)  # fmt: skip
def test_ordinary_texts_stay_as_they_are(text):
    assert redact_text(text) == text


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "unit", ["a", "a.", "-", "a_", " ", "a ", "a:", "a=", "token=", "token: ", "'", "token='", "&a", "?a=", "://a"]
)
def test_long_texts_take_linear_time(unit):
    text = "word" + unit * (200_000 // len(unit))
    assert redact_text(text).startswith("word")


def test_what_the_environment_holds_is_hidden_wherever_it_turns_up(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", PLANTED)
    assert PLANTED not in redact_text(f"the server said: {PLANTED} is expired")


def test_what_a_configuration_held_is_hidden_in_later_texts():
    redact({"password": PLANTED})
    assert redact_text(f"refused: {PLANTED}") == f"refused: {HIDDEN}"


def test_log_records_and_their_tracebacks_are_hidden():
    formatter = HidingFormatter("%(message)s")
    try:
        raise ValueError(f"api_key={PLANTED}")
    except ValueError as error:
        record = logging.LogRecord("burnish", logging.ERROR, "f", 1, "token=%s", (PLANTED,), (ValueError, error, None))
    text = formatter.format(record)
    assert PLANTED not in text
    assert "ValueError" in text


KEY = f"+reward.custom_reward_function.reward_kwargs.api_key={PLANTED}"
RAY = f"ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={PLANTED}"


def test_the_shown_configuration_hides_what_the_true_one_has(tmp_path, capsys):
    config = tiny_config(tmp_path, KEY, f"+{RAY}")
    assert PLANTED in to_yaml(config)
    shown = to_shown_yaml(config)
    assert PLANTED not in shown
    assert yaml.safe_load(shown)["data"] == yaml.safe_load(to_yaml(config))["data"]
    assert ray_init_kwargs(config)["runtime_env"]["env_vars"]["HF_TOKEN"] == PLANTED, "workers get the true one"
    argv = ["recipe=demo", KEY, f"+{RAY}", "--cfg", "job"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert PLANTED not in printed.out + printed.err
    assert HIDDEN in printed.out


def test_the_error_about_a_secret_does_not_tell_it(capsys):
    with pytest.raises(ConfigError) as caught:
        load_config(["recipe=demo", f"+trainer.wandb_api_key={PLANTED}"])
    assert PLANTED not in str(caught.value)
    assert main(["recipe=demo", f"+trainer.wandb_api_key={PLANTED}"]) == 2
    printed = capsys.readouterr()
    assert PLANTED not in printed.out + printed.err


def test_a_planted_secret_is_nowhere_in_the_folder_or_the_output_of_a_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PLANTED_TOKEN", f"env-{PLANTED}")
    function = tmp_path / "own.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, api_key):\n    return float(len(api_key) > 9)\n"
    )
    run = tmp_path / "run"
    loggers = "[file,console" + (",tensorboard]" if _has_tensorboard() else "]")
    own = [f"reward.custom_reward_function.path={function}", KEY, f"trainer.logger={loggers}"]
    summary = tiny_run(run, *own, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={run / 'dumps'}")
    assert summary.status == 0
    assert summary.metrics["critic/score/mean"] == 1.0, "the function got the true key"
    files = [path for path in Path(run).rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in files)
    assert [path for path in files if PLANTED.encode() in path.read_bytes()] == []
    printed = capfd.readouterr()
    assert PLANTED not in printed.out + printed.err


def _has_tensorboard() -> bool:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True
