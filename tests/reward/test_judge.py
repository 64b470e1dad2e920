import asyncio
import json
import pickle

import pytest

from burnish.config.reward_services import JudgeConfig
from burnish.reward.judge import Judge, chat_completions, compute_score
from burnish.utils.errors import ConfigError, RewardError
from tests.reward.http_server import Reply, serving


def judge(url="http://h", **settings):
    return Judge(JudgeConfig(url=url, model="m", **({"retry_delay": 0.01} | settings)))


def completion(text, **more):
    return Reply({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], **more})


def asked(one, question="How much?", response="72 $", truth="72", **extra_info):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    return asyncio.run(
        one(data_source="d", solution_str=response, ground_truth=truth, extra_info=extra_info, prompt=prompt)
    )


def test_a_judge_is_asked_by_chat_completion_and_its_scale_becomes_0_to_1():
    with serving(lambda body, number: completion("Fine.\nScore: 7.5", usage={"total_tokens": 321})) as server:
        result = asked(judge(server.url, system="Be strict.", extra_body={"top_p": 0.9}))
    assert result == {
        "score": 0.75,
        "judge_score": 7.5,
        "judge_text": "Fine.\nScore: 7.5",
        "judge_failed_votes": 0,
        "num_request_tokens": 321,
    }
    body = server.requests[0][0]
    assert body["path"] == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_p"]) == ("m", 0.0, 1024, 0.9)
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    for part in ("How much?", "72 $", "[Correct answer]\n72", "from 0 (wrong) to 10 (right)"):
        assert part in user["content"]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/", "http://h:8000/v1/chat/completions"),
        ("https://h/api/v2", "https://h/api/v2/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_the_address_is_that_of_the_server_of_its_api_or_of_the_completions(url, address):
    assert chat_completions(url) == address


@pytest.mark.parametrize(
    ("settings", "text", "score"),
    [
        ({}, "Score: 7", 7),
        ({}, "score = 3.5", 3.5),
        ({}, "**Score:** 4", 4),
        ({}, "**Score**: **10**", 10),
        ({}, "First I thought Score: 2, but no.\nScore: 9", 9),
        ({}, "<think>Score: 1</think>Score: 8", 8),
        ({"scale": [-1.0, 1.0]}, "Score: -1", -1),
        ({"score_pattern": r"\[\[(\d+)\]\]"}, "[[3]] then [[5]]", 5),
        ({"score_json": "rating"}, '```json\n{"why": "a {b}", "rating": 6}\n```', 6),
        ({"score_json": "rating"}, 'draft {"rating": 1} final {"rating": "8"} {"x": 1} {', 8),
    ],
)
def test_the_last_score_of_the_answer_counts(settings, text, score):
    assert judge(**settings).read(text) == score


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({}, "It is good.", "There is no score in the judge's answer, which ends: 'It is good.'"),
        ({}, "<think>Score: 7</think> I cannot say.", "no score"),
        ({}, "Score: 11", "gives 11, which is outside its scale 0 to 10"),
        ({}, "Score: -1", "gives -1, which is outside"),
        ({"score_json": "rating"}, "rating: 5", "no JSON object with a number under 'rating'"),
        ({"score_json": "rating"}, '{"rating": true and', "no JSON object"),
        ({"score_json": "rating"}, '{"rating": NaN}', "no JSON object"),
    ],
)
def test_an_answer_without_a_score_is_a_failure(settings, text, message):
    with pytest.raises(RewardError, match=message):
        judge(**settings).read(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("blank", [" ", "\n"])
def test_blanks_behind_the_word_score_take_linear_time(blank):
    with pytest.raises(RewardError, match="no score"):
        judge().read(f"Score: {blank * 100_000}unknown")


@pytest.mark.parametrize(
    ("vote", "texts", "score"),
    [
        ("mean", ["Score: 1", "Score: 2", "Score: 9"], 4),
        ("median", ["Score: 1", "Score: 2", "Score: 9"], 2),
        ("majority", ["Score: 9", "Score: 2", "Score: 9"], 9),
        ("majority", ["Score: 9", "Score: 2", "no idea"], 2),
    ],
)
def test_votes_are_combined_and_those_without_a_score_are_left_out(vote, texts, score):
    with serving(lambda body, number: completion(texts[number - 1])) as server:
        result = asked(judge(server.url, num_votes=3, temperature=0.7, vote=vote))
    assert result["judge_score"] == score
    assert result["judge_failed_votes"] == texts.count("no idea")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (completion("no idea"), "no score in the judge's answer"),
        (completion(None), r"answer is empty \(finish_reason 'stop'\).*reward\.judge\.max_tokens=1024"),
        (Reply({"choices": []}), "not with a chat completion"),
        (Reply({"error": {"message": "no such model: m"}}, 404), "answered 404: no such model: m"),
        (Reply([1]), "not with a chat completion"),
    ],
)
def test_an_answer_of_no_use_is_said(reply, message):
    with serving(lambda body, number: reply) as server, pytest.raises(RewardError, match=message):
        asked(judge(server.url))
    assert len(server.requests) == 1


