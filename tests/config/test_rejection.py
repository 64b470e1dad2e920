"""Presets say what their names say; bounds of rejection are read as documented, and wrong ones are told."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from burnish.config import RolloutCorrectionConfig, load_config, names
from burnish.config.rejection import PRESETS, RULES, RejectionRule, parse_rejection, weight_bounds
from burnish.utils.errors import ConfigError

IS_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
THRESHOLD = r"algorithm\.rollout_correction\.rollout_rs_threshold"


def rule(name: str, threshold: str | float) -> RejectionRule:
    (only,) = parse_rejection(name, threshold)
    return only


def bounds(name: str, threshold: str | float) -> tuple[float | None, float]:
    return rule(name, threshold).lower, rule(name, threshold).upper


def test_no_rule_is_no_rule_whatever_the_threshold():
    assert parse_rejection(None, None) == parse_rejection(None, "0.5_2.0") == ()


def test_k1_takes_two_ratios_or_one_that_stands_for_both():
    assert bounds("token_k1", "0.6_1.4") == (0.6, 1.4)
    assert bounds("seq_sum_k1", 2.0) == bounds("seq_sum_k1", "2") == bounds("seq_sum_k1", 2) == (0.5, 2.0)
    assert bounds("seq_mean_k1", " 0.999_1.001 ") == (0.999, 1.001)
    assert bounds("seq_max_k1", 1.0) == (1.0, 1.0)


def test_k1_refuses_one_number_below_1_which_is_what_yaml_makes_of_two_without_quotes():
    for threshold in (yaml.safe_load("0.5_2"), "0.25"):
        with pytest.raises(ConfigError, match=rf"{THRESHOLD}: '{threshold}' for token_k1 is one number.* in quotes"):
            parse_rejection("token_k1", threshold)


@pytest.mark.parametrize("name", [name for name in RULES if not name.endswith("k1")])
def test_k2_and_k3_take_an_upper_bound(name):
    assert bounds(name, 0.01) == bounds(name, "0.01") == bounds(name, "1e-2") == (None, 0.01)


def test_rules_come_in_their_order_with_one_bound_for_all_or_one_each():
    assert parse_rejection("token_k1, seq_max_k2", "0.5_2.0, 2.5") == (
        RejectionRule("token", "k1", 0.5, 2.0),
        RejectionRule("seq_max", "k2", None, 2.5),
    )
    assert parse_rejection("seq_mean_k3,token_k1", 4) == (
        RejectionRule("seq_mean", "k3", None, 4.0),
        RejectionRule("token", "k1", 0.25, 4.0),
    )


def test_all_names_are_rules_and_come_back():
    assert len(RULES) == 12
    assert [one.name for one in parse_rejection(",".join(RULES), 2.0)] == list(RULES)


@pytest.mark.parametrize("text", ["token", "seq_min_k1", "token_k4", "geometric", "", "token_k1,", "TOKEN_K1"])
def test_an_unknown_rule_is_told_with_the_choices(text):
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.rollout_rs=.*no rule.*token_k1, token_k2"):
        parse_rejection(text, 2.0)


def test_a_rule_twice_is_told():
    with pytest.raises(ConfigError, match=r"lists token_k1 twice"):
        parse_rejection("token_k1,seq_max_k2,token_k1", 2.0)


@pytest.mark.parametrize(
    ("rollout_rs", "proposal"),
    [("seq_sum_k1", "0.5_2.0"), ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3,token_k1", "0.01,0.5_2.0")],
)
def test_a_missing_threshold_is_told_with_one_that_is_accepted(rollout_rs, proposal):
    with pytest.raises(ConfigError, match=f'rollout_rs={rollout_rs} needs.*{THRESHOLD}="{proposal}"'):
        parse_rejection(rollout_rs, None)
    assert parse_rejection(rollout_rs, proposal)


@pytest.mark.parametrize("name", RULES)
def test_every_proposal_is_accepted(name):
    with pytest.raises(ConfigError) as told:
        parse_rejection(name, None)
    assert rule(name, str(told.value).split('"')[1]).name == name


@pytest.mark.parametrize("name", ["token_k2", "seq_mean_k3"])
def test_two_numbers_for_k2_and_k3_are_told(name):
    with pytest.raises(ConfigError, match=rf"{THRESHOLD}: '0\.5_2\.0' for {name} is not one number"):
        parse_rejection(name, "0.5_2.0")
    with pytest.raises(ConfigError, match=f"for {name} is not one number"):
        parse_rejection(f"token_k1,{name}", "0.5_2.0")


@pytest.mark.parametrize("name", ["token_k1", "seq_max_k3"])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "two", "", 0.0, -2.0, float("nan"), float("inf")])
def test_a_threshold_that_is_no_number_above_zero_is_told(name, text):
    with pytest.raises(ConfigError, match=rf"{THRESHOLD}: .* for {name}: .* is no number above 0"):
        parse_rejection(name, text)


@pytest.mark.parametrize("text", ["_2.0", "0.5_", "0.5_x", "-0.5_2.0", "0_2"])
def test_half_a_pair_is_told(text):
    with pytest.raises(ConfigError, match="is no number above 0"):
        parse_rejection("token_k1", text)


def test_three_numbers_are_told():
    with pytest.raises(ConfigError, match=r"has 3 numbers: give lower_upper, as 0\.999_1\.001"):
        parse_rejection("seq_mean_k1", "0.9_1.0_1.1")


@pytest.mark.parametrize("text", ["1.1_2.0", "0.1_0.9", "2.0_0.5"])
def test_ratios_that_leave_out_one_are_told(text):
    with pytest.raises(ConfigError, match=r"leaves out the ratio 1"):
        parse_rejection("token_k1", text)


@pytest.mark.parametrize("text", ["2.0,3.0", "2.0,3.0,4.0,5.0"])
def test_another_number_of_thresholds_than_rules_is_told(text):
    with pytest.raises(ConfigError, match=f"{THRESHOLD}={text} has {text.count(',') + 1} entries .* has 3"):
        parse_rejection("token_k1,token_k2,token_k3", text)


def test_true_is_no_threshold():
    with pytest.raises(ConfigError, match=f"{THRESHOLD}=True"):
        parse_rejection("token_k2", True)


def test_there_is_a_preset_for_every_name_of_keys_that_exist():
    assert tuple(PRESETS) == names.ROLLOUT_CORRECTION_PRESETS
    keys = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
    for preset in PRESETS.values():
        assert preset.keys() <= keys - {"preset"}
        parse_rejection(preset["rollout_rs"], preset.get("rollout_rs_threshold"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_does_what_its_name_says(name):
    config = RolloutCorrectionConfig(**PRESETS[name])
    assert config.bypass_mode == name.startswith("bypass")
    if config.bypass_mode:
        assert config.loss_type == ("ppo_clip" if "ppo_clip" in name else "reinforce")
    weights = {"token": "token" in name, "sequence": "seq_is" in name or "seq_tis" in name or name == "bypass_pg_is"}
    assert config.rollout_is == next((level for level, is_so in weights.items() if is_so), None)
    assert config.rollout_is_threshold == ("0.5_5.0" if "icepop" in name else 2.0)
    assert not config.rollout_is_batch_normalize
    rules = parse_rejection(config.rollout_rs, config.rollout_rs_threshold)
    expected = {
        "seq_is_rs": RejectionRule("seq_sum", "k1", 0.5, 2.0),
        "geo_rs": RejectionRule("seq_mean", "k1", 0.999, 1.001),
        "k3_rs": RejectionRule("seq_mean", "k3", None, 0.01),
    }
    assert rules == tuple(rule for part, rule in expected.items() if part in name)


def test_weights_have_an_upper_bound_or_two():
    assert weight_bounds(2.0) == weight_bounds("2") == (None, 2.0)
    assert weight_bounds("0.5_5.0") == weight_bounds(" 0.5_5") == (0.5, 5.0)


@pytest.mark.parametrize("typed", ["0.5_2", "'0.5_2'", "0.5_5.0"])
def test_two_bounds_on_a_command_line_are_not_one_number(typed):
    config = load_config([f"{IS_THRESHOLD}={typed}", "algorithm.rollout_correction.rollout_is=token"])
    assert weight_bounds(config.algorithm.rollout_correction.rollout_is_threshold)[0] == 0.5


@pytest.mark.parametrize("typed", ["0.5_2_3", "a_b", "1.5_2", "-1", "0", "0_2", "true", "0.55"])
def test_bounds_that_are_none_are_told(typed):
    with pytest.raises(ConfigError, match=r"rollout_is_threshold.*(0\.5_5\.0|above 0|greater)"):
        load_config([f"{IS_THRESHOLD}={typed}", "algorithm.rollout_correction.rollout_is=token"])


def test_reading_the_rules_loads_no_torch():
    code = "import sys, burnish.config.rejection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
