"""An engine without a model: every response is spelt out beforehand, some tokens a round."""

import threading
from collections.abc import Callable, Iterable, Sequence

from burnish.rollout.base import RolloutRequest, RolloutResponse
from burnish.rollout.stopping import StopStrings
from burnish.utils.errors import RolloutError


def log_prob_of(place: int) -> float:
    """Of the token at this place of any response."""
    return -(place + 1) / 8


class FakeEngine:
    """Keeps the protocol of an engine and its session, and remembers what it was told.

    Args:
        script: the tokens of the response to a request, in full length; it ends before them as its sampling says.
        per_round: tokens of one round.
        refuse: a sentence for requests that cannot be served, else None.
    """

    def __init__(
        self,
        script: Callable[[RolloutRequest], Sequence[int]],
        *,
        tokenizer=None,
        per_round: int = 1,
        refuse: Callable[[RolloutRequest], str | None] = lambda request: None,
    ) -> None:
        self.script, self.tokenizer, self.per_round, self.refuse = script, tokenizer, per_round, refuse
        self.received: list[RolloutRequest] = []
        self.aborted: list[str] = []
        self.finished: list[RolloutResponse] = []
        self.most_at_once = 0
        self.fail_with: BaseException | None = None
        self.is_open = False
        # Cleared, the engine stands still at the beginning of a round.
        self.may_go = threading.Event()
        self.may_go.set()
        self.ended_by_abort = threading.Event()

    def open_session(self, *, on_tokens, on_finished) -> "FakeSession":
        return FakeSession(self, on_tokens, on_finished)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        self.aborted += list(request_ids or ())


class FakeSession:
    def __init__(self, engine: FakeEngine, on_tokens, on_finished) -> None:
        self.engine, self.on_tokens, self.on_finished = engine, on_tokens, on_finished
        self.running: dict[str, tuple[RolloutRequest, list[int]]] = {}
        self.stops: dict[str, StopStrings] = {}

    def __enter__(self) -> "FakeSession":
        self.engine.is_open = True
        return self

    def __exit__(self, *error) -> None:
        self.engine.is_open = False

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            if sentence := self.engine.refuse(request):
                raise RolloutError(sentence)
        for request in requests:
            assert request.request_id not in self.running
            self.running[request.request_id] = (request, [])
            stop = request.sampling.stop
            self.stops[request.request_id] = StopStrings(self.engine.tokenizer, stop) if stop else None
        self.engine.received += requests

    def step(self) -> bool:
        engine = self.engine
        engine.may_go.wait(timeout=60)
        if engine.fail_with is not None:
            raise engine.fail_with
        for request_id in [name for name in self.running if name in engine.aborted]:
            self.finish(request_id, "abort", None)
            engine.ended_by_abort.set()
        engine.most_at_once = max(engine.most_at_once, len(self.running))
        for request_id in list(self.running):
            self.sample(request_id)
        return bool(self.running)

    def sample(self, request_id: str) -> None:
        request, tokens = self.running[request_id]
        sampling, start, end = request.sampling, len(tokens), None
        for token in self.engine.script(request)[start : start + self.engine.per_round]:
            tokens.append(token)
            hit = self.stops[request_id].feed([token]) if self.stops[request_id] else None
            if token in sampling.end_token_ids:
                end = ("stop", token)
            elif hit is not None:
                end = ("stop", hit.stop)
            elif len(tokens) == sampling.max_new_tokens:
                end = ("length", None)
            if end:
                break
        if len(tokens) > start:
            self.on_tokens(request_id, tokens[start:], [log_prob_of(place) for place in range(start, len(tokens))])
        if end:
            self.finish(request_id, *end)

    def finish(self, request_id: str, reason, stop_reason) -> None:
        _, tokens = self.running.pop(request_id)
        log_probs = [log_prob_of(place) for place in range(len(tokens))]
        response = RolloutResponse(request_id, list(tokens), log_probs, reason, 0, stop_reason=stop_reason)
        self.engine.finished.append(response)
        self.on_finished(response)