def test_a_busy_judge_is_asked_again_but_not_by_one_that_is_to_ask_once():
    replies = [Reply(status=429), completion("Score: 10"), Reply(status=429)]
    with serving(lambda body, number: replies[number - 1]) as server:
        assert asked(judge(server.url))["score"] == 1
        with pytest.raises(RewardError, match="answered 429"):
            asked(judge(server.url).once())
    assert len(server.requests) == 3


def test_a_template_of_ones_own(tmp_path):
    file = tmp_path / "grade.jinja"
    file.write_text("{{ data_source }}|{{ question }}|{{ response }}|{{ extra_info.rubric }}|{{ prompt[0].content }}")
    with serving(lambda body, number: completion("Score: 0")) as server:
        asked(judge(server.url, template=str(file)), response="{{ 7 * 7 }}", rubric="r")
        asked(judge(server.url, template="{{ question }}{{ response }}"), question="q", response="r")
    texts = [body["messages"][0]["content"] for body, _, _ in server.requests]
    # What the policy wrote is text, never a template.
    assert texts == ["d|How much?|{{ 7 * 7 }}|r|s", "qr"]


def test_the_question_is_that_of_extra_info_else_the_last_of_the_user_else_there_is_none():
    with serving(lambda body, number: completion("Score: 0")) as server:
        one = judge(server.url, template="{{ question }} {{ response }}")
        asked(one, response="r", question="from the prompt")
        asyncio.run(one("d", "r", None, {"question": "from the row"}, [{"role": "user", "content": "x"}]))
        asyncio.run(one("d", "r", None, {}, [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]))
        with pytest.raises(
            RewardError, match=r"template cannot be filled in.*neither a prompt nor extra_info\.question"
        ):
            asyncio.run(one("d", "r", None))
    texts = [body["messages"][0]["content"] for body, _, _ in server.requests]
    assert texts == ["from the prompt r", "from the row r", "in parts r"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{{ respons }}"}, r"reward\.judge\.template uses respons; there is: question, response"),
        ({"template": "{{ question }}"}, "does not show the response"),
        ({"template": "{{ response"}, r"reward\.judge\.template, line 1"),
        ({"template": "no/such.jinja"}, "there is no such file"),
        ({"score_pattern": "("}, r"reward\.judge\.score_pattern=\(: this is no regular expression"),
        ({"score_pattern": r"\d"}, "there must be one group"),
        ({"score_pattern": r"(\d)", "score_json": "x"}, "read in one way"),
        ({"scale": [1.0, 1.0]}, r"reward\.judge\.scale=\[1\.0, 1\.0\]"),
        ({"num_votes": 3}, r"num_votes=3 with reward\.judge\.temperature=0"),
        ({"model": None}, r"a judge needs reward\.judge\.url"),
        ({"url": "h:8000"}, r"reward\.judge\.url=.* is no address"),
    ],
)
def test_settings_of_no_use_are_refused_before_anything_is_asked(settings, message):
    with pytest.raises(ConfigError, match=message):
        Judge(JudgeConfig(**({"url": "http://h", "model": "m"} | settings)))


def test_a_template_reaches_nothing_outside_itself():
    with pytest.raises(RewardError, match="cannot be filled in"):
        asked(judge(template="{{ response.__class__.__mro__[1].__subclasses__() }}"))


def test_a_judge_travels_and_is_one_of_several_functions():
    with serving(lambda body, number: completion("Score: 5")) as server:
        assert asked(pickle.loads(pickle.dumps(judge(server.url))))["score"] == 0.5
        settings = {"url": server.url, "model": "m", "scale": [0, 5]}
        result = asyncio.run(compute_score("d", "r", None, {"question": "q"}, **settings))
        assert json.loads(json.dumps(result))["score"] == 1
    with pytest.raises(ConfigError, match="They are the keys of reward.judge"):
        asyncio.run(compute_score("d", "r", None, {"question": "q"}, adress="http://h"))
