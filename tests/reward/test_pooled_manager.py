"""Managers on reward processes: what fails, scores per token and turn, several functions, scoring before the batch is whole."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.config import CustomRewardFunctionConfig, RewardConfig, load_config
from burnish.reward import NaiveRewardManager, Outcome, load_reward_manager
from burnish.reward.placement import turn_ends
from burnish.reward.scorers import ByDataSource, InDriver
from burnish.utils.errors import ConfigError, RewardError
from tests.reward.test_manager import TOKENIZER, batch_of, counts, in_driver, returning

OWN = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "die":
        os._exit(1)
    if solution_str == "raise":
        raise ValueError("what a response")
    if solution_str == "nan":
        return float("nan")
    return {"score": len(solution_str) + bonus, "truth": ground_truth, "types": type(ground_truth).__name__}
def short(solution_str, **_):
    return {"score": -len(solution_str), "letters": len(solution_str)}
async def even(solution_str, **_):
    return None if solution_str == "none" else len(solution_str) % 2 == 0
def broken(solution_str, **_):
    raise KeyError("x")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_reward.py"
    path.write_text(OWN)
    return str(path)


def config_of(own, **settings):
    custom = CustomRewardFunctionConfig(path=own)
    return RewardConfig(**{"custom_reward_function": custom, "num_workers": 2, "timeout": 0.7, **settings})


@pytest.fixture(scope="module")
def pooled(own):
    manager = load_reward_manager(config_of(own), TOKENIZER)
    yield manager
    manager.close()


TEXTS = ["a", "hang", "abc", "die", "abcde", "raise", "nan", "ab"]


def test_what_hangs_crashes_and_raises_costs_its_row_only_and_is_counted(pooled):
    result = pooled(batch_of(TEXTS))
    assert result.token_level_scores.sum(-1).tolist() == [1, 0, 3, 0, 5, 0, 0, 2]
    assert result.valid.tolist() == [True, False, True, False, True, False, False, True]
    assert result.metrics == counts(timeout=1, error=2, non_finite=1)


def test_on_error_zero_and_raise_hold_for_timeouts_and_crashes(own):
    data = batch_of(["a", "hang", "die"])
    data.non_tensor_batch["uid"] = np.array(["u0", "u1", "u2"], dtype=object)
    zero = load_reward_manager(config_of(own, on_error="zero"), TOKENIZER)
    result = zero(data)
    assert result.token_level_scores.sum(-1).tolist() == [1, 0, 0]
    assert result.valid.all()
    assert result.metrics == counts(timeout=1, error=1)
    strict = load_reward_manager(config_of(own, on_error="raise"), TOKENIZER)
    with pytest.raises(
        RewardError, match=r"row 1 of the batch \(uid u1, data_source burnish/arithmetic\): TimeoutError"
    ):
        strict(data)
    with pytest.raises(RewardError, match=r"(?s)ValueError: what a response \(.*my_reward.py.*raise ValueError"):
        strict(batch_of(["a", "raise"]))
    zero.close()
    strict.close()


def test_when_all_rows_hang_the_run_stops(own):
    manager = load_reward_manager(config_of(own), TOKENIZER)
    with pytest.raises(RewardError, match=r"failed on all 2 rows. First row 0 .*TimeoutError: it took longer"):
        manager(batch_of(["hang", "hang"]))
    manager.close()


@pytest.mark.parametrize(
    ("truth", "seen"),
    [
        ("72", "str"),
        (72, "int"),
        (72.0, "float"),
        (["72"], "list"),
        ({"target": "72"}, "dict"),
        (np.int64(72), "int"),
        (np.array([7, 2]), "list"),
        (None, "NoneType"),
    ],
)
def test_ground_truths_reach_the_function_as_json_has_them(pooled, truth, seen):
    assert pooled(batch_of(["a"], [truth] if truth is not None else None)).extras["types"].tolist() == [seen]


def test_scores_made_before_the_batch_is_whole_are_those_of_the_driver(pooled):
    texts = ["a", "abc", "raise", "abcd"]
    data = batch_of(texts, ["1", "2", "3", "4"])
    plain = pooled(data)
    # As responses finish: in another order, row by row.
    scorer = pooled.scorer()
    for i in (2, 0, 3, 1):
        response = data.batch["responses"][i][data.batch["response_mask"][i]].tolist()
        columns = [data.non_tensor_batch[name][i] for name in ("data_source", "reward_model", "extra_info")]
        scorer.submit(i, pooled.row_of(response, *columns))
    outcomes = scorer.collect(range(4))
    data.non_tensor_batch["reward_outcome"] = np.array([outcomes[i] for i in range(4)], dtype=object)
    early = pooled(data)
    assert torch.equal(early.token_level_scores, plain.token_level_scores)
    assert torch.equal(early.valid, plain.valid)
    assert early.metrics == plain.metrics
    assert {name: values.tolist() for name, values in early.extras.items()} == {
        name: values.tolist() for name, values in plain.extras.items()
    }


def test_outcomes_that_are_there_already_are_not_asked_for_again():
    manager = in_driver(returning(5, 5))
    data = batch_of(["a", "b"])
    data.non_tensor_batch["reward_outcome"] = np.array(
        [Outcome(1.0), Outcome(error="E: no", kind="died")], dtype=object
    )
    assert manager(data).token_level_scores.sum(-1).tolist() == [1, 0]


def test_a_manager_travels_without_its_processes(pooled):
    pooled.scorer()
    there = pickle.loads(pickle.dumps(pooled))
    assert there._scorer is None
    assert pooled._scorer is not None


def test_built_in_rules_are_called_here_and_others_in_processes():
    manager = load_reward_manager(RewardConfig(), TOKENIZER)
    scorer = manager.scorer()
    assert isinstance(scorer, ByDataSource)
    assert manager(batch_of(["72"], ["72"])).token_level_scores.sum() == 1
    assert scorer._pool is None
    result = manager(batch_of([r"\boxed{72}", r"\boxed{7}"], ["72", "72"], source="lighteval/MATH"))
    assert result.token_level_scores.sum(-1).tolist() == [1, 0]
    assert scorer._pool is not None
    manager.close()
    assert isinstance(load_reward_manager(RewardConfig(num_workers=0), TOKENIZER).scorer(), InDriver)


def test_what_cannot_travel_is_refused_when_the_manager_is_made():
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="reward.num_workers=0"):
        NaiveRewardManager(TOKENIZER, lambda **_: lock, RewardConfig(num_workers=1))
    NaiveRewardManager(TOKENIZER, lambda **_: lock, RewardConfig(num_workers=0))


# --- scores per token and per turn

MASKS = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)


def test_a_turn_is_a_run_of_tokens_of_the_policy():
    assert turn_ends(MASKS).int().tolist() == [[0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert turn_ends(torch.ones(1, 3)).int().tolist() == [[0, 0, 1]]
    assert turn_ends(torch.zeros(1, 0)).tolist() == [[]]


def test_a_list_gives_each_token_of_the_policy_its_number():
    data = batch_of(["abcd", "a", "ab"], masks=MASKS)
    result = in_driver(returning([1, 2, 3, 4], np.array([5.0]), {"score": (0.5, 0, True), "x": 1}))(data)
    assert result.token_level_scores.tolist() == [[1, 2, 0, 3, 4, 0], [0, 5, 0, 0, 0, 0], [0.5, 0, 1, 0, 0, 0]]
    assert result.valid.all()
    assert result.extras["x"].tolist() == [None, None, 1]


def test_a_list_per_turn_sits_on_the_last_token_of_each_turn():
    data = batch_of(["abcd", "a", "ab"], masks=MASKS)
    result = in_driver(returning({"score": [1, 2], "per": "turn"}, {"score": [3], "per": "turn"}, 4))(data)
    assert result.token_level_scores.tolist() == [[0, 1, 0, 0, 2, 0], [0, 3, 0, 0, 0, 0], [0, 0, 4, 0, 0, 0]]
    assert result.extras == {}


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ([1, 2], "error"),
        ({"score": [1, 2, 3], "per": "turn"}, "error"),
        ([1, math.nan, 3, 4], "non_finite"),
        ([3e38, 3e38, 0, 0], "non_finite"),
    ],
)
def test_a_list_of_another_length_or_not_finite_fails_its_row(returned, reason):
    result = in_driver(returning(returned, 1, 1))(batch_of(["abcd", "a", "ab"], masks=MASKS))
    assert result.valid.tolist() == [False, True, True]
    assert result.token_level_scores[0].abs().sum() == 0
    assert result.metrics == counts(**{reason: 1})


def test_the_message_about_a_lists_length_names_both_and_turns():
    data = batch_of(["abcd"], masks=MASKS[:1])
    with pytest.raises(
        RewardError, match="list of 3 numbers, one per token, but the response has 4 tokens that.*per.*turn"
    ):
        in_driver(returning([1, 2, 3]), on_error="raise")(data)
    with pytest.raises(
        RewardError, match="list of 3 numbers, one per turn, but the response has 2 turns of the policy"
    ):
        in_driver(returning({"score": [1, 2, 3], "per": "turn"}), on_error="raise")(data)


# --- several functions


def weighted(own, num_workers=0, **functions):
    entries = {name: {"path": own, **entry} for name, entry in functions.items()}
    return load_reward_manager(RewardConfig(functions=entries, num_workers=num_workers), TOKENIZER)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_score_is_the_weighted_sum_and_each_function_is_an_extra(own, num_workers):
    manager = weighted(
        own,
        num_workers,
        length={"weight": 0.5, "reward_kwargs": {"bonus": 1.0}},
        short={"name": "short", "weight": 2},
        even={"name": "even"},
    )
    result = manager(batch_of(["a", "ab", "none", "raise"], ["t"] * 4))
    manager.close()
    assert result.token_level_scores.sum(-1).tolist() == [0.5 * 2 - 2 + 0, 0.5 * 3 - 4 + 1, 0, 0]
    assert result.valid.tolist() == [True, True, False, False]
    assert result.metrics == counts(abstain=1, error=1)
    assert {name: values.tolist() for name, values in result.extras.items()} == {
        "length": [2, 3, 5, None],
        "length/truth": ["t", "t", "t", None],
        "length/types": ["str", "str", "str", None],
        "short": [-1, -2, -4, None],
        "short/letters": [1, 2, 4, None],
        "even": [0, 1, None, None],
    }


def test_built_in_functions_can_be_weighted(own):
    functions = {
        "right": {"path": "pkg://burnish.reward.functions.gsm8k"},
        "short": {"path": own, "name": "short", "weight": 0.1},
    }
    manager = load_reward_manager(RewardConfig(functions=functions, num_workers=0), TOKENIZER)
    assert manager(batch_of(["#### 72"], ["72"])).token_level_scores.sum().item() == pytest.approx(0.3)


def test_the_error_of_one_of_several_functions_names_it(own):
    with pytest.raises(RewardError, match=r"RewardError: reward.functions.bad: KeyError: 'x'"):
        weighted(own, good={}, bad={"name": "broken"})(batch_of(["a"]))


@pytest.mark.parametrize(
    ("functions", "what"),
    [
        ({"a": {"weight": 1}}, r"reward.functions.a.path=None: the Python file"),
        (
            {"a": {"path": "{own}", "wieght": 1}},
            r"reward.functions.a.wieght: there is no such key. There is: .*a.weight",
        ),
        ({"a": {"path": "{own}", "weight": "much"}}, r"reward.functions.a.weight='much': a finite number"),
        ({"a": {"path": "{own}", "name": "absent"}}, r"reward.functions.a.path=.*there is no 'absent' in it"),
        ({"a": {"path": "{own}", "reward_kwargs": 3}}, r"reward.functions.a.reward_kwargs=3: a dict"),
        ({"a/b": {"path": "{own}"}}, "this name is not free"),
        ({"a": "{own}"}, r"this is no function. Set reward.functions.a.path"),
    ],
)
def test_functions_that_are_wrongly_described_are_refused_by_their_key(own, functions, what):
    def filled(value):
        return (
            {k: filled(v) for k, v in value.items()} if isinstance(value, dict) else own if value == "{own}" else value
        )

    with pytest.raises(ConfigError, match=what):
        load_reward_manager(RewardConfig(functions=filled(functions)), TOKENIZER)


def test_several_functions_and_a_custom_one_are_not_both_the_score(own):
    with pytest.raises(ConfigError, match=r"reward.functions and reward.custom_reward_function.path=.* are both set"):
        load_reward_manager(config_of(own, functions={"a": {"path": own}}), TOKENIZER)


def test_the_keys_of_reward_processes_are_read_from_the_command_line():
    tiny = Path(__file__).resolve().parents[2] / "examples" / "tiny_model"
    common = [
        "recipe=demo",
        f"actor_rollout_ref.model.path={tiny / 'model'}",
        f"data.train_files={tiny / 'data' / 'train.jsonl'}",
        f"data.val_files={tiny / 'data' / 'test.jsonl'}",
    ]
    config = load_config([*common, "reward.num_workers=3", "reward.timeout=null", "reward.on_error=zero"])
    assert (config.reward.num_workers, config.reward.timeout, config.reward.on_error) == (3, None, "zero")
    with pytest.raises(ConfigError, match="reward.num_workers=many"):
        load_config([*common, "reward.num_workers=many"])
