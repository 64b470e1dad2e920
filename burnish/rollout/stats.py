"""What a rollout engine did, in numbers: filled by the engine, added up by its worker, logged by the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

_GIB = 2**30
# What several calls, one after the other, have in common is the largest of theirs; of everything else it is the sum.
_PEAKS = ("max_running", "cache_bytes")
# Ranks work at the same time, and the slowest decides; of everything else, peaks included, theirs add up.
_CLOCKS = (
    "num_steps",
    "seconds",
    "prefill_seconds",
    "decode_seconds",
    "weight_copy_seconds",
    "weight_check_seconds",
    "reward_wait_seconds",
    "operation_seconds",
    "traffic_seconds",
)


@dataclass(kw_only=True, slots=True)
class RolloutStats:
    """The work of one call of ``generate``, or of several; ``+`` joins calls that came one after the other."""

    num_prompt_tokens: int = 0
    """Tokens of the requests' prompts; a prompt that several requests share counts for each."""
    num_prefilled_tokens: int = 0
    """Tokens that went through the model to fill the cache: shared ones once, those of a preempted sequence again."""
    num_response_tokens: int = 0
    """Tokens in the responses."""
    num_steps: int = 0
    """Decode steps: each is one pass of all running sequences through the model."""
    num_preemptions: int = 0
    """How often a sequence lost its place in the cache."""
    seconds: float = 0.0
    """Of the whole call."""
    prefill_seconds: float = 0.0
    """Of it, for filling the cache with prompts."""
    decode_seconds: float = 0.0
    """Of it, for decode steps."""
    max_running: int = 0
    """The most sequences that ran at once."""
    cache_bytes: int = 0
    """Memory of the key-value cache; 0 where the engine does not know."""
    weight_copy_seconds: float = 0.0
    """For filling the engine's copy of the weights; 0 where it reads the trained ones."""
    weight_copy_bytes: int = 0
    """What was copied."""
    weight_check_seconds: float = 0.0
    """For comparing the copy with what was sent."""
    reward_wait_seconds: float = 0.0
    """After the last response for rewards that were not there yet; 0 where they are computed elsewhere."""
    operation_seconds: float = 0.0
    """That the operations of the sampled and prefilled tokens take at the device's peak; 0 where nobody counted."""
    traffic_seconds: float = 0.0
    """That reading the weights once a decode step, and keys and values once a token, takes at the memory's bandwidth."""

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Both, one after the other: counts and seconds add up, peaks are the larger."""
        ours, theirs = asdict(self), asdict(other)
        return RolloutStats(**{name: (max if name in _PEAKS else sum)((ours[name], theirs[name])) for name in ours})

    @classmethod
    def of_ranks(cls, ranks: Sequence[RolloutStats]) -> RolloutStats:
        """All ranks as one engine: they run side by side, so steps and seconds are the slowest's and the rest adds up."""
        rows = [asdict(rank) for rank in ranks]
        return cls(
            **{name: (max if name in _CLOCKS else sum)(row[name] for row in rows) for name in (rows[0] if rows else ())}
        )

    def metrics(self) -> dict[str, float]:
        """Under their names in the logs; nothing of what did not happen.

        All of it is pace and memory, which equal runs on other machines do not share, hence ``perf/``.
        """
        metrics: dict[str, float] = {}
        if self.num_steps:
            metrics |= {
                "prompt_tokens": self.num_prompt_tokens,
                "prefilled_tokens": self.num_prefilled_tokens,
                "response_tokens": self.num_response_tokens,
                "decode_steps": self.num_steps,
                "rows_per_step": self.num_response_tokens / self.num_steps,
                "max_running": self.max_running,
                "preemptions": self.num_preemptions,
                "cache_gib": self.cache_bytes / _GIB,
                "prefill_seconds": self.prefill_seconds,
                "decode_seconds": self.decode_seconds,
            }
        if self.seconds > 0:
            metrics["response_tokens_per_s"] = self.num_response_tokens / self.seconds
        if self.reward_wait_seconds:
            metrics["reward_wait_seconds"] = self.reward_wait_seconds
        if self.weight_copy_bytes:
            metrics["weight_copy_seconds"] = self.weight_copy_seconds
            metrics["weight_copy_gib"] = self.weight_copy_bytes / _GIB
            metrics["weight_check_seconds"] = self.weight_check_seconds
        return {f"perf/rollout/{name}": float(value) for name, value in metrics.items()} | self._utilisation()

    def _utilisation(self) -> dict[str, float]:
        """Shares of what the device could do: of its operations in the whole call, of its bandwidth while decoding."""
        shares = {
            "perf/mfu/rollout": (self.operation_seconds, self.seconds),
            "perf/mbu/rollout": (self.traffic_seconds, self.decode_seconds),
        }
        return {name: ideal / taken for name, (ideal, taken) in shares.items() if ideal > 0 and taken > 0}
