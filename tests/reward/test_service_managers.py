"""The managers batch, prime, rate_limited and remote, and a judge as the reward function."""

import functools
import random
import threading
import time

import pytest
import torch

from burnish.config import RewardConfig, RewardManagerConfig
from burnish.config.reward import CustomRewardFunctionConfig, RewardManagerModuleConfig
from burnish.config.reward_services import JudgeConfig, RateLimitConfig, RemoteRewardConfig
from burnish.reward.manager import (
    BatchRewardManager,
    PrimeRewardManager,
    RateLimitedRewardManager,
    RemoteRewardManager,
    load_reward_manager,
)
from burnish.utils.errors import ConfigError, RewardError
from tests.reward.http_server import Reply, serving
from tests.reward.test_manager import TOKENIZER, batch_of

FOUR = ["a", "bb", "ccc", "dddd"]


def scores_of(manager, texts=FOUR, **more):
    try:
        return manager(batch_of(list(texts), **more))
    finally:
        manager.close()


def sums(result):
    return result.token_level_scores.sum(-1).tolist()


# --- batch


@pytest.mark.parametrize("num_workers", ["auto", 0])
def test_batch_calls_the_function_once_with_lists(num_workers):
    # Within the test, since a process that gets a function of this file would load all of it.
    def lengths_of_all(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
        assert {len(data_sources), len(ground_truths), len(extra_infos)} == {len(solution_strs)}
        return [
            {"score": factor * len(text), "row": info["row"]} if text != "bb" else None
            for text, info in zip(solution_strs, extra_infos, strict=True)
        ]

    result = scores_of(BatchRewardManager(TOKENIZER, lengths_of_all, RewardConfig(num_workers=num_workers)))
    assert sums(result) == [1, 0, 3, 4]
    assert result.valid.tolist() == [True, False, True, True]
    assert result.extras["row"].tolist() == [0, None, 2, 3]
    assert result.metrics["reward/abstain_count"] == 1


def test_batch_takes_tensors_and_refuses_lists_of_another_length():
    def tensor(solution_strs, **rows):
        return torch.tensor([float(len(text)) for text in solution_strs])

    config = RewardConfig(num_workers=0)
    assert sums(scores_of(BatchRewardManager(TOKENIZER, tensor, config))) == [1, 2, 3, 4]
    for returned, found in (([1, 2], "2 scores"), (None, "NoneType"), ({"score": 1}, "dict")):
        manager = BatchRewardManager(TOKENIZER, lambda returned=returned, **rows: returned, config)
        with pytest.raises(RewardError, match=f"returned {found}.* for 4 responses; a list of one each is expected"):
            scores_of(manager)


def test_batch_has_one_time_limit_for_all():
    def stuck(solution_strs, **rows):
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RewardError, match=r"failed on all 4 rows.*reward\.timeout=0\.3 seconds"):
        scores_of(BatchRewardManager(TOKENIZER, stuck, RewardConfig(timeout=0.3)))
    assert time.monotonic() - started < 20


def test_batch_from_a_file_and_what_it_cannot_call(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, factor):\n"
        "    return [factor * len(text) for text in solution_strs]\n"
        "def each(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1\n"
    )

    def config(name, **kwargs):
        custom = CustomRewardFunctionConfig(path=str(file), name=name, reward_kwargs=kwargs)
        return RewardConfig(reward_manager=RewardManagerConfig(name="batch"), custom_reward_function=custom)

    assert sums(scores_of(load_reward_manager(config("compute_score", factor=2), TOKENIZER))) == [2, 4, 6, 8]
    with pytest.raises(ConfigError, match=r"name=each: reward\.reward_manager\.name=batch calls.*data_sources"):
        load_reward_manager(config("each"), TOKENIZER)
    with pytest.raises(ConfigError, match="batch needs a function of your own"):
        load_reward_manager(RewardConfig(reward_manager=RewardManagerConfig(name="batch")), TOKENIZER)


# --- prime


