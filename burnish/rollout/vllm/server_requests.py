"""Many requests to servers at once, each in a thread of its own: attempts, aborts, and answers as they end."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from burnish.config.rollout import ServerConfig
from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.sampler import stream_key
from burnish.rollout.vllm.http_client import Call, Interrupted, Refused, asked_again
from burnish.rollout.vllm.server_facts import COMPLETIONS, ServerFacts, check_choice
from burnish.utils import progress
from burnish.utils.errors import RolloutError

_GLANCE_S = 0.02  # How often aborts are looked for while nothing ends.


@dataclass(slots=True, eq=False)
class Asked:
    """One request, and what has come for it."""

    request: RolloutRequest
    sampling: SamplingParams
    server: ServerFacts
    call: Call = field(default_factory=Call)
    is_aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Any = None
    stop_reason: int | str | None = None

    def begin(self) -> None:
        """Forgets what came of an earlier attempt."""
        call = self.call = Call()
        call.is_ended = self.is_aborted  # Read only now: `end` may come at any time.
        self.token_ids, self.log_probs, self.finish_reason, self.stop_reason = [], [], None, None

    def end(self) -> None:
        """Nobody wants more of it."""
        self.is_aborted = True
        self.call.end()

    def body(self) -> dict[str, Any]:
        """What the server is asked. All is said, since a server may have defaults of its own."""
        sampling, request = self.sampling, self.request
        key = stream_key(sampling.seed, request.uid, request.sample_index)
        body: dict[str, Any] = {
            "model": self.server.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": -1 if sampling.greedy or sampling.top_k < 1 else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": key & (2**63 - 1),
            # The end-of-sequence tokens are among the stop tokens; those that the server knows of do not count.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.end_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
            if self.server.is_vllm:
                body["skip_special_tokens"] = False  # They are part of the text that stop strings are looked for in.
        return body

    def take(self, event: Any) -> None:
        """One piece of the answer."""
        client, name = self.server.client, self.request.request_id
        if isinstance(event, dict) and "error" in event:
            said = event["error"].get("message", "") if isinstance(event["error"], dict) else event["error"]
            raise Interrupted(f"{client.url} failed at request {name!r}: {said}")
        for choice in event["choices"]:
            check_choice(choice, client)
            sent = choice.get("prompt_token_ids")
            if sent is not None and list(sent) != list(self.request.prompt_ids):
                raise RolloutError(
                    f"{client.url} answered another prompt than that of request {name!r}: it made {len(sent)} tokens of the "
                    f"{len(self.request.prompt_ids)} that it was sent."
                )
            if choice["token_ids"]:
                self.token_ids += choice["token_ids"]
                self.log_probs += choice["logprobs"]["token_logprobs"]
            if choice.get("finish_reason") is not None:
                self.finish_reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")

    def response(self, version: int) -> RolloutResponse:
        """What came, as the response."""
        sampling, is_whole = self.sampling, self.finish_reason in ("stop", "length")
        unknown = [math.nan] * len(self.token_ids)
        return RolloutResponse(
            self.request.request_id,
            self.token_ids,
            self.log_probs if self.server.knows_log_probs(sampling) else unknown,
            self.finish_reason if is_whole else "abort",
            version,
            truncated_log_probs=self.log_probs if self.server.knows_truncated_log_probs(sampling) else None,
            stop_reason=self.stop_reason if self.finish_reason == "stop" else None,
        )


def ask_all(
    asked: Sequence[Asked],
    config: ServerConfig,
    version: int,
    vocab_size: int,
    lifecycle: Lifecycle,
    on_finished: OnFinished | None,
) -> list[RolloutResponse]:
    """The responses in the order of the requests; ``on_finished`` is called from this thread.

    Args:
        version: of the policy that the servers have.
        vocab_size: tokens that the model has.
        lifecycle: tells of aborts.

    Raises:
        RolloutError: one that cannot be had; then the others are broken off.
    """
    if not asked:
        return []
    by_id = {each.request.request_id: each for each in asked}
    responses: dict[str, RolloutResponse] = {}
    ended: SimpleQueue[tuple[Asked, Future[None]]] = SimpleQueue()
    stopping = threading.Event()
    threads = ThreadPoolExecutor(min(len(asked), config.max_connections), thread_name_prefix="burnish-server")
    try:
        for each in asked:
            future = threads.submit(_ask, each, config, vocab_size, stopping)
            future.add_done_callback(partial(_tell, ended, each))
        while len(responses) < len(asked):
            for request_id in lifecycle.take_aborts():
                by_id[request_id].end()
            try:
                each, future = ended.get(timeout=_GLANCE_S)
            except Empty:
                continue
            progress.tick()
            error = future.exception()
            if isinstance(error, Interrupted):
                raise _no_answer(each, error, config, f"{len(responses)} of {len(asked)}") from error
            if error is not None:
                raise error
            response = each.response(version)
            responses[response.request_id] = response
            lifecycle.discharge(response.request_id)
            if on_finished is not None:
                on_finished(response)
    finally:
        stopping.set()
        for each in asked:
            each.end()
        threads.shutdown(wait=True, cancel_futures=True)
    return [responses[each.request.request_id] for each in asked]


def _tell(ended: SimpleQueue[tuple[Asked, Future[None]]], asked: Asked, future: Future[None]) -> None:
    ended.put((asked, future))


def _ask(asked: Asked, config: ServerConfig, vocab_size: int, stopping: threading.Event) -> None:
    """In a thread: asks until there is an answer. What was broken off on request keeps what it has."""
    try:
        asked_again(
            lambda: _attempt(asked, config.timeout),
            config.max_attempts,
            config.retry_delay,
            lambda seconds: not (asked.is_aborted or stopping.wait(seconds)),
        )
    except Interrupted:
        if not asked.is_aborted:
            raise
    except Refused as refused:
        raise RolloutError(f"Request {asked.request.request_id!r} was refused. {refused}") from refused
    _check_tokens(asked, vocab_size)


def _attempt(asked: Asked, timeout: float) -> None:
    asked.begin()
    for event in asked.server.client.stream(COMPLETIONS, asked.body(), asked.call, timeout):
        asked.take(event)
    if asked.finish_reason not in ("stop", "length"):
        raise Interrupted(
            f"{asked.server.client.url} ended its answer to request {asked.request.request_id!r} with the reason "
            f"{asked.finish_reason!r}."
        )


def _check_tokens(asked: Asked, vocab_size: int) -> None:
    name, url = asked.request.request_id, asked.server.client.url
    wrong = next((token for token in asked.token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RolloutError(
            f"{url} answered request {name!r} with token {wrong}, but the model has {vocab_size}: it has another model."
        )
    if len(asked.token_ids) > asked.sampling.max_new_tokens:
        raise RolloutError(
            f"{url} answered request {name!r} with {len(asked.token_ids)} tokens, more than the "
            f"max_new_tokens={asked.sampling.max_new_tokens} that were asked for."
        )
    if not all(map(math.isfinite, asked.log_probs)):
        raise RolloutError(f"{url} answered request {name!r} with log-probs that are not finite.")


def _no_answer(asked: Asked, last: Interrupted, config: ServerConfig, answered: str) -> RolloutError:
    return RolloutError(
        f"Request {asked.request.request_id!r} had no answer in {config.max_attempts} attempts (rollout.server.max_attempts, "
        f"each of at most timeout={config.timeout:g} s, retry_delay={config.retry_delay:g} s apart); {answered} requests had "
        f"been answered. The last time: {last} If the server has died its own log says why; start it again, and a run goes on "
        f"from its last checkpoint."
    )
