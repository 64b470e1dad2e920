"""What a rollout benchmark generates: scenarios, and the prompts and lengths of each turn, the same for every engine."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models import SMOLLM2
from benchmarks.peers.protocol import Work
from burnish.rollout.base import RolloutRequest, SamplingParams

SIGMA = 0.8
CAP = 4


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of work. All prompts have the same length and random tokens; no response ends before its length."""

    name: str
    model: str = "qwen2.5-0.5b"
    dtypes: tuple[str, ...] = ("bfloat16",)
    prompts: int
    samples: int = 1
    """Of each prompt."""
    prompt_length: int
    response_length: int
    """Of every response; the median where they are drawn."""
    log_normal: bool = False
    """Responses have lengths of their own, log-normal with sigma 0.8, at most 4 times the median."""
    max_num_seqs: int = 1024

    @property
    def num_sequences(self) -> int:
        """Responses of one call."""
        return self.prompts * self.samples

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.response_length * (CAP if self.log_normal else 1)

    def lengths(self) -> list[int]:
        """Tokens of each response, the same in every turn."""
        if not self.log_normal:
            return [self.response_length] * self.num_sequences
        normal = np.random.default_rng(0).standard_normal(self.num_sequences)
        drawn = np.exp(math.log(self.response_length) + SIGMA * normal).round()
        return [int(length) for length in drawn.clip(1, CAP * self.response_length)]

    def equal_lengths(self) -> list[int]:
        """As many responses with as many tokens in all, and no two that differ by more than one."""
        total, count = sum(self.lengths()), self.num_sequences
        return [total // count + (index < total % count) for index in range(count)]

    def describe(self) -> str:
        """For people."""
        tokens = f"{self.prompt_length} + {self.response_length} tokens"
        lengths = f", lengths log-normal (sigma {SIGMA}, at most {CAP} x the median)" if self.log_normal else ""
        return f"{self.prompts} prompts x {self.samples} samples, {tokens}{lengths}"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="group", prompts=64, samples=16, prompt_length=256, response_length=512),
        Scenario(name="single", prompts=256, prompt_length=128, response_length=256),
        Scenario(
            name="lognormal", prompts=2048, prompt_length=128, response_length=256, log_normal=True, max_num_seqs=2048
        ),
        Scenario(name="latency", prompts=1, prompt_length=128, response_length=256),
        Scenario(
            name="cpu",
            model=SMOLLM2,
            dtypes=("bfloat16", "float32"),
            prompts=64,
            prompt_length=64,
            response_length=64,
            max_num_seqs=64,
        ),
    )
}


def random_prompts(scenario: Scenario, vocab_size: int, turn: int) -> list[list[int]]:
    """Prompts of one turn: new ones every time, so that no engine finds them in a cache of an earlier call."""
    shape = (scenario.prompts, scenario.prompt_length)
    return np.random.default_rng([1, turn]).integers(3, vocab_size, shape).tolist()


def native_requests(
    scenario: Scenario, prompts: list[list[int]], lengths: list[int], turn: int
) -> tuple[list[RolloutRequest], SamplingParams]:
    """The work of one turn as burnish takes it."""
    by_length = {
        length: SamplingParams(max_new_tokens=length, temperature=1.0, ignore_eos=True, seed=turn)
        for length in set(lengths)
    }
    requests = [
        RolloutRequest(
            f"{prompt}/{sample}", ids, str(prompt), sample, by_length[lengths[prompt * scenario.samples + sample]]
        )
        for prompt, ids in enumerate(prompts)
        for sample in range(scenario.samples)
    ]
    return requests, by_length[max(lengths)]


def peer_work(scenario: Scenario, prompts: list[list[int]], lengths: list[int], turn: int, **more: Any) -> Work:
    """The same as a peer takes it."""
    return {"prompts": prompts, "n": scenario.samples, "max_new_tokens": lengths, "seed": turn, **more}
