"""Runs whose rewards are asked from servers, equal to runs whose function is called here."""

from pathlib import Path

import pytest

from tests.e2e.runs import tiny_run
from tests.reward.http_server import Reply, serving

MY_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 3 / 2
"""


def score(text: str) -> float:
    return len(text) % 3 / 2


def remote(body, number):
    assert all(row["prompt"][-1]["role"] == "user" for row in body["rows"])
    return Reply({"results": [{"id": row["id"], "score": score(row["solution_str"])} for row in body["rows"][::-1]]})


def judge(body, number):
    text = body["messages"][0]["content"].partition("|")[2]
    return Reply({"choices": [{"message": {"content": f"Score: {10 * score(text)}"}}]})


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["local", "ray"])
def test_a_score_is_the_same_from_a_function_a_server_and_a_judge(tmp_path: Path, controller: str) -> None:
    keys = ["reward.num_workers=auto", "trainer.total_training_steps=1", f"trainer.controller={controller}"]
    file = tmp_path / "my_reward.py"
    file.write_text(MY_REWARD)
    here = tiny_run(tmp_path / "here", *keys, f"reward.custom_reward_function.path={file}").metrics
    assert 0 < here["critic/score/mean"] < 1
    with serving(remote) as server:
        told = ["reward.reward_manager.name=remote", f"reward.remote.url={server.url}"]
        from_server = tiny_run(tmp_path / "remote", *keys, *told).metrics
    with serving(judge) as server:
        told = [
            f"reward.judge.url={server.url}",
            "reward.judge.model=m",
            "reward.judge.template='{{question}}|{{response}}'",
        ]
        limits = ["reward.reward_manager.name=rate_limited", "reward.rate_limit.max_rpm=60000"]
        from_judge = tiny_run(tmp_path / "judge", *keys, *told, *limits).metrics
    for other in (from_server, from_judge):
        assert other["critic/score/mean"] == pytest.approx(here["critic/score/mean"])
        assert other["reward/error_count"] == 0
    assert from_judge["reward/judge_score/mean"] == pytest.approx(10 * here["critic/score/mean"])
