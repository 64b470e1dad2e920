"""Responses of several engines to the same prompts, and whether they were drawn from the model's own distribution."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.work import reward_function, score_of
from benchmarks.peers.client import Peer
from benchmarks.rollout_native import Native
from burnish.rollout.base import RolloutRequest, SamplingParams

Responses = list[list[int]]
"""Token ids, prompt by prompt and sample by sample, each with the token that ended it."""

_BATCH = 512
_HF_BATCH = 4096
_CPU_CACHE_GIB = 4


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every engine is asked.

    Attributes:
        rows: as a data file has them, with a reward.
        prompts: token ids of each row, as transformers' own chat template renders them.
        samples: of each prompt.
        max_tokens: of a response.
        ends: tokens that end a response.
        reward: function as ``module:name``.
    """

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    samples: int
    max_tokens: int
    ends: list[int]
    reward: str

    @classmethod
    def read(cls, model: str, file: Path, *, limit: int, samples: int, max_tokens: int, reward: str) -> "Questions":
        """The first ``limit`` rows of a JSONL file."""
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines[:limit]]
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        prompts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
            for row in rows
        ]
        ends = [tokenizer.eos_token_id]
        return cls(rows=rows, prompts=prompts, samples=samples, max_tokens=max_tokens, ends=ends, reward=reward)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.prompts)) + self.max_tokens

    def scores(self, model: str, responses: Responses) -> Tensor:
        """Of every response, float64 [prompts, samples]."""
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        reward = reward_function(self.reward)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        found = [score_of(reward, self.rows[place // self.samples], text) for place, text in enumerate(texts)]
        return torch.tensor(found, dtype=torch.float64).view(len(self.rows), self.samples)


Engine = Callable[[Questions], Responses]


def native(model: str, dtype: str, device: str, *, temperature: float = 1.0, memory: float = 0.3) -> Engine:
    """burnish's engine on the weights of its training engine; another ``temperature`` is for tests."""

    def ask(questions: Questions) -> Responses:
        engine = Native(
            model, dtype, device, max_num_seqs=1024, max_model_len=questions.max_model_len, memory=memory
        ).engine
        sampling = SamplingParams(
            max_new_tokens=questions.max_tokens, temperature=temperature, eos_token_ids=tuple(questions.ends)
        )
        requests = [
            RolloutRequest(f"{prompt}/{sample}", ids, f"prompt-{prompt}", sample)
            for prompt, ids in enumerate(questions.prompts)
            for sample in range(questions.samples)
        ]
        return [response.token_ids for response in engine.generate(requests, sampling)]

    return ask


def peer(name: str, model: str, dtype: str, device: str, logs: Path, *, memory: float = 0.3) -> Engine:
    """transformers' ``generate`` or vLLM, with its own sampler and random numbers."""

    def ask(questions: Questions) -> Responses:
        settings = {
            "model": model,
            "dtype": dtype,
            "device": device,
            "max_num_seqs": 1024,
            "max_model_len": questions.max_model_len,
            "memory": memory if device == "cuda" else _CPU_CACHE_GIB,
        }
        work = {
            "prompts": questions.prompts,
            "n": questions.samples,
            "max_new_tokens": [questions.max_tokens],
            "seed": 0,
            "batch_size": _HF_BATCH if device == "cuda" else 64,
            "eos_token_ids": questions.ends,
        }
        with Peer(name, settings, logs / f"{name}-{dtype}.log") as running:
            answer = running.run(work)
        responses: Responses = answer["responses"]
        return responses

    return ask


def exact_model(model: str, device: str) -> Any:
    """transformers' model in float32, with the products of matrices in float32 as well."""
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.to(device).eval()


@torch.no_grad()
def surprise(exact: Any, questions: Questions, responses: Responses, every: int) -> dict[str, float]:
    """How much less likely than expected the drawn tokens were, in nats a token: mean of -log p(token) - entropy under ``exact``.

    Its expectation is 0 for tokens that were drawn from ``exact``'s distribution, whatever that is; above 0 they were drawn
    hotter, below 0 colder. The standard error is over responses, whose sums are uncorrelated.

    Args:
        every: only each so many of the responses.
    """
    chosen = range(0, len(responses), every)
    sums: list[Tensor] = []
    tokens, entropies = 0, 0.0
    for first in range(0, len(chosen), _BATCH):
        batch = chosen[first : first + _BATCH]
        prompts = [questions.prompts[place // questions.samples] for place in batch]
        drawn = [responses[place] for place in batch]
        log_probs, entropy, mask = read(exact, prompts, drawn)
        sums.append(((-log_probs - entropy) * mask).sum(1).double().cpu())
        tokens += int(mask.sum())
        entropies += float((entropy * mask).sum())
    every_sum = torch.cat(sums)
    mean = float(every_sum.sum()) / tokens
    error = float(every_sum.std()) * math.sqrt(len(every_sum)) / tokens
    return {"surprise": mean, "surprise_error": error, "entropy": entropies / tokens, "read_tokens": tokens}


def read(model: Any, prompts: list[list[int]], responses: Responses) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the responses' tokens, entropies of what they were drawn from, and where there is a token: [rows, longest].

    Rows are padded on the right, which no token before it sees.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    width, most = max(map(len, whole)), max(map(len, responses))
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in whole], device=device)
    mask = torch.arange(width, device=device) < torch.tensor([len(row) for row in whole], device=device)[:, None]
    places = lengths[:, None] - 1 + torch.arange(most, device=device)
    here = torch.arange(most, device=device) < torch.tensor([len(ids) for ids in responses], device=device)[:, None]
    places = places.clamp(max=width - 2)
    hidden = model.model(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
    hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = model.lm_head(hidden).float().log_softmax(-1)
    tokens = input_ids.gather(1, places + 1)
    log_probs = logits.gather(-1, tokens[..., None])[..., 0]
    entropy = -(logits.detach().exp() * logits.detach()).sum(-1)
    return log_probs, entropy, here


def described(questions: Questions, scores: Tensor, responses: Responses) -> dict[str, float]:
    """Share of the right answers with its standard error, and tokens a response.

    The error takes the prompts as given: it is that of the draws alone.
    """
    right = scores.mean(1)
    error = math.sqrt(float((right * (1 - right)).sum()) / (questions.samples - 1)) / len(right)
    return {
        "right": float(right.mean()),
        "right_error": error,
        "tokens": sum(map(len, responses)) / len(responses),
        "responses": len(responses),
    }
