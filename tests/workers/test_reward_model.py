"""The reward model's worker gives what transformers gives, and puts it where the reward belongs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from burnish.config import load_config
from burnish.protocol import DataProto, object_array
from burnish.render import load_tokenizer
from burnish.utils.errors import ConfigError, ModelError
from burnish.workers import RewardModelWorker

PAD = 0


@pytest.fixture(scope="module")
def reward_model_path(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with one label and the tiny model's backbone, tokenizer and template."""
    folder = str(tmp_path_factory.mktemp("reward_model"))
    config = AutoConfig.from_pretrained(tiny_model_path, num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, config=config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    load_tokenizer(tiny_model_path).save_pretrained(folder)
    return folder


def worker_of(path: str, policy: str, *overrides: str) -> RewardModelWorker:
    config = load_config(
        [
            f"actor_rollout_ref.model.path={policy}",
            "data.train_files=unused.jsonl",
            "reward.reward_model.enable=true",
            f"reward.reward_model.model_path={path}",
            "reward.reward_model.model.fsdp_config.dtype=float32",
            *(f"reward.reward_model.{override}" for override in overrides),
        ]
    )
    worker = RewardModelWorker(config.reward.reward_model, "cpu", policy)
    worker.init_model()
    return worker


def batch_of(prompts: list[list[int]], responses: list[list[int]], **columns: Any) -> DataProto:
    """Left-padded prompts, right-padded responses; a response of no token is a row without a token of the policy."""
    p, r = max(map(len, prompts)), max(map(len, responses))
    ids, mask = torch.full((len(prompts), p + r), PAD), torch.zeros(len(prompts), p + r, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, p - len(prompt) : p + len(response)] = torch.tensor(prompt + response)
        mask[row, p - len(prompt) : p + len(response)] = True
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, p:],
            "response_mask": mask[:, p:],
        },
        non_tensors={"uid": object_array([str(row) for row in range(len(prompts))]), **columns},
    )


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]]
RESPONSES = [[20, 21], [22, 23, 24, 25, 26], [27], [28, 29, 30]]


def by_transformers(path: str, texts: list[list[int]]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([text])).logits[0, 0] for text in texts])


@pytest.mark.parametrize("cut", ["micro_batch_size_per_gpu=1", "micro_batch_size_per_gpu=3", "use_dynamic_bsz=true"])
def test_scores_are_those_of_a_loop_over_transformers_model(
    reward_model_path: str, tiny_model_path: str, cut: str
) -> None:
    worker = worker_of(reward_model_path, tiny_model_path, "model.input_tokenizer=null", cut)
    scores = worker.compute_rm_score(batch_of(PROMPTS, RESPONSES)).tensors["rm_scores"]
    expected = by_transformers(reward_model_path, [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert expected.std() > 0.1  # Another row's score would show.
    torch.testing.assert_close(scores.sum(-1), expected, rtol=1e-5, atol=1e-5)


def test_a_score_sits_on_the_last_token_of_the_policy_and_a_row_without_one_has_none(
    reward_model_path: str, tiny_model_path: str
) -> None:
    worker = worker_of(reward_model_path, tiny_model_path, "model.input_tokenizer=null")
    scores = worker.compute_rm_score(batch_of([*PROMPTS, [5]], [*RESPONSES, []])).tensors["rm_scores"]
    assert scores.ne(0).tolist() == [
        [column == len(response) - 1 for column in range(5)] for response in [*RESPONSES, []]
    ]


def test_a_models_own_template_renders_the_conversation(reward_model_path: str, tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(tiny_model_path)
    answers = ["forty-two", "7"]
    messages = [[{"role": "user", "content": text}] for text in ("six times seven?", "what?")]
    other = load_tokenizer(reward_model_path)
    other.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!"
    worker = worker_of(reward_model_path, tiny_model_path)
    worker.tokenizer = other
    responses = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
    # The prompt's ids are not looked at: they are of another template.
    batch = batch_of([[5], [6]], responses, raw_prompt=object_array(messages))
    scores = worker.compute_rm_score(batch).tensors["rm_scores"].sum(-1)
    texts = [f"<user>{m[0]['content']}<assistant>{a}!" for m, a in zip(messages, answers, strict=True)]
    expected = by_transformers(
        reward_model_path, [other(text, add_special_tokens=False)["input_ids"] for text in texts]
    )
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_of_a_long_conversation_the_end_is_read(
    reward_model_path: str, tiny_model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(reward_model_path, tiny_model_path, "model.input_tokenizer=null", "max_length=4")
    scores = worker.compute_rm_score(batch_of(PROMPTS, RESPONSES)).tensors["rm_scores"].sum(-1)
    texts = [(p + r)[-4:] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    torch.testing.assert_close(scores, by_transformers(reward_model_path, texts), rtol=1e-5, atol=1e-5)
    assert "beginning of 4 of 4 conversations was cut" in caplog.text


def test_ids_of_another_vocabulary_are_refused(reward_model_path: str, tiny_model_path: str) -> None:
    worker = worker_of(reward_model_path, tiny_model_path, "model.input_tokenizer=null")
    with pytest.raises(ConfigError, match="token id 100000.*input_tokenizer"):
        worker.compute_rm_score(batch_of([[5]], [[100000]]))


def test_a_model_with_a_value_head_beside_it_scores_too(tiny_model_path: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model_path, num_labels=1)
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, config=config, dtype=torch.float32)
    classifier.save_pretrained(tmp_path / "classifier")
    classifier.base_model.save_pretrained(tmp_path / "value")
    head = {"value_head.weight": classifier.score.weight.detach().clone(), "value_head.bias": torch.tensor([0.5])}
    save_file(head, tmp_path / "value" / "value_head.safetensors")
    worker = worker_of(str(tmp_path / "value"), tiny_model_path, "model.input_tokenizer=null")
    scores = worker.compute_rm_score(batch_of(PROMPTS, RESPONSES)).tensors["rm_scores"].sum(-1)
    texts = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    expected = by_transformers(str(tmp_path / "classifier"), texts) + 0.5
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_a_language_model_is_no_reward_model(tiny_model_path: str) -> None:
    with pytest.raises(ModelError, match="2 labels.*judge"):
        worker_of(tiny_model_path, tiny_model_path)