def test_prime_scores_side_by_side_and_one_that_hangs_fails_alone():
    def compute_score(solution_str, **row):
        if solution_str == "bb":
            while True:
                pass
        return len(solution_str)

    manager = PrimeRewardManager(TOKENIZER, compute_score, RewardConfig(timeout=0.5, num_workers=2))
    result = scores_of(manager)
    assert sums(result) == [1, 0, 3, 4]
    assert result.metrics["reward/timeout_count"] == 1
    with pytest.raises(ConfigError, match=r"reward\.num_workers=0 with reward\.reward_manager\.name=prime"):
        PrimeRewardManager(TOKENIZER, compute_score, RewardConfig(num_workers=0))


# --- rate_limited


def busy_error():
    class Busy(Exception):
        """As clients raise it: with the response, whose headers say how long to wait."""

        def __init__(self, retry_after=None):
            super().__init__("slow down")
            headers = {} if retry_after is None else {"retry-after": str(retry_after)}
            self.response = type("Response", (), {"status_code": 429, "headers": headers})()

    return Busy


def limited(function, limits, **config):
    return RateLimitedRewardManager(TOKENIZER, function, RewardConfig(rate_limit=RateLimitConfig(**limits), **config))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_busy_service_is_called_again_and_an_error_is_not(kind, tmp_path):
    Busy = busy_error()

    def answer(text):
        calls = tmp_path / text
        with open(calls, "a") as file:
            file.write("x")
        made = calls.stat().st_size
        if text == "a" and made < 3:
            raise Busy(0.01)
        if text == "bb":
            raise Busy()
        if text == "ccc":
            raise ValueError("no such rubric")
        return len(text)

    def sync(solution_str, **row):
        return answer(solution_str)

    async def asynchronous(solution_str, **row):
        return answer(solution_str)

    function = sync if kind == "sync" else asynchronous
    result = scores_of(limited(function, {"max_attempts": 3, "retry_delay": 0.01}, num_workers=1))
    assert sums(result) == [1, 0, 0, 4]
    assert result.metrics["reward/error_count"] == 2
    assert [(tmp_path / text).stat().st_size for text in FOUR] == [3, 3, 1, 1]


def test_the_error_says_how_often_it_was_called():
    Busy = busy_error()

    async def busy(**row):
        raise Busy

    manager = limited(busy, {"max_attempts": 2, "retry_delay": 0.01}, on_error="raise")
    with pytest.raises(RewardError, match=r"Busy: slow down \(It was called 2 times\.\)"):
        scores_of(manager)


def test_calls_keep_to_the_limits():
    async def begun(**row):
        import asyncio
        import time

        now = time.time()
        await asyncio.sleep(0.15)
        return {"score": 1, "begun": now, "ended": time.time()}

    def most_at_once(result):
        spans = list(zip(result.extras["begun"], result.extras["ended"], strict=True))
        return max(sum(begun <= other[0] < ended for begun, ended in spans) for other in spans)

    texts = FOUR * 2
    free = scores_of(limited(begun, {"max_concurrent": 3}), texts)
    assert most_at_once(free) == 3
    slow = scores_of(limited(begun, {"max_concurrent": 9, "max_rpm": 600}), texts)
    times = sorted(slow.extras["begun"])
    assert times[-1] - times[0] >= 7 * 0.1 - 0.05


def test_a_call_that_hangs_is_ended_after_its_own_time_limit():
    async def hangs(solution_str, **row):
        import asyncio

        await asyncio.sleep(60 if solution_str == "a" else 0)
        return 1

    result = scores_of(limited(hangs, {"timeout": 0.3, "max_concurrent": 2}))
    assert sums(result) == [0, 1, 1, 1]
    assert result.metrics["reward/timeout_count"] == 1


def test_rate_limited_needs_processes():
    with pytest.raises(ConfigError, match=r"reward\.num_workers=0 with reward\.reward_manager\.name=rate_limited"):
        limited(lambda **row: 1, {}, num_workers=0)


# --- remote


