import asyncio
import functools
import logging
import math

import numpy as np
import pytest
import torch

from burnish.config import CustomRewardFunctionConfig, DataConfig, RewardConfig, RewardManagerConfig
from burnish.data import RLHFDataset
from burnish.protocol import DataProto
from burnish.reward import (
    NaiveRewardManager,
    check_data_sources,
    default_compute_score,
    get_custom_reward_fn,
    get_reward_manager_cls,
    load_reward_manager,
    register_reward_manager,
)
from burnish.reward.manager import REWARD_MANAGERS
from burnish.reward.placement import to_result
from burnish.reward.score import Score
from burnish.utils.errors import ConfigError, RewardError
from tests.render.fake_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def batch_of(texts, truths=None, source="burnish/arithmetic", masks=None):
    ids = [[*TOKENIZER(text)["input_ids"], EOS] for text in texts]
    width = max(map(len, ids)) + 1
    responses = torch.full((len(ids), width), PAD)
    mask = torch.zeros(len(ids), width, dtype=torch.bool)
    for i, row in enumerate(ids):
        responses[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    truths = truths or [None] * len(texts)
    return DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask if masks is None else masks},
        non_tensors={
            "data_source": [source] * len(texts),
            "reward_model": [{"ground_truth": truth} for truth in truths],
            "extra_info": [{"row": i} for i in range(len(texts))],
        },
    )


def score_by(function, texts=("a", "b", "c", "d"), **config):
    return in_driver(function, **config)(batch_of(list(texts)))


def in_driver(function, **config):
    """A manager whose function is called here, so that it may write down what it sees."""
    return NaiveRewardManager(TOKENIZER, function, RewardConfig(num_workers=0, **config))


def counts(**some):
    return {f"reward/{reason}_count": some.get(reason, 0) for reason in ("abstain", "error", "timeout", "non_finite")}


def returning(*values):
    """A reward function that gives row i the i-th value, or raises it."""

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        value = values[extra_info["row"]]
        if isinstance(value, Exception):
            raise value
        return value

    return compute_score


def test_the_score_sits_on_the_last_sampled_token():
    result = NaiveRewardManager(TOKENIZER)(batch_of(["85", "7", "=85"], ["85", "85", 85]))
    assert result.token_level_scores.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert result.token_level_scores.dtype == torch.float32
    assert result.valid.tolist() == [True] * 3
    assert result.extras["acc"].tolist() == [True, False, True]
    assert result.metrics == counts()


def test_the_function_sees_the_whole_response_without_special_tokens_and_padding():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 0

    # Row 0 is cut (no end token); in row 1 a tool wrote the middle, which the policy did not sample.
    masks = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool)
    data = batch_of(["ab", "xyz"], [["1"], {"t": 1}], source="s", masks=masks)
    result = in_driver(compute_score)(data)
    assert seen == [("s", "ab", ["1"], {"row": 0}), ("s", "xyz", {"t": 1}, {"row": 1})]
    assert result.valid.all()


def test_a_function_that_writes_into_what_it_gets_changes_nothing_for_others():
    data = batch_of(["a", "b"], [["1", {"x": [2]}]] * 2)
    shared = {"row": 0, "seen": {"texts": []}}
    data.non_tensor_batch["extra_info"][:] = [shared, shared]

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert (ground_truth, extra_info) == (["1", {"x": [2]}], {"row": 0, "seen": {"texts": []}})
        ground_truth.pop()["x"].clear()
        extra_info["seen"]["texts"].append(solution_str)
        return 1

    assert in_driver(compute_score)(data).metrics["reward/error_count"] == 0
    assert shared == {"row": 0, "seen": {"texts": []}}


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1),
        (True, 1),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1),
        (torch.tensor(0.5), 0.5),
        ({"score": 2}, 2),
    ],
)
def test_numbers_of_every_kind_are_scores(returned, value):
    result = score_by(returning(returned), "a")
    assert result.token_level_scores.sum().item() == value
    assert result.valid.all()


def test_none_nan_and_infinity_are_no_scores_and_are_counted():
    result = score_by(returning(1.0, None, math.nan, {"score": -math.inf, "why": "inf"}))
    assert result.valid.tolist() == [True, False, False, False]
    assert result.token_level_scores.sum(-1).tolist() == [1, 0, 0, 0]
    assert result.metrics == counts(abstain=1, non_finite=2)
    assert result.extras["why"].tolist() == [None, None, None, "inf"]


