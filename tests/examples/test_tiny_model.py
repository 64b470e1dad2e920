"""The demo's model, tokenizer and data: valid, loadable, and as ignorant as they claim."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny_model.data import (
    DATA_SOURCE,
    FOLDER,
    NUM_TEST,
    NUM_TRAIN,
    Problem,
    all_problems,
    split_problems,
    write_data,
)
from examples.tiny_model.make_model import IGNORED, Lessons, answer_all, build_model, measure, prompt_ids, train
from examples.tiny_model.tokenizer import SPECIAL_TOKENS, build_tokenizer

MODEL = FOLDER / "model"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def read_rows(split: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def problem_of(row: dict) -> Problem:
    content = row["prompt"][0]["content"].removesuffix("=")
    op = "+" if "+" in content else "-"
    left, right = content.split(op)
    return Problem(int(left), op, int(right))


# Tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_round_trips_as_its_bytes(text: str) -> None:
    tokenizer = build_tokenizer(512)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == list(text.encode()) or any(token in text for token in SPECIAL_TOKENS)


def test_saved_tokenizer_is_the_one_that_the_script_builds(tokenizer: PreTrainedTokenizerFast) -> None:
    built = build_tokenizer(512)
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    for text in ("17+25=", " two  spaces, and a comma .", "é🎉\n\t\x00", "<|user|>12-5=<|end|>"):
        assert tokenizer.encode(text) == built.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pad_and_end_of_turn_are_different_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode([tokenizer.pad_token_id, 52, 50, tokenizer.eos_token_id], skip_special_tokens=True) == "42"


def test_chat_template_renders_turns_and_opens_the_assistants(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "17+25="},
        {"role": "assistant", "content": "42"},
    ]
    closed = "<|system|>Be exact.<|end|><|user|>17+25=<|end|><|assistant|>42<|end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == closed
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert closed.startswith(opened)
    assert opened.endswith("<|assistant|>")
    ids = tokenizer.apply_chat_template(messages[1:2], add_generation_prompt=True)["input_ids"]
    assert ids == prompt_ids(tokenizer, Problem(17, "+", 25))


# Data


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_row_asks_a_problem_and_holds_its_answer(split: str) -> None:
    for index, row in enumerate(read_rows(split)):
        problem = problem_of(row)
        assert row["prompt"] == [{"role": "user", "content": problem.prompt}]
        assert row["data_source"] == DATA_SOURCE
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(problem.answer)}
        assert row["extra_info"] == {"split": split, "index": index}


def test_test_problems_are_held_out_of_everything_even_mirrored() -> None:
    train_rows = {problem_of(row) for row in read_rows("train")}
    test_rows = {problem_of(row) for row in read_rows("test")}
    _, _, rest = split_problems()
    assert (len(train_rows), len(test_rows)) == (NUM_TRAIN, NUM_TEST)
    assert (len(read_rows("train")), len(read_rows("test"))) == (NUM_TRAIN, NUM_TEST)
    assert train_rows <= set(rest)
    held_out = test_rows | {problem.mirrored for problem in test_rows}
    assert held_out.isdisjoint(rest)
    assert held_out | set(rest) == set(all_problems())


def test_data_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_data(tmp_path)
    for split in ("train", "test"):
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (FOLDER / "data" / f"{split}.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("problem", "answer", "careless"),
    [
        (Problem(17, "+", 25), 42, 32),
        (Problem(57, "+", 68), 125, 115),
        (Problem(12, "+", 25), 37, 37),
        (Problem(52, "-", 17), 35, 45),
        (Problem(52, "-", 11), 41, 41),
        (Problem(7, "+", 8), 15, 5),
    ],
)
def test_careless_answers_forget_the_carry_and_nothing_else(problem: Problem, answer: int, careless: int) -> None:
    assert (problem.answer, problem.careless_answer) == (answer, careless)
    assert problem.needs_carry == (answer != careless)


def test_no_answer_is_negative_however_careless() -> None:
    assert min(min(problem.answer, problem.careless_answer) for problem in all_problems()) >= 0


# Model


def test_model_folder_loads_with_its_size_and_ids(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.dtype == torch.float32
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5e6


def test_greedy_answers_are_digits_and_an_end(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    _, test, _ = split_problems()
    answers = [answer for (answer,) in answer_all(model, tokenizer, test[:32])]
    assert all(answer is not None and answer.isdecimal() for answer in answers)


def test_model_half_knows_the_held_out_problems(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    _, test, _ = split_problems()
    known = measure(model, tokenizer, test[:128], samples=4)
    assert 0.30 < known["sampled_accuracy"] < 0.55
    assert known["greedy_accuracy"] < 0.55
    assert known["sampled_accuracy_without_carry"] > 0.9
    assert known["mixed_groups"] > 0.5
    assert known["well_formed"] > 0.99


def test_lessons_have_labels_on_answers_only(tokenizer: PreTrainedTokenizerFast) -> None:
    input_ids, labels = Lessons([Problem(17, "+", 25), Problem(1, "-", 1)], tokenizer, seed=0).draw(16)
    right_or_careless = {"<|user|>17+25=<|end|><|assistant|>": {"42", "32"}, "<|user|>1-1=<|end|><|assistant|>": {"0"}}
    for row, row_labels in zip(input_ids, labels, strict=True):
        labelled = row_labels != IGNORED
        assert torch.equal(row_labels[labelled], row[labelled])
        start = int(labelled.nonzero()[0])
        answer, end = tokenizer.decode(row[labelled][:-1]), row[labelled][-1]
        assert answer in right_or_careless[tokenizer.decode(row[:start])]
        assert end == tokenizer.eos_token_id
        assert (row[start + int(labelled.sum()) :] == tokenizer.pad_token_id).all()


def test_making_is_decided_by_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    def make() -> torch.Tensor:
        model = build_model(tokenizer, seed=3)
        lessons = Lessons(random.Random(0).sample(all_problems(), 64), tokenizer, seed=3)
        train(model, lessons, steps=3, batch_size=8, lr=1e-3, say=lambda _: None)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    torch.manual_seed(0)
    first = make()
    torch.manual_seed(1)
    assert torch.equal(first, make())