def remote(url, **settings):
    config = RemoteRewardConfig(url=url, **({"retry_delay": 0.01} | settings))
    return RemoteRewardManager(TOKENIZER, None, RewardConfig(remote=config))


def lengths(body, number):
    results = [{"id": row["id"], "score": len(row["solution_str"]), "number": number} for row in body["rows"]]
    random.Random(number).shuffle(results)
    return Reply({"results": results})


def test_remote_sends_rows_as_json_and_scores_by_id():
    with serving(lengths) as server:
        result = scores_of(remote(server.url + "/score"), truths=["1", 2, ["3"], None], source="mine")
    assert sums(result) == [1, 2, 3, 4]
    ((body, _, _),) = server.requests
    assert body["path"] == "/score"
    assert body["rows"][2] == {
        "id": body["rows"][2]["id"],
        "data_source": "mine",
        "solution_str": "ccc",
        "ground_truth": ["3"],
        "extra_info": {"row": 2},
        "prompt": None,
    }
    assert result.extras["number"].tolist() == [1] * 4


def test_a_thousand_rows_in_shuffled_answers_keep_their_scores():
    texts = ["x" * random.Random(i).randint(1, 30) for i in range(1000)]

    def answer(body, number):
        time.sleep(0.01)
        return lengths(body, number) if number % 7 else Reply(status=503)

    with serving(answer) as server:
        result = scores_of(remote(server.url, rows_per_request=16, max_concurrent=4), texts)
    assert sums(result) == [len(text) for text in texts]
    assert max(len(body["rows"]) for body, _, _ in server.requests) == 16
    assert 2 <= server.most_at_once <= 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda results: results[:-1], r"\(not answered: \d+\)"),
        (lambda results: [*results, results[0]], "answered twice: "),
        (lambda results: [{**results[0], "id": "x"}, *results[1:]], "not answered: .*never sent: x"),
        (lambda results: {"0": 1}, "must answer"),
        (lambda results: [{"score": 1}], "must answer"),
        (lambda results: None, "must answer"),
    ],
)
def test_an_answer_whose_ids_are_wrong_is_not_used(spoil, message):
    def answer(body, number):
        return Reply({"results": spoil(lengths(body, number).body["results"])})

    with serving(answer) as server, pytest.raises(RewardError, match=f"failed on all 4 rows.*{message}"):
        scores_of(remote(server.url))


def test_a_server_may_abstain_and_fail_for_single_rows():
    def answer(body, number):
        first, second, third, fourth = (row["id"] for row in body["rows"])
        told = [
            {"id": first, "score": None},
            {"id": second, "error": "no such test"},
            {"id": third},
            {"id": fourth, "score": 0.5},
        ]
        return Reply({"results": told})

    with serving(answer) as server:
        result = scores_of(remote(server.url))
    assert sums(result) == [0, 0, 0, 0.5]
    assert result.metrics["reward/abstain_count"] == 1
    assert result.metrics["reward/error_count"] == 2


def test_a_row_that_is_no_json_fails_alone():
    data = batch_of(FOUR)
    data.non_tensor_batch["extra_info"][1] = {"when": float("nan")}
    with serving(lengths) as server:
        manager = remote(server.url)
        assert sums(manager(data)) == [1, 0, 3, 4]
        manager.close()


def test_a_server_that_is_gone_or_too_slow_fails_its_rows(caplog):
    def slow_for_b(body, number):
        if body["rows"][0]["solution_str"] == "bb":
            time.sleep(0.6)
        return lengths(body, number)

    with serving(slow_for_b) as server:
        result = scores_of(remote(server.url, rows_per_request=1, timeout=0.3, max_attempts=1))
    assert sums(result) == [1, 0, 3, 4]
    assert result.metrics["reward/timeout_count"] == 1
    with pytest.raises(RewardError, match=r"failed on all 4 rows.*cannot be talked to.*asked 2 times"):
        scores_of(remote(server.url, max_attempts=2))


