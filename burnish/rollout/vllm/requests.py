"""From a rollout request to what vLLM is asked, and from what vLLM says back to a rollout response.

vLLM runs the model; burnish draws the tokens. So vLLM's own sampling parameters are left neutral, except for what ends a
request, and everything that the draw needs travels in ``extra_args[DRAW]``, where `burnish.rollout.vllm.sampler` reads it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from burnish.rollout.base import FinishReason, RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.sampler import stream_key
from burnish.rollout.stopping import StopStrings
from burnish.utils.errors import RolloutError

DRAW = "burnish"
"""The key of ``vllm.SamplingParams.extra_args`` under which a `DrawArgs` is."""


class DrawArgs(TypedDict):
    """How the tokens of one request are drawn: plain numbers, since they cross processes.

    The position of a token is its place in its sequence, prompt included, which the model runner knows.
    """

    request_id: str
    """Of the `RolloutRequest`, to name it in errors."""
    key: int
    """int64, from `stream_key`."""
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_new_tokens: int
    stop_ids: list[int]
    """`SamplingParams.end_token_ids`: forbidden before ``min_new_tokens``."""
    truncates: bool
    """`SamplingParams.truncates`: then vLLM's output has a second column of log-probs."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request as an engine takes it."""

    request_id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    """Keywords of ``vllm.SamplingParams``."""
    stop: tuple[str, ...] = ()
    """Strings that end it: vLLM does not look for them, `Progress` does."""
    min_new_tokens: int = 0
    """A stop string that is completed by one of this many first tokens does not count."""
    with_adapters: bool = False
    """Whether it is sampled from the policy's adapters on their base, see `burnish.rollout.vllm.adapters.lora_request`."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One request at its end."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    """Under the full softmax(logits / temperature)."""
    truncated_log_probs: list[float] | None
    """Under what was drawn from; None where nothing truncates."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    versions: tuple[tuple[int, int], ...] = ()
    """(policy version, number of tokens) of each stretch; empty: all of the version that the core held at the start."""
    num_preemptions: int = 0


def prepare(request: RolloutRequest, sampling: SamplingParams, *, with_adapters: bool = False) -> Prepared:
    """What vLLM is asked for one request.

    Args:
        sampling: how it is drawn: the request's own, or the call's.
        with_adapters: the policy has adapters.
    """
    ends = list(sampling.end_token_ids)
    args = DrawArgs(
        request_id=request.request_id,
        key=stream_key(sampling.seed, request.uid, request.sample_index),
        temperature=0.0 if sampling.greedy else float(sampling.temperature),
        top_k=sampling.top_k,
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        repetition_penalty=float(sampling.repetition_penalty),
        min_new_tokens=sampling.min_new_tokens,
        stop_ids=ends,
        truncates=sampling.truncates,
    )
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": ends,
        # The end-of-sequence tokens are among the stop ids; those that vLLM reads from the model folder do not count.
        "ignore_eos": True,
        "detokenize": False,
        # Column 0 is the drawn token under the policy, column 1 under what it was drawn from: not the likeliest tokens.
        "logprobs": int(sampling.truncates),
        "flat_logprobs": True,
        "skip_clone": True,
        "extra_args": {DRAW: dict(args)},
    }
    return Prepared(
        request.request_id,
        list(request.prompt_ids),
        params,
        tuple(sampling.stop),
        sampling.min_new_tokens,
        with_adapters,
    )


class Progress:
    """One running request: what it has so far, and whether that ends it.

    Args:
        tokenizer: the model's; needed where the request has stop strings.
    """

    __slots__ = ("_stop_strings", "_versions", "log_probs", "num_preemptions", "prepared", "token_ids", "truncated")

    def __init__(self, prepared: Prepared, tokenizer: Any = None) -> None:
        self.prepared = prepared
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.truncated: list[float] | None = [] if prepared.params["logprobs"] else None
        self.num_preemptions = 0
        self._versions: list[tuple[int, int]] = []
        self._stop_strings = StopStrings(tokenizer, prepared.stop, prepared.min_new_tokens) if prepared.stop else None

    def take(
        self, token_ids: Sequence[int], log_probs: Sequence[float], truncated: Sequence[float] | None, version: int
    ) -> str | None:
        """Takes the next tokens; those behind a token that completes a stop string are dropped.

        Args:
            log_probs, truncated: one for each token: columns 0 and 1 of vLLM's.
            version: the policy that sampled them.

        Returns:
            The stop string that they complete: then the request is over and must be aborted in the engine.

        Raises:
            RolloutError: a log-prob is not a number: the model's logits are not.
        """
        match = self._stop_strings.feed(token_ids) if self._stop_strings is not None else None
        count = len(token_ids) if match is None else match.index + 1
        for offset in range(count):
            if not math.isfinite(log_probs[offset]):
                raise not_finite(self.prepared, len(self.token_ids) + offset, version)
        self.token_ids.extend(token_ids[:count])
        self.log_probs.extend(log_probs[:count])
        if self.truncated is not None:
            assert truncated is not None, "a request that truncates asked for two columns"
            self.truncated.extend(truncated[:count])
        if self._versions and self._versions[-1][0] == version:
            self._versions[-1] = (version, self._versions[-1][1] + count)
        elif count:
            self._versions.append((version, count))
        return None if match is None else match.stop

    def finished(self, reason: FinishReason, stop_reason: int | str | None = None) -> Finished:
        """It is over, for this reason."""
        return Finished(
            self.prepared.request_id,
            self.token_ids,
            self.log_probs,
            self.truncated,
            reason,
            stop_reason if reason == "stop" else None,
            tuple(self._versions),
            self.num_preemptions,
        )

    @property
    def abort_or_length(self) -> FinishReason:
        """The reason of a request that is cut now: one that has all its tokens was not cut."""
        return "length" if len(self.token_ids) >= self.prepared.params["max_tokens"] else "abort"


def to_response(finished: Finished, version: int) -> RolloutResponse:
    """What the caller of ``generate`` gets.

    Args:
        version: the policy at the start of the call, for a request that has no token.
    """
    versions = finished.versions or ((version, len(finished.token_ids)),)
    return RolloutResponse(
        finished.request_id,
        finished.token_ids,
        finished.log_probs,
        finished.finish_reason,
        policy_version=versions[0][0],
        policy_versions=versions if len(versions) > 1 else (),
        truncated_log_probs=finished.truncated_log_probs,
        stop_reason=finished.stop_reason,
        num_preemptions=finished.num_preemptions,
    )


def not_finite(prepared: Prepared, num_tokens: int, version: int) -> RolloutError:
    """The error of a request whose logits are not finite behind its first ``num_tokens`` tokens."""
    return RolloutError(
        f"The model's logits are not finite, first for request {prepared.request_id!r} at position "
        f"{len(prepared.prompt_ids) + num_tokens}. The weights of policy version {version} or their dtype overflow; look at "
        f"the last updates' grad_norm."
    )
