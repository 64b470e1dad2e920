"""`burnish conformance`: a table or JSON, an exit status, and sentences for what is asked wrongly."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from burnish.cli.app import app
from burnish.cli.conformance import run_conformance
from burnish.utils.errors import ConfigError

MUTANTS = "tests.conformance.mutants"


def conformance(*, only=(), estimator=None, loss=None, reference=None, as_json=False, keys=()) -> int:
    return run_conformance(only=only, estimator=estimator, loss=loss, reference=reference, as_json=as_json, keys=keys)


def test_the_table_has_a_row_for_each_algorithm_and_says_what_does_not_apply(capsys):
    assert conformance(only=["gae", "token-sum"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    gae = ["pass", "pass", "-", "pass", "pass", "-", "-", "-", "-", "pass", "pass", "pass", "pass"]
    assert rows["gae"] == gae
    assert rows["token-sum"].count("-") == 2
    assert "advantage estimator" in out
    assert "19 of 19 checks of 2 algorithms passed" in out


def test_one_name_may_belong_to_an_estimator_and_a_loss(capsys):
    assert conformance(only=["gpg"], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["algorithms"]
    assert [algorithm["kind"] for algorithm in found] == ["advantage estimator", "policy loss"]


def test_what_fails_is_said_in_a_sentence_and_ends_in_status_1(capsys):
    assert conformance(loss=f"{MUTANTS}:no_dp_size") == 1
    out = capsys.readouterr().out
    assert "fail" in out
    assert f"{MUTANTS}:no_dp_size, ranks" in out
    assert "On two ranks" in out
    assert "but it must be" in out


def test_json_has_every_check_and_every_failure(capsys):
    assert conformance(estimator=f"{MUTANTS}:by_position", as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    (algorithm,) = report["algorithms"]
    assert report["failed"] == len(algorithm["failures"]) > 0
    assert algorithm["checks"]["group interleaving"] == "fail"
    assert algorithm["checks"]["hand answer"] == "-"
    assert "behind each other" in algorithm["failures"]["group interleaving"]


def test_a_reference_adds_the_naive_loop(capsys):
    assert conformance(estimator=f"{MUTANTS}:centered", reference=f"{MUTANTS}:centered_loop", as_json=True) == 0
    (algorithm,) = json.loads(capsys.readouterr().out)["algorithms"]
    assert algorithm["checks"]["naive loop"] == "pass"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"only": ["grppo"]}, "--only=grppo.*Did you mean 'grpo'.*Known: .*vanilla"),
        ({"estimator": "no.such:thing"}, "--estimator=no.such:thing: .*cannot be loaded: .*PYTHONPATH"),
        ({"loss": f"{MUTANTS}:nothing"}, "--loss=.*nothing: .*cannot be loaded: .*mutants.py has no 'nothing'"),
        ({"estimator": "grpo"}, "--estimator=grpo: this is one of burnish's own, which --only=grpo checks"),
        ({"loss": "my_losses.mine"}, "--loss=my_losses.mine: .* named as package.module:function"),
        ({"estimator": ":"}, "--estimator=:: .* named as package.module:attribute"),
        ({"estimator": f"{MUTANTS}:math"}, "--estimator=.*:math: this is module, not a function"),
        ({"estimator": "collections:OrderedDict"}, "--estimator=.*: this is a class, and a function is needed"),
        ({"loss": f"{MUTANTS}:centered"}, r"--loss=.*called with \(old_log_prob, .*parameters of this one are \("),
        ({"reference": "a:b"}, "--reference=a:b is the naive loop of one algorithm: give it with either"),
        ({"estimator": "a:b", "loss": "c:d", "reference": "a:b"}, "give it with either"),
        ({"estimator": f"{MUTANTS}:centered", "reference": "no.such:thing"}, "--reference=no.such:thing"),
    ],
)
def test_what_cannot_be_checked_is_refused(asked, answer):
    with pytest.raises(ConfigError, match=answer):
        conformance(**asked)


WITH_KEYS = """\
import torch
from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses import loss_inputs


