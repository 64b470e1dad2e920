"""A judge served by burnish itself."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config.reward_services import JudgeConfig
from burnish.reward.judge import Judge
from burnish.utils.errors import RewardError
from tests.rollout.server.serving import listening, says, serving

REPO = Path(__file__).parents[2]


def judged(url, response, **settings):
    judge = Judge(JudgeConfig(url=url, retry_delay=0.01, api_key_env="JUDGE_TEST_KEY", **settings))
    return asyncio.run(judge("d", response, None))


def test_the_server_of_burnish_answers_a_judge(monkeypatch):
    with serving(says("Right. Score: 8"), api_key="k") as server, listening(server) as url:
        settings = {"model": "fake", "template": "Grade: {{ response }}", "max_tokens": 50}
        monkeypatch.setenv("JUDGE_TEST_KEY", "k")
        result = judged(url, "72", **settings)
        assert (result["score"], result["judge_text"]) == (0.8, "Right. Score: 8")
        assert result["num_request_tokens"] > 20
        monkeypatch.setenv("JUDGE_TEST_KEY", "another")
        with pytest.raises(RewardError, match="answered 401"):
            judged(url, "72", **settings)


@pytest.mark.slow
def test_a_model_served_by_the_command_is_a_judge(monkeypatch):
    monkeypatch.setenv("JUDGE_TEST_KEY", "k")
    command = [sys.executable, "-m", "burnish", "serve", "examples/tiny_model/model", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "BURNISH_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if line.startswith("Serving"))
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        # The tiny model can add: it "judges" a sum by its result.
        settings = {"template": "{{ response }}", "score_pattern": r"(\d+)", "max_tokens": 8, "scale": [0.0, 20.0]}
        result = judged(url, "3+4=", model="examples/tiny_model/model", **settings)
        assert 0 <= result["score"] <= 1
        assert result["judge_text"].strip().isdigit()
        server.send_signal(signal.SIGINT)
        server.wait(30)
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stderr.close()
