"""What every rollout engine takes and gives: requests, sampling parameters, responses, and its five methods."""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from transformers import PreTrainedConfig

from burnish.utils.errors import RolloutError
from burnish.utils.registry import Registry

FinishReason = Literal["stop", "length", "abort"]
OnFinished = Callable[["RolloutResponse"], None]
WeightStream = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response that is asked for.

    ``uid`` and ``sample_index`` name the response's random stream, so the same request always gets the same tokens.
    """

    request_id: str
    """Unique within one call of ``generate``."""
    prompt_ids: Sequence[int]
    """Token ids of the prompt, no padding, at least one."""
    uid: str
    """The prompt's identity: the samples of one prompt share it."""
    sample_index: int = 0
    """Which of the prompt's samples this is."""
    sampling: "SamplingParams | None" = None
    """How this response is drawn; None: as the call says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; one for all requests of a call.

    Raises:
        RolloutError: a value outside its range.
    """

    max_new_tokens: int
    """A response ends after this many tokens, with the finish reason ``length``."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the fewest most likely tokens whose probabilities sum to at least this."""
    top_k: int = -1
    """Only the ``top_k`` most likely tokens; -1 or 0 is all of them."""
    do_sample: bool = True
    """False is greedy, whatever the temperature."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the most likely one (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the response holds are divided by it where positive, multiplied where negative
    (arXiv:1909.05858)."""
    min_new_tokens: int = 0
    """No token that ends a response is drawn before the response has this many."""
    ignore_eos: bool = False
    """Do not end at an end-of-sequence token."""
    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends a response, as its last token."""
    stop_token_ids: tuple[int, ...] = ()
    """As ``eos_token_ids``, also with ``ignore_eos``."""
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings in its text; the token stays. Needs an engine
    that was given a tokenizer."""
    seed: int = 0
    """Enters every random stream."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise RolloutError(f"temperature={self.temperature} must be a number of at least 0; 0 decodes greedily.")
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps every token.")
        if not -1 <= self.top_k < 2**31:
            raise RolloutError(f"top_k={self.top_k} must be at least 1, or -1 to keep every token, and below 2^31.")
        if self.max_new_tokens < 1:
            raise RolloutError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")
        if not 0 <= self.min_p <= 1:
            raise RolloutError(f"min_p={self.min_p} must be between 0 and 1; 0 keeps every token.")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise RolloutError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is none.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise RolloutError(
                f"min_new_tokens={self.min_new_tokens} must be between 0 and max_new_tokens={self.max_new_tokens}."
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RolloutError(f"stop={self.stop!r} must be a tuple of strings, none of them empty.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return not self.do_sample or self.temperature == 0

    @property
    def policy_temperature(self) -> float:
        """The temperature of the policy that log-probs belong to: ``temperature``, 1 when decoding greedily."""
        return 1.0 if self.greedy else self.temperature

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return tuple(dict.fromkeys((*self.stop_token_ids, *(() if self.ignore_eos else self.eos_token_ids))))

    @property
    def truncates(self) -> bool:
        """Whether a token is drawn from another distribution than softmax(logits / temperature)."""
        changes_logits = self.repetition_penalty != 1 or (self.min_new_tokens > 0 and bool(self.end_token_ids))
        return changes_logits or (not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0))


@dataclass(frozen=True, slots=True)
class RolloutResponse:
    """One finished response."""

    request_id: str
    token_ids: list[int]
    """The sampled tokens, with the end-of-sequence token that ended it; empty if aborted before its first token."""
    log_probs: list[float] = field(repr=False)
    """Of each token under the full softmax(logits / temperature), temperature 1 for greedy; truncation is not in it."""
    finish_reason: FinishReason
    policy_version: int
    """The ``version`` of the weights that sampled its first token."""
    policy_versions: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) of each stretch that one policy sampled, in order; more than one where the engine was
    paused for an update. Empty: all are of ``policy_version``."""
    truncated_log_probs: list[float] | None = field(default=None, repr=False)
    """Of each token under the distribution that it was drawn from, where `SamplingParams.truncates`; else None."""
    stop_reason: int | str | None = None
    """The stop token or the stop string that ended it."""
    num_preemptions: int = 0
    """How often it lost its place in the cache and was prefilled again."""


