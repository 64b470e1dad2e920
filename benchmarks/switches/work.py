"""The work of the benchmark of switches: prompts and responses of log-normal lengths, and a reward that takes its time.

Reward processes import this file too, so nothing heavy is imported.
"""

import hashlib
import math
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.grpo_work import score

CAP = 3


@dataclass(frozen=True, kw_only=True)
class SwitchesWork:
    """One step of GRPO with one update.

    Attributes:
        prompts, samples: of a step, and responses to each.
        prompt_length, response_length: medians of the tokens; none is longer than `CAP` times its median.
        sigma: standard deviation of the logarithm of a length.
        max_token_len: tokens that may go through the model at once.
        reward_seconds: that the reward of one response takes.
        reward_kind: "wait": for somebody else, as for a sandbox or a judge; "compute": on a core.
    """

    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    sigma: float = 0.6
    max_token_len: int
    reward_seconds: float
    reward_kind: str = "wait"

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt, at most."""
        return CAP * self.prompt_length

    @property
    def longest_response(self) -> int:
        """Tokens of a response, at most."""
        return CAP * self.response_length

    @property
    def rows_that_always_fit(self) -> int:
        """Rows of a micro-batch that keeps to ``max_token_len`` however long they are: what a fixed number has to be."""
        return max(1, self.max_token_len // (self.longest_prompt + self.longest_response))

    def prompt_lengths(self) -> list[int]:
        """Of each prompt."""
        return _log_normal(self.prompt_length, self.sigma, self.prompts, seed=1)

    def response_lengths(self) -> list[int]:
        """Of each response, those to one prompt next to each other."""
        return _log_normal(self.response_length, self.sigma, self.prompts * self.samples, seed=2)

    def texts(self, vocab_size: int) -> list[str]:
        """The prompts as text for `benchmarks.models.word_tokenizer_path`; the first ids are special and left out."""
        draw = random.Random(3)
        return [" ".join(str(draw.randrange(3, vocab_size)) for _ in range(n)) for n in self.prompt_lengths()]

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.prompts} prompts x {self.samples} samples, log-normal lengths (sigma {self.sigma}) around "
            f"{self.prompt_length} + {self.response_length} tokens, at most {CAP} times that; {self.max_token_len} tokens at "
            f"once; a reward takes {self.reward_seconds * 1000:g} ms ({self.reward_kind})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


CPU_WORK = SwitchesWork(
    prompts=4, samples=8, prompt_length=40, response_length=32, max_token_len=1024, reward_seconds=0.1
)
GPU_WORK = SwitchesWork(
    prompts=32, samples=8, prompt_length=128, response_length=256, max_token_len=12288, reward_seconds=0.02
)


def _log_normal(median: int, sigma: float, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(CAP * median, max(1, round(math.exp(draw.gauss(math.log(median), sigma))))) for _ in range(count)]


def slow_score(solution_str: str, seconds: float, kind: str, **_: Any) -> float:
    """`benchmarks.grpo_work.score`, after so many seconds of waiting or of computing."""
    if kind == "wait":
        time.sleep(seconds)
    else:
        begin, digest = time.process_time(), solution_str.encode()
        while time.process_time() - begin < seconds:
            digest = hashlib.sha256(digest).digest()
    return score(solution_str)