def scaled(token_level_rewards, response_mask, config):
    scores = torch.where(response_mask.bool(), token_level_rewards, 0.0).sum(-1, keepdim=True)
    advantages = torch.where(response_mask.bool(), config.custom["alpha"] * scores, 0.0)
    return advantages, advantages.clone()


def scaled_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    mask, _, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses = -config.policy_loss.custom["tau"] * advantages * log_prob
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), {}
"""

WRONG_FORMS = """\
def one_tensor(token_level_rewards, response_mask):
    return token_level_rewards


def per_row(token_level_rewards, response_mask):
    scores = token_level_rewards.sum(-1)
    return scores, scores


def fails(token_level_rewards, response_mask):
    raise ValueError("boom")


def nothing(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    pass


def detached(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return log_prob.detach().sum(), {}
"""


def test_what_returns_the_wrong_form_fails_every_check_in_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_forms.py").write_text(WRONG_FORMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for option, name, sentence in (
        ("estimator", "one_tensor", "returned a Tensor of shape (18, 9). It must return (advantages, returns)"),
        ("estimator", "per_row", "returned (a Tensor of shape (18,), a Tensor of shape (18,))."),
        (
            "estimator",
            "fails",
            "It ends in ValueError: boom (wrong_forms.py, line 11). It was called with 18 rows in 6",
        ),
        ("loss", "nothing", "returned None. It must return (loss, metrics)"),
        ("loss", "detached", "returned a loss without a gradient"),
    ):
        assert conformance(**{option: f"wrong_forms:{name}"}) == 1
        out = capsys.readouterr().out
        assert f"wrong_forms:{name}, every check\n" in out
        assert out.count(sentence) == 1
        assert "checks of 1 algorithm passed" in out


def test_keys_of_ones_own_reach_estimator_and_loss(tmp_path, monkeypatch, capsys):
    (tmp_path / "with_keys.py").write_text(WITH_KEYS)
    monkeypatch.syspath_prepend(str(tmp_path))
    both = {"estimator": "with_keys:scaled", "loss": "with_keys:scaled_loss"}
    keys = ["algorithm.custom.alpha=0.5", "actor_rollout_ref.actor.policy_loss.custom.tau=2"]
    assert conformance(**both, keys=keys) == 0
    assert conformance(**both, keys=keys[:1]) == 1
    assert "KeyError: 'tau' (with_keys.py, line " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^algorithm\.gamma=0\.5: the checks set .*algorithm\.custom\.name=value"):
        conformance(**both, keys=["algorithm.gamma=0.5"])
    with pytest.raises(ConfigError, match="^grpo: .*--only=NAME"):
        conformance(keys=["grpo"])


def test_what_fails_in_ones_own_comes_with_what_usually_mends_it(capsys):
    assert conformance(loss=f"{MUTANTS}:no_dp_size") == 1
    assert capsys.readouterr().out.count("A loss ends in agg_loss(") == 1
    assert conformance(estimator=f"{MUTANTS}:by_position") == 1
    assert capsys.readouterr().out.count("The rows of a group are those of one uid in index") == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "import no_such_package\n",
            r"ModuleNotFoundError: No module named 'no_such_package' \(broken_.*\.py, line 1\)",
        ),
        ("def f(:\n", r"SyntaxError: .*\(broken_.*\.py, line 1\)"),
        ("x = 1\n1 / 0\n", r"ZeroDivisionError: division by zero \(broken_.*\.py, line 2\)"),
        ("def right(): ...\n", r"broken_.*\.py has no 'rihgt'\. Did you mean 'right'\?"),
    ],
)
def test_a_module_that_does_not_load_is_told_with_its_line(tmp_path, monkeypatch, text, answer):
    module = f"broken_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"--estimator={module}:rihgt: .*{answer}"):
        conformance(estimator=f"{module}:rihgt")


def test_the_command_passes_the_status_on(capsys):
    for arguments, status in (
        (["--only", "grpo"], 0),
        (["--estimator", f"{MUTANTS}:by_position"], 1),
        (["--only", "x"], 2),
    ):
        assert CliRunner().invoke(app, ["conformance", *arguments]).exit_code == status


@pytest.mark.slow
def test_it_needs_no_file_of_the_source_tree(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "conformance", "--only", "token-sum", "--only", "k1", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failed"] == 0
