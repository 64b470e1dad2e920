"""The training command line: options of Hydra's kind and key=value words in any order."""

import pytest

from burnish.config.cli import parse_train_args
from burnish.utils.errors import ConfigError


def test_overrides_and_options_mix():
    args = parse_train_args(
        ["a.b=1", "--config-name", "mine", "+c=2", "--config-path=conf", "~d", "--cfg", "job", "++e=[1,2]"]
    )
    assert args.overrides == ["a.b=1", "+c=2", "~d", "++e=[1,2]"]
    assert (args.config_name, args.config_path, args.cfg) == ("mine", "conf", "job")


def test_short_options_are_hydras():
    args = parse_train_args(["-cn", "mine", "-cp", "conf", "-c", "job"])
    assert (args.config_name, args.config_path, args.cfg, args.overrides) == ("mine", "conf", "job", [])


def test_an_option_may_be_given_again_with_its_value():
    assert parse_train_args(["-cn", "mine", "--config-name=mine"]).config_name == "mine"


def test_a_negative_number_is_a_value():
    assert parse_train_args(["trainer.save_freq=-1"]).overrides == ["trainer.save_freq=-1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trainer.total_epochs=3"], "without dashes, as trainer.total_epochs=3"),
        (["--trainer.total_epochs", "3"], "without dashes, as trainer.total_epochs=value"),
        (["--lr", "3"], "--lr: there is no such option"),
        (["--multirun", "a=1,2"], "one command is one run"),
        (["--cfg", "hydra"], "invalid choice"),
        (["--config-name"], "expected one argument"),
        (["--config-name", "a", "-cn=b"], "--config-name=a and --config-name=b: a run takes one"),
        (["--config-path", "a", "--config-dir", "b"], "--config-path=a and --config-path=b: a run takes one"),
    ],
)
def test_a_wrong_option_is_an_error_with_the_way_out(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse_train_args(argv)
    assert message in str(caught.value)


def test_help_shows_the_options_and_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_train_args(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--config-name" in out
    assert "docs/config.md" in out