@pytest.mark.parametrize("huge", [1e300, -1e39, 10**400, np.float64(1e300)])
def test_a_score_too_large_for_float32_is_no_score(huge):
    result = score_by(returning(1.0, huge, 3.4e38, 0.0))
    assert result.valid.tolist() == [True, False, True, True]
    assert result.token_level_scores.isfinite().all()
    assert result.metrics["reward/non_finite_count"] == 1


def test_extras_are_pythons_own_values():
    extras = {"text": np.str_("x"), "number": np.float32(0.5), "flag": np.bool_(True), "tensor": torch.tensor(3)}
    result = score_by(returning({"score": 1, **extras, "list": [1]}), "a")
    values = {name: values[0] for name, values in result.extras.items()}
    assert values == {"text": "x", "number": 0.5, "flag": True, "tensor": 3, "list": [1]}
    assert [type(value) for value in values.values()] == [str, float, bool, int, list]


def test_a_function_that_ends_the_program_is_not_stopped():
    def compute_score(**row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_by(compute_score)


def test_a_function_that_raises_costs_its_row_and_shows_the_first_traceback(caplog):
    with caplog.at_level(logging.WARNING):
        result = score_by(returning(1.0, ValueError("first"), KeyError("second"), 0.0))
    assert result.valid.tolist() == [True, False, False, True]
    assert result.metrics["reward/error_count"] == 2
    assert "failed on 2 of 4 rows" in caplog.text
    assert "ValueError: first" in caplog.text
    assert "second" not in caplog.text


def test_a_function_that_scores_no_response_at_all_is_told_once(caplog):
    manager = in_driver(returning(None, None, 1.0))
    with caplog.at_level(logging.WARNING):
        manager(batch_of(["a", "b", "c"]))
        assert not caplog.text
        assert not any(manager(batch_of(["a", "b"])).valid)
        manager(batch_of(["a", "b"]))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "The reward function returned None, which is no score, for all 2 responses"
    ]


def test_on_error_raise_stops_at_the_first_failure():
    what = r"row 1 of the batch \(data_source burnish/arithmetic\): KeyError: 'x' \(reward.on_error=raise\)"
    with pytest.raises(RewardError, match=what) as caught:
        score_by(returning(1.0, KeyError("x"), 1.0, 1.0), on_error="raise")
    assert "in compute_score\n    raise value" in str(caught.value)


def test_on_error_zero_scores_what_failed_with_nothing_and_counts_it():
    result = score_by(returning(1.0, KeyError("x"), math.nan, None), on_error="zero")
    assert result.token_level_scores.sum(-1).tolist() == [1, 0, 0, 0]
    assert result.valid.tolist() == [True, True, True, False]
    assert result.metrics == counts(abstain=1, error=1, non_finite=1)


def test_on_error_raise_stops_at_a_score_that_is_not_finite_too():
    with pytest.raises(RewardError, match=r"row 1 .*the score is nan, not finite \(reward.on_error=raise\)"):
        score_by(returning(1.0, math.nan, 1.0, 1.0), on_error="raise")


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (ValueError("no"), "failed on all 4 rows. First row 0 .*: ValueError: no"),
        (math.nan, "the score is nan, not finite"),
        ({"acc": 1}, "dict with the keys acc; the score is expected under 'score'"),
        ("1.0", r"returned str \('1.0'\); a number, a bool, None"),
        ([1.0], "a list of 1 numbers, one per token, but the response has 2 tokens"),
        ([], "returned an empty list"),
        ([1.0, "x"], r"whose element 1 is str \('x'\)"),
        (np.ones((2, 2)), "returned ndarray"),
        ({"score": [1.0], "per": "word"}, "returned per='word' beside a list; 'token' or 'turn'"),
    ],
)
def test_when_every_row_fails_the_run_stops_and_says_why(returned, what):
    with pytest.raises(RewardError, match=what):
        score_by(returning(*[returned] * 4))


def test_abstaining_from_every_row_is_no_failure():
    result = score_by(returning(*[None] * 4))
    assert not result.valid.any()
    assert result.metrics["reward/abstain_count"] == 4


