"""Mistakes that rollouts are known for, on the way from prompts through an engine to the batch that is trained on."""

from typing import Any

import pytest
import torch

from burnish.config import RolloutConfig
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule
from burnish.protocol import DataProto
from burnish.rollout.base import RolloutRequest, SamplingParams, get_rollout_cls
from burnish.rollout.to_batch import requests_from_dataproto, responses_to_dataproto
from tests.rollout.contract import tiny_llama
from tests.rollout.sampling_contract import letter_tokenizer

EOS = PAD = 2

pytestmark = pytest.mark.parametrize("name", ["native", "hf"])


def engine_of(name: str) -> Any:
    engine: Any = get_rollout_cls(name)
    return engine(tiny_llama(), RolloutConfig(), shares_storage=True)


def padded(prompts: list[list[int]], side: str) -> DataProto:
    """A batch of prompts with the padding, whose id is also the end-of-sequence token's, on one side."""
    width = max(map(len, prompts))
    pads = [[PAD] * (width - len(prompt)) for prompt in prompts]
    falses = [[False] * len(pad) for pad in pads]
    trues = [[True] * len(prompt) for prompt in prompts]
    left = side == "left"
    ids = [pad + prompt if left else prompt + pad for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [no + yes if left else yes + no for no, yes in zip(falses, trues, strict=True)]
    names = {"uid": [f"p{row}" for row in range(len(prompts))], "sample_index": [0] * len(prompts)}
    return DataProto.from_dict(
        tensors={"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}, non_tensors=names
    )


def rollout(name: str, prompts: DataProto, samplings: list[SamplingParams]) -> DataProto:
    requests = [
        RolloutRequest(r.request_id, r.prompt_ids, r.uid, r.sample_index, sampling)
        for r, sampling in zip(requests_from_dataproto(prompts), samplings, strict=True)
    ]
    return responses_to_dataproto(prompts, engine_of(name).generate(requests, samplings[0]), PAD)


def test_a_response_that_was_cut_has_a_mask_of_its_true_length_though_its_padding_looks_like_an_end(name: str) -> None:
    prompts = padded([[5, 6, 7], [9]], "left")
    # One is cut after three tokens, the other goes on to five; no token of either is an end of sequence.
    cut, whole = (SamplingParams(max_new_tokens=n, eos_token_ids=(EOS,), min_new_tokens=n) for n in (3, 5))
    batch = rollout(name, prompts, [cut, whole])
    assert batch.tensors["response_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert batch.tensors["responses"][0, 3:].tolist() == [PAD, PAD]
    assert EOS not in batch.tensors["responses"][batch.tensors["response_mask"]]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length", "length"]
    assert (batch.tensors["rollout_log_probs"] != 0).tolist() == batch.tensors["response_mask"].tolist()


def test_a_response_that_ended_has_its_end_in_the_mask_and_the_same_id_behind_it_is_padding(name: str) -> None:
    prompts = padded([[5, 6, 7], [9]], "left")
    ends = SamplingParams(max_new_tokens=30, temperature=2.0, eos_token_ids=(EOS, *range(20, 40)), seed=1)
    goes_on = SamplingParams(max_new_tokens=30, ignore_eos=True)
    batch = rollout(name, prompts, [ends, goes_on])
    length = int(batch.tensors["response_mask"][0].sum())
    assert 0 < length < 30
    assert int(batch.tensors["responses"][0, length - 1]) in ends.eos_token_ids
    assert batch.tensors["response_mask"][0].tolist() == [True] * length + [False] * (30 - length)
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_of_rows_of_different_lengths_are_those_of_each_row_alone(name: str, side: str) -> None:
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12]]
    samplings = [SamplingParams(max_new_tokens=n, temperature=0.8, seed=3) for n in (2, 5)]
    batch = rollout(name, padded(prompts, side), samplings)
    tensors, lengths = batch.tensors, (2, 5)
    packed = pack(tensors["input_ids"], tensors["attention_mask"], tensors["response_mask"])
    trained = PolicyModule(tiny_llama())(packed, temperature=0.8)["log_probs"].detach()
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        response = tensors["responses"][row, :length]
        with torch.no_grad():
            logits = tiny_llama(attn=False)(torch.tensor([[*prompt, *response.tolist()]])).logits[0]
        logits = logits[len(prompt) - 1 : -1] / 0.8
        alone = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        for log_probs in (tensors["rollout_log_probs"][row], trained[row]):
            torch.testing.assert_close(log_probs[:length], alone, atol=1e-5, rtol=0)
            assert not log_probs[length:].any()


def test_tokens_whose_text_would_be_cut_into_fewer_tokens_stay_as_they_were_sampled(name: str) -> None:
    tokenizer = letter_tokenizer()
    vocab = {tokenizer.id_to_token(token): token for token in range(tokenizer.get_vocab_size())}
    prompts = padded([[vocab["c"], number] for number in range(3, 13)], "left")
    samplings = [SamplingParams(max_new_tokens=24, temperature=1.5, eos_token_ids=(39,), seed=5)] * 10
    engine = engine_of(name)
    responses = engine.generate(requests_from_dataproto(prompts), samplings[0])
    batch = responses_to_dataproto(prompts, responses, PAD)
    mergeable = [("a", "b"), ("b", "a"), ("ab", "c"), ("<", "/"), ("a", "Ġ"), ("Ġ", "b"), ("Ã", "©"), ("Ċ", "Ċ")]
    pairs = {(vocab[first], vocab[second]) for first, second in mergeable}
    num_pairs = 0
    for row, response in enumerate(responses):
        mask = batch.tensors["response_mask"][row]
        assert batch.tensors["responses"][row][mask].tolist() == response.token_ids
        assert int(mask.sum()) == len(response.token_ids) == len(response.log_probs)
        log_probs = batch.tensors["rollout_log_probs"][row][mask]
        assert torch.equal(log_probs, torch.tensor(response.log_probs, dtype=torch.float32))
        num_pairs += sum(pair in pairs for pair in zip(response.token_ids, response.token_ids[1:], strict=False))
    assert num_pairs > 0  # So text, cut into tokens anew, would have been shorter than its mask.
    for key in ("responses", "response_mask", "rollout_log_probs"):
        assert batch.tensors[key].shape == batch.tensors["responses"].shape


def test_a_forced_beginning_of_the_response_is_prompt_and_not_trained_on(name: str) -> None:
    question, beginning = [5, 6, 7], [31, 32]
    sampling = SamplingParams(max_new_tokens=6, temperature=1.3, seed=2)
    batch = rollout(name, padded([question + beginning, [8, *beginning]], "left"), [sampling] * 2)
    tensors = batch.tensors
    assert tensors["prompts"][:, -2:].tolist() == [beginning] * 2
    assert tensors["response_mask"].shape == tensors["responses"].shape == (2, 6)
    assert tensors["response_mask"].all()
    # The states after the beginning, and none before, are what log-probs belong to.
    alone = engine_of(name).generate([RolloutRequest("x", question + beginning, "p0", 0)], sampling)[0]
    assert tensors["responses"][0].tolist() == alone.token_ids