@runtime_checkable
class BaseRollout(Protocol):
    """A rollout engine. An engine is constructed as ``cls(model, config, shares_storage=..., device=...)``, or by its class
    method ``for_policy`` (`burnish.rollout.build.build_rollout`) where it brings a model of its own.

    An engine that keeps a copy of the weights may have three more members. ``weights_checksum() -> Mapping[str, int] | None``:
    the `burnish.utils.fingerprint.fingerprint` of every weight that it holds, by the names of the stream; after each update they
    are compared with those of what was sent. None on a rank for which another one answers. ``needs_base``, a bool: whether the
    next update must bring the whole model of a policy with adapters, whose base is frozen; where it is False the adapters alone
    are sent. Without it the whole model always is. ``lost_weights``, a bool: whether it has forgotten its copy in its sleep, so
    that it cannot generate before an update.
    """

    shares_storage: bool
    """Whether it reads the very tensors that are trained: then ``update_weights`` copies nothing."""

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """One response for each request, in their order.

        ``on_finished`` is called exactly once for each response, as soon as it is finished, from this thread.

        Raises:
            RolloutError: a request that cannot be served (named), or an engine that is asleep.
        """
        ...

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """Takes the weights of policy ``version``: Hugging Face names and full tensors, every parameter once.

        Of a policy with adapters (LoRA) the base comes first, under the names that it has without them, and then the adapters
        as ``...q_proj.lora_A.weight`` and ``...lora_B.weight``, never merged.

        Raises:
            RolloutError: a name is missing, unknown, or has another shape here; the engine is generating.
        """
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Ends running requests (None: all) soon, with the tokens they have and the reason ``abort``.

        May be called from ``on_finished`` or another thread. Ids that are not running are ignored.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Frees the memory that is needed only to generate; at level 2 that of a copy of the weights may go too, for the next
        ``update_weights`` to fill. An update may come while it sleeps, and does not wake it."""
        ...

    def wake_up(self) -> None:
        """Makes the engine usable again after ``sleep``."""
        ...


ROLLOUTS: Registry[type[BaseRollout]] = Registry("rollout engine", "actor_rollout_ref.rollout.name")
_BUILT_IN = ("burnish.rollout.native.engine", "burnish.rollout.hf", "burnish.rollout.vllm.engine")


def register_rollout(name: str) -> Callable[[type], type]:
    """Class decorator: makes a rollout engine available as ``actor_rollout_ref.rollout.name=<name>``."""
    return ROLLOUTS.register(name)


def get_rollout_cls(name: str) -> type[BaseRollout]:
    """The engine class called ``name`` (``native``, ``hf``, a registered name, or ``package.module:attribute``).

    Raises:
        ConfigError: there is none of that name.
    """
    for module in _BUILT_IN:  # They register themselves; they import this module, so it cannot import them at its top.
        importlib.import_module(module)
    return ROLLOUTS.get(name)


def max_sequence_length(config: PreTrainedConfig, max_model_len: int | None) -> int | None:
    """Tokens of prompt and response together that one sequence may have; None if nothing bounds it.

    Args:
        config: the model's.
        max_model_len: a further bound.
    """
    limits = (getattr(config.get_text_config(decoder=True), "max_position_embeddings", None), max_model_len)
    return min((limit for limit in limits if limit is not None), default=None)


def check_requests(
    requests: Sequence[RolloutRequest],
    sampling: SamplingParams | None,
    *,
    max_length: int | None,
    vocab_size: int,
    has_tokenizer: bool = False,
) -> None:
    """Checks what can be known before the first token.

    Args:
        max_length: tokens of prompt and response together that the model or engine can hold; None: no bound.
        vocab_size: rows of the embedding.
        has_tokenizer: whether the engine can look for stop strings.

    Raises:
        RolloutError: an empty or too long prompt, a token id outside the vocabulary (in a prompt or to stop at), a request
            id given twice, stop strings where there is no tokenizer.
    """
    seen: set[str] = set()
    for request in requests:
        name, length = request.request_id, len(request.prompt_ids)
        if name in seen:
            raise RolloutError(f"Request {name!r} is given twice in one call; every request needs an id of its own.")
        seen.add(name)
        if length == 0:
            raise RolloutError(f"Request {name!r} has an empty prompt; it needs at least one token.")
        params = request.sampling or sampling
        assert params is not None, "a request without its own sampling needs one of the call"
        num_new = params.max_new_tokens
        if params.stop and not has_tokenizer:
            raise RolloutError(
                f"Request {name!r} has stop={params.stop!r}, but this engine was given no tokenizer to read its tokens as "
                f"text with. Give the engine one, or use stop_token_ids."
            )
        if unknown := [token for token in params.stop_token_ids if not 0 <= token < vocab_size]:
            raise RolloutError(
                f"Request {name!r} has {unknown[0]} in stop_token_ids, but the model's embedding has {vocab_size} rows: it "
                f"would end nothing. Leave it out."
            )
        if max_length is not None and length + num_new > max_length:
            raise RolloutError(
                f"Request {name!r} asks for {length} prompt tokens + max_new_tokens={num_new} = "
                f"{length + num_new} positions, but the engine holds {max_length} a sequence "
                f"(the model's max_position_embeddings, or rollout.max_model_len, which is prompt_length + response_length "
                f"where it is not set). Shorten one of the two."
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            wrong = next(token for token in request.prompt_ids if not 0 <= token < vocab_size)
            raise RolloutError(
                f"Request {name!r} holds token id {wrong}, but the model's embedding has {vocab_size} rows; "
                f"is this the model's own tokenizer?"
            )