def test_extras_named_like_what_the_framework_keeps_are_prefixed():
    result = score_by(returning({"score": 1, "reward": 5, "loss": 6, "values": 7, "acc": True}), "a")
    assert set(result.extras) == {"reward_extra/reward", "reward_extra/loss", "reward_extra/values", "acc"}


@pytest.mark.timeout(20)
def test_the_scores_of_many_rows_become_tensors_in_linear_time():
    num_rows = 100_000
    scores = [Score(value=1.0, extras={f"extra {k}": row for k in range(5)}) for row in range(num_rows)]
    result = to_result(scores, torch.ones(num_rows, 1, dtype=torch.bool))
    assert result.token_level_scores.sum() == num_rows
    assert all(values.tolist() == list(range(num_rows)) for values in result.extras.values())


def test_adding_to_a_batch_adds_exactly_scores_valid_and_extras():
    data = batch_of(["a"])
    before = set(data.batch.keys()), set(data.non_tensor_batch)
    data.non_tensor_batch["pred"] = np.array(["column"], dtype=object)
    result = in_driver(returning({"score": 1, "pred": "x", "acc": 1}))(data)
    added = result.add_to(data)
    assert set(added.batch.keys()) - before[0] == {"token_level_scores", "valid"}
    assert set(added.non_tensor_batch) - before[1] == {"pred", "reward_extra/pred", "acc"}
    assert added.non_tensor_batch["pred"][0] == "column"


def test_a_row_without_a_sampled_token_is_not_valid():
    masks = torch.tensor([[False, False, False], [True, True, False]])
    result = in_driver(returning(1, 1))(batch_of(["a", "b"], masks=masks))
    assert result.valid.tolist() == [False, True]
    assert result.token_level_scores.tolist() == [[0, 0, 0], [0, 1, 0]]


async def in_reverse(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.02 * (3 - extra_info["row"]))
    if extra_info["row"] == 1:
        raise ValueError("no")
    return float(extra_info["row"])


def test_asynchronous_functions_run_at_once_and_keep_the_order_of_rows():
    result = score_by(in_reverse)
    assert result.token_level_scores.sum(-1).tolist() == [0, 0, 2, 3]
    assert result.valid.tolist() == [True, False, True, True]


def test_asynchronous_functions_work_where_an_event_loop_runs_already():
    async def caller():
        return score_by(in_reverse)

    assert asyncio.run(caller()).metrics["reward/error_count"] == 1


def test_what_an_asynchronous_function_keeps_works_in_the_next_batch():
    kept = []

    async def compute_score(**row):
        # As the connections of an HTTP client: bound to the event loop of their first use.
        if not kept:
            kept.append(asyncio.Semaphore(1))
        async with kept[0]:
            await asyncio.sleep(0.001)
        return 1

    for _ in range(2):
        assert score_by(compute_score).metrics["reward/error_count"] == 0


def test_examples_are_printed_for_each_data_source_up_to_the_number(capsys):
    manager = in_driver(returning(1, 1, 1))
    manager.num_examine = 2
    manager(batch_of(["one", "[two]", "three"]))
    printed = capsys.readouterr().out
    assert "one" in printed
    assert "[two]" in printed
    assert "three" not in printed


# --- which function, and what is checked before training


def test_an_unknown_data_source_lists_what_is_known_and_the_way_out():
    for source in ("", "unknown", "/data/x.parquet"):
        with pytest.raises(RewardError, match=r"burnish/arithmetic, .*openai/gsm8k.*custom_reward_function.path"):
            default_compute_score(source, "", "1")


def rows_with(**columns):
    rows = [{"prompt": "x", "data_source": "openai/gsm8k", "ground_truth": "1"}] * 3
    return RLHFDataset.from_rows([*rows, {**rows[0], **columns}], TOKENIZER, DataConfig())


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"data_source": "other"}, "no built-in reward function for the data source 'other'"),
        ({"data_source": ""}, "data source 'unknown'"),
        ({"ground_truth": None}, "The row has no ground truth; .* ground_truth, or the one that data.answer_key names"),
        ({"ground_truth": "many"}, "'many' holds no number"),
    ],
)
def test_rows_that_cannot_be_scored_are_found_before_training(columns, what):
    with pytest.raises(RewardError, match=f"dataset, row 3: .*{what}"):
        check_data_sources(rows_with(**columns))
    check_data_sources(rows_with(**columns), returning(1))
    check_data_sources(rows_with(**columns), in_driver(returning(1)))