def test_remote_takes_no_function_and_needs_an_address():
    with pytest.raises(ConfigError, match=r"needs reward\.remote\.url"):
        RemoteRewardManager(TOKENIZER, None, RewardConfig())
    config = RewardConfig(remote=RemoteRewardConfig(url="http://h"))
    with pytest.raises(ConfigError, match="would never be called"):
        RemoteRewardManager(TOKENIZER, lambda **row: 1, config)


@pytest.mark.parametrize("while_sampling", [False, True])
def test_rows_that_are_submitted_one_by_one_are_scored_as_those_of_a_batch(while_sampling):
    with serving(lengths) as server:
        manager = remote(server.url)
        rows = manager.rows_of(batch_of(FOUR))
        if while_sampling:
            for i, row in enumerate(rows):
                manager.scorer().submit(i, row)
            outcomes = manager.scorer().collect(range(4))
            assert [outcomes[i].value["score"] for i in range(4)] == [1, 2, 3, 4]
            with pytest.raises(RewardError, match="collected already"):
                manager.scorer().collect([0])
        else:
            assert [outcome.value["score"] for outcome in manager.score_rows(rows)] == [1, 2, 3, 4]
        manager.close()
        manager.close()


# --- judges


@pytest.mark.parametrize("name", ["naive", "rate_limited"])
def test_a_judge_takes_the_place_of_the_reward_function(name):
    refused_once = threading.Lock()

    def answer(body, number):
        text = body["messages"][0]["content"]
        if "bb" in text:
            return Reply({"choices": [{"message": {"content": "I cannot say."}}]})
        # The rows come in any order: the first of the others is refused, whichever request it is.
        if refused_once.acquire(blocking=False):
            return Reply(status=429, headers={"Retry-After": "0.05"})
        assert "Which letter?" in text
        return Reply({"choices": [{"message": {"content": f"Score: {text.count('c')}"}}]})

    with serving(answer) as server:
        judge = JudgeConfig(url=server.url, model="m", retry_delay=0.01, template="{{ question }} {{ response }}")
        limits = RateLimitConfig(retry_delay=0.01)
        config = RewardConfig(reward_manager=RewardManagerConfig(name=name), judge=judge, rate_limit=limits)
        manager = load_reward_manager(config, TOKENIZER)
        data = batch_of(["cc", "bb", "cccc"])
        data.non_tensor_batch["raw_prompt"] = data.non_tensor_batch["extra_info"].copy()
        data.non_tensor_batch["raw_prompt"][:] = [[{"role": "user", "content": "Which letter?"}]] * 3
        result = manager(data)
        manager.close()
    # "Which" has one c.
    assert sums(result) == pytest.approx([0.3, 0, 0.5])
    assert result.metrics["reward/error_count"] == 1
    assert result.extras["judge_score"].tolist() == [3, None, 5]
    assert len(server.requests) == 4


# --- a manager of the user's own


def test_a_manager_of_ones_own_comes_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from burnish.reward import NaiveRewardManager\n"
        "class Half(NaiveRewardManager):\n"
        "    def _shape(self, scores, lengths):\n"
        "        import dataclasses\n"
        "        return [dataclasses.replace(score, value=score.value / 2) for score in scores]\n"
        "number = 3\n"
    )

    def config(name, path=str(file), source="importlib"):
        module = RewardManagerModuleConfig(path=path)
        return RewardConfig(reward_manager=RewardManagerConfig(name=name, source=source, module=module), num_workers=0)

    function = functools.partial(lambda solution_str, factor, **row: factor * len(solution_str), factor=1)
    manager = load_reward_manager(config("Half"), TOKENIZER, compute_score=function)
    assert sums(scores_of(manager)) == [0.5, 1, 1.5, 2]
    for wrong, message in (
        (config("Whole"), "there is no 'Whole' in it. It defines:.*Half"),
        (config("number"), "this is int in .*not a class of reward managers"),
        (config("Half", path=None), r"needs reward\.reward_manager\.module\.path"),
        (config("Half", path="no/such.py"), "there is no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_reward_manager(wrong, TOKENIZER)
