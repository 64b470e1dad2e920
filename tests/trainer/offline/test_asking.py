"""What `burnish generate` and `burnish eval` ask a model, and what they make of its answers."""

from pathlib import Path

import numpy as np
import pytest

from burnish.reward.score import Score
from burnish.trainer.offline import numbers
from burnish.trainer.offline.evaluate import EvalOptions, evaluate
from burnish.trainer.offline.generate import prepare
from burnish.trainer.offline.settings import AskOptions
from burnish.utils.errors import ConfigError, DataError
from tests.trainer.offline.asking import CPU, answers


@pytest.mark.slow
def test_engines_give_the_same_greedy_responses(tiny_model_path: str, test_data: str) -> None:
    by_engine = [
        answers(tiny_model_path, data=[test_data], limit=6, max_tokens=6, engine=name) for name in ("native", "hf")
    ]
    assert by_engine[0] == by_engine[1]


def test_a_prompt_of_the_command_line_is_a_message_of_the_user(tiny_model_path: str) -> None:
    hot = {"prompts": ["12+7=", "3+3="], "n": 4, "temperature": 2.0}
    rows = answers(tiny_model_path, seed=3, **hot)
    assert [row["prompt"] for row in rows[::4]] == [[{"role": "user", "content": text}] for text in hot["prompts"]]
    assert set(rows[0]) == {"prompt", "uid", "sample_index", "response", "finish_reason", "num_tokens"}
    assert rows == answers(tiny_model_path, seed=3, **hot)
    assert rows != answers(tiny_model_path, seed=4, **hot)


def test_lengths_are_those_of_the_prompts_and_the_model(tiny_model_path: str, test_data: str) -> None:
    asked = prepare(tiny_model_path, AskOptions(data=[test_data], limit=3, **CPU))
    rollout = asked.config.actor_rollout_ref.rollout
    assert rollout.max_model_len == 512 == rollout.prompt_length + rollout.response_length
    with pytest.raises(
        DataError, match=r"this prompt has \d+ tokens, and the model has 512 positions.*of the 600 tokens"
    ):
        prepare(tiny_model_path, AskOptions(data=[test_data], limit=3, max_tokens=600, **CPU))
    with pytest.raises(DataError, match="has 512 positions"):
        prepare(tiny_model_path, AskOptions(prompts=["1+" * 300], **CPU))


def test_eval_without_data_asks_for_the_option_that_it_has(tiny_model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"^--data names the file of prompts with their right answers"):
        evaluate(EvalOptions(models=[tiny_model_path], ask=AskOptions(**CPU)))


def test_data_that_cannot_be_asked_are_named_as_the_command_has_them(tiny_model_path: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match=r"^--data=\['\S+empty\.jsonl'\]: it holds no rows"):
        prepare(tiny_model_path, AskOptions(data=[str(empty)], **CPU))
    with pytest.raises(DataError, match=r"^--data: .*nowhere\.jsonl|^--data=.*nowhere\.jsonl"):
        prepare(tiny_model_path, AskOptions(data=[str(tmp_path / "nowhere.jsonl")], **CPU))


def test_wrong_requests_are_sentences_before_anything_is_loaded(
    tiny_model_path: str, test_data: str, tmp_path: Path
) -> None:
    for options, said in (
        ({}, "--data FILE or from --prompt TEXT"),
        ({"data": [test_data], "prompts": ["x"]}, "one of the two"),
        ({"data": [test_data], "engine": "sglang"}, "--engine=sglang: there is native, vllm, hf"),
        ({"data": [test_data], "n": 0}, "-n=0"),
        ({"data": [test_data], "top_p": 0.0}, "--top-p=0.0"),
        ({"data": [test_data], "temperature": float("nan")}, "--temperature=nan"),
        ({"data": [test_data], "overrides": ["actor_rollout_ref.rollout.val_kwargs.topp=1"]}, "top_p"),
        ({"data": [test_data], "reward": "reward.py"}, "my_reward.py:compute_score"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(tiny_model_path, AskOptions(**CPU, **options))  # type: ignore[arg-type]
    ask = AskOptions(data=[test_data], n=4, limit=2, **CPU)
    with pytest.raises(ConfigError, match="-k 8: of 4 responses"):
        evaluate(EvalOptions(models=[tiny_model_path], ask=ask, sizes=[8]))
    with pytest.raises(ConfigError, match="no folder .*nowhere"):
        evaluate(EvalOptions(models=[tiny_model_path, str(tmp_path / "nowhere")], ask=ask))
    with pytest.raises(ConfigError, match="--pass-score=nan"):
        evaluate(EvalOptions(models=[tiny_model_path], ask=ask, pass_score=float("nan")))
    with pytest.raises(ConfigError, match="3 models"):
        evaluate(EvalOptions(models=[tiny_model_path] * 3, ask=ask))
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text('{"prompt": "1+1=", "data_source": "my/own", "reward_model": {"ground_truth": "2"}}\n')
    with pytest.raises(DataError, match="my/own"):
        evaluate(EvalOptions(models=[tiny_model_path], ask=AskOptions(data=[str(unknown)], **CPU)))


def test_a_response_without_a_score_is_wrong_and_casts_no_vote() -> None:
    def score(value: float | None, pred: str = "", reason: str = "") -> Score:
        return Score(value=value, extras={"pred": pred} if value is not None else {}, reason=reason)

    groups = [
        [score(1.0, "a"), score(None, reason="error"), score(0.0, "b"), score(1.0, "a")],
        [score(None, reason="abstain")] * 4,
    ]
    found = numbers.prompt_numbers(groups, pass_score=1.0)
    assert found["mean@4"][0] == pytest.approx(2 / 3)
    assert np.isnan(found["mean@4"][1])
    assert found["pass@1"].tolist() == [0.5, 0.0]
    assert found["maj@4"].tolist() == [1.0, 0.0]
    assert numbers.means(found)["mean@4"] == pytest.approx(2 / 3)
    assert numbers.counts(groups[0]) == {
        "num_scored": 3, "num_error": 1, "num_timeout": 0, "num_non_finite": 0, "num_abstain": 0,
    }  # fmt: skip


def test_what_counts_as_right_is_acc_or_a_threshold() -> None:
    assert numbers.is_right(Score(value=0.5, extras={"acc": True}), 1.0)
    assert not numbers.is_right(Score(value=2.0, extras={"acc": False}), 1.0)
    assert numbers.is_right(Score(value=0.5), 0.5)
    assert not numbers.is_right(Score(value=None), 0.0)