def test_rows_that_can_be_scored_pass():
    assert check_data_sources(rows_with(), NaiveRewardManager(TOKENIZER)) is None


OWN = """
import functools
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return len(solution_str) + bonus
async def later(data_source, solution_str, **rest):
    return 3
class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 4
class Needs:
    def __init__(self, threshold):
        self.threshold = threshold
    def __call__(self, **row):
        return 1
of_lambda = lambda **row: 5
of_partial = functools.partial(compute_score, bonus=6)
def make(n):
    def closure(solution_str, **row):
        return n
    return closure
of_closure = make(7)
def misnamed(source, answer, truth, info):
    return 0
constant = 1
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(OWN)

    def config(name="compute_score", **reward_kwargs):
        custom = CustomRewardFunctionConfig(path=str(path), name=name, reward_kwargs=reward_kwargs)
        return RewardConfig(custom_reward_function=custom, num_workers=0)

    return config


@pytest.mark.parametrize(
    ("name", "score"),
    [("compute_score", 2), ("later", 3), ("Scorer", 4), ("of_lambda", 5), ("of_partial", 8), ("of_closure", 7)],
)
def test_a_function_of_ones_own_from_a_file(own, name, score):
    result = load_reward_manager(own(name), TOKENIZER)(batch_of(["ab"]))
    assert result.token_level_scores.sum().item() == score


def test_reward_kwargs_are_bound(own):
    result = load_reward_manager(own(bonus=0.5), TOKENIZER)(batch_of(["ab"]))
    assert result.token_level_scores.sum().item() == 2.5


@pytest.mark.parametrize(
    ("name", "reward_kwargs", "what"),
    [
        ("misnamed", {}, "data_source, solution_str, ground_truth and extra_info, but this one is"),
        ("compute_score", {"bonsu": 1}, "those of reward_kwargs, but this one is.*bonsu"),
        ("constant", {}, "this is int, not a function"),
        ("Needs", {}, r"made without arguments, but its constructor is \(threshold\)"),
        ("absent", {}, "there is no 'absent' in it"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_training(own, name, reward_kwargs, what):
    with pytest.raises(ConfigError, match=rf"reward.custom_reward_function.*{what}"):
        get_custom_reward_fn(own(name, **reward_kwargs))


def test_without_a_path_there_is_no_custom_function_and_kwargs_are_refused():
    assert get_custom_reward_fn(RewardConfig()) is None
    with pytest.raises(ConfigError, match="no reward.custom_reward_function.path"):
        get_custom_reward_fn(RewardConfig(custom_reward_function=CustomRewardFunctionConfig(reward_kwargs={"a": 1})))


def test_the_function_given_in_python_comes_before_the_configured_one(own):
    manager = load_reward_manager(own(), TOKENIZER, compute_score=functools.partial(returning(9)))
    assert manager(batch_of(["ab"])).token_level_scores.sum().item() == 9


def test_managers_are_found_by_name_or_by_module_and_attribute():
    assert get_reward_manager_cls("naive") is NaiveRewardManager
    assert get_reward_manager_cls("burnish.reward.manager:NaiveRewardManager") is NaiveRewardManager
    with pytest.raises(ConfigError, match="reward.reward_manager.name=naiv: .*Did you mean 'naive'"):
        get_reward_manager_cls("naiv")


def test_a_registered_manager_is_used():
    @register_reward_manager("test_manager")
    class Own(NaiveRewardManager):
        pass

    try:
        config = RewardConfig(reward_manager=RewardManagerConfig(name="test_manager"))
        assert isinstance(load_reward_manager(config, TOKENIZER), Own)
    finally:
        del REWARD_MANAGERS._entries["test_manager"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def __init__(self, tokenizer, num_examine, compute_score): pass",
            "made with tokenizer, .*unexpected.*'config'",
        ),
        ("def __init__(self, **kwargs): pass", "Mine has no __call__"),
    ],
)
def test_a_manager_that_cannot_be_made_or_called_is_a_sentence(tmp_path, body, said):
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}\n")
    manager = RewardManagerConfig(source="importlib", name="Mine")
    manager.module.path = str(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match=f"reward.reward_manager.name=Mine: .*{said}|Mine: {said}"):
        load_reward_manager(RewardConfig(reward_manager=manager), TOKENIZER)
