"""What a server has: the model by its name and its vocabulary, and what its log-probs are those of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from burnish.config.rollout import ServerConfig
from burnish.render import encode_text
from burnish.rollout.base import SamplingParams
from burnish.rollout.vllm.http_client import Client, Interrupted, Refused, asked_again
from burnish.utils.errors import ConfigError, RolloutError

logger = logging.getLogger("burnish.rollout.vllm")

LogProbs = Literal["policy", "raw", "processed"]
"""Of the sampled tokens a server reports the log-probs of softmax(logits / temperature), as burnish's own does; those of
softmax(logits), vLLM's default; or those of what was sampled from, truncated (``--logprobs-mode processed_logprobs``)."""

COMPLETIONS = "/v1/completions"
_KEY = "actor_rollout_ref.rollout.server"
_ANSWER_S = 60.0  # For anything but a response.
_TEMPERATURES = (0.5, 2.0)  # OpenAI's API has none above.
_SAME = 0.02  # Log-probs that differ by less are one: the arithmetic of a batch moves them.
_TEXT = "The cat's 12 mice, naïve?\n\tdef f(x): return x+1  "


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server."""

    client: Client
    model: str
    """The model's name there."""
    is_vllm: bool
    max_length: int | None
    """Tokens of prompt and response that it takes, where it says so."""
    log_probs: LogProbs

    def knows_log_probs(self, sampling: SamplingParams) -> bool:
        """Whether what it reports are the log-probs of the policy, softmax(logits / temperature), with this sampling."""
        if self.log_probs == "raw":
            return sampling.policy_temperature == 1
        return self.log_probs == "policy" or not sampling.truncates

    def knows_truncated_log_probs(self, sampling: SamplingParams) -> bool:
        """Whether it reports those of the distribution that a token is drawn from."""
        return self.log_probs == "processed" and sampling.truncates


def look_at(client: Client, config: ServerConfig, *, model_path: str, vocab_size: int, tokenizer: Any) -> ServerFacts:
    """Waits for the server and looks whether it has this model.

    Args:
        model_path: folder or hub name of the model.
        vocab_size: rows of its embedding.
        tokenizer: the model's; None: it is not compared.

    Raises:
        RolloutError: there is no server, it has another model, or it returns no token ids or no log-probs.
    """
    card = _card(client, config, model_path, _models(client, config))
    name, is_vllm = str(card["id"]), card.get("owned_by") == "vllm"
    ask = _asker(client, config, name)
    _check_vocabulary(ask, client, vocab_size)
    kind = _kind_of_log_probs(ask, vocab_size)
    if tokenizer is not None:
        _check_tokenizer(ask, client, name, tokenizer)
    max_length = card.get("max_model_len")
    facts = ServerFacts(
        client=client,
        model=name,
        is_vllm=is_vllm,
        max_length=max_length if isinstance(max_length, int) else None,
        log_probs=kind,
    )
    logger.info("%s serves %s, with log-probs of kind %r.", client.url, name, kind)
    return facts


def check_served(config: ServerConfig, model_path: str, api_key: str | None) -> None:
    """There is a server of this model at every address, as far as the list of its models tells.

    Raises:
        ConfigError: an address that is none.
        RolloutError: what answers there, or that nothing does.
    """
    for client in server_clients(config, api_key):
        _card(client, config, model_path, _models(client, config))


def server_clients(config: ServerConfig, api_key: str | None) -> list[Client]:
    """One of each address.

    Raises:
        ConfigError: there is none, or one that is no address.
    """
    if not config.url:
        raise ConfigError(f"rollout.mode=server needs an address, as {_KEY}.url=http://localhost:8000.")
    return [Client(url, api_key, f"{_KEY}.url") for url in config.url]


def _models(client: Client, config: ServerConfig) -> Sequence[dict[str, Any]]:
    """The cards of what the server serves, once it has started."""
    deadline, said = time.monotonic() + config.max_start_wait_time, False
    while True:
        try:
            answer = client.get("/v1/models", _ANSWER_S)
            break
        except Interrupted as error:
            if error.is_hopeless or time.monotonic() >= deadline:
                raise RolloutError(
                    f"There is no server at {_KEY}.url={client.url} ({error}) It was waited for for "
                    f"{_KEY}.max_start_wait_time={config.max_start_wait_time:g} s. Start it, or mend the address."
                ) from error
            if not said:
                logger.info("Waiting up to %g s for %s to start: %s", config.max_start_wait_time, client.url, error)
                said = True
            time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))
        except Refused as error:
            raise RolloutError(
                f"What answers at {_KEY}.url={client.url} is no server of OpenAI's API, or wants a key "
                f"({_KEY}.api_key_env): {error}"
            ) from error
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
        raise RolloutError(f"What answers at {_KEY}.url={client.url} is no server of OpenAI's API: it lists no models.")
    return cards


def _card(client: Client, config: ServerConfig, model_path: str, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The card of the model: of the name that is configured, or else of the name that the model has."""
    names = ", ".join(repr(str(card["id"])) for card in cards) or "nothing"
    if config.model is not None:
        for card in cards:
            if card["id"] == config.model:
                return card
        raise RolloutError(f"{_KEY}.model={config.model}: {client.url} serves {names}.")
    for card in cards:
        if any(_same_model(str(card.get(field)), model_path) for field in ("id", "root")):
            return card
    raise RolloutError(
        f"{client.url} serves {names}, which is not the name of actor_rollout_ref.model.path={model_path}. If it is the same "
        f"model, say so with {_KEY}.model={cards[0]['id'] if cards else '...'}."
    )


def _same_model(served: str, path: str) -> bool:
    """By the last part of a folder or of a hub name: one model may lie in several places."""
    return PurePath(served).name == PurePath(path).name


def _asker(client: Client, config: ServerConfig, name: str) -> Callable[..., dict[str, Any]]:
    """A function that asks for one token and returns the choice."""

    def ask(prompt: str | list[int], **how: Any) -> dict[str, Any]:
        body = {"model": name, "prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_token_ids": True, **how}
        answer = asked_again(
            lambda: client.post(COMPLETIONS, body, _ANSWER_S), config.max_attempts, config.retry_delay, _wait
        )
        try:
            choice: dict[str, Any] = answer["choices"][0]
        except (TypeError, LookupError) as error:
            raise RolloutError(f"{client.url}{COMPLETIONS} answered without a choice: {str(answer)[:200]}.") from error
        check_choice(choice, client)
        return choice

    return ask


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def check_choice(choice: dict[str, Any], client: Client) -> None:
    """Of one choice, or of a piece of one.

    Raises:
        RolloutError: it has no token ids, or no log-probs.
    """
    if choice.get("token_ids") is None:
        raise RolloutError(
            f"{client.url} returned no token ids, and a text does not tell its tokens. It must know return_token_ids: vLLM "
            f"does, and burnish serve."
        )
    log_probs = choice.get("logprobs")
    found = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
    if choice["token_ids"] and (not isinstance(found, list) or None in found):
        raise RolloutError(f"{client.url} returned tokens without log-probs, which logprobs=0 asks for.")
    if choice["token_ids"] and len(found or ()) != len(choice["token_ids"]):
        raise RolloutError(
            f"{client.url} returned {len(choice['token_ids'])} tokens with {len(found or ())} log-probs."
        )


def _check_vocabulary(ask: Callable[..., dict[str, Any]], client: Client, vocab_size: int) -> None:
    try:
        ask([vocab_size - 1], temperature=0.0)
    except Refused as error:
        raise RolloutError(
            f"{client.url} refuses token {vocab_size - 1}, the last of the {vocab_size} of actor_rollout_ref.model.path: it has "
            f"another model, or one of another vocabulary. It says: {error}"
        ) from error


def _kind_of_log_probs(ask: Callable[..., dict[str, Any]], vocab_size: int) -> LogProbs:
    """By the most likely token's log-prob at two temperatures, where it alone can be sampled.

    That of softmax(logits) is the same at both, that of what is sampled from is 0, that of softmax(logits / temperature) changes.
    """
    for part in (1, 2, 3, 5, 7):
        token = (vocab_size - 1) // part
        cold, hot = (_log_prob(ask([token], temperature=heat, top_k=1, seed=1)) for heat in _TEMPERATURES)
        if abs(hot) >= _SAME:
            return "raw" if abs(hot - cold) < _SAME else "policy"
        # Of softmax(logits) a token that is nearly certain has 0 as well; it is not so behind every prompt.
    return "processed"


def _log_prob(choice: dict[str, Any]) -> float:
    return float(choice["logprobs"]["token_logprobs"][0])


def _check_tokenizer(ask: Callable[..., dict[str, Any]], client: Client, name: str, tokenizer: Any) -> None:
    ours = encode_text(_TEXT, tokenizer)
    theirs = ask(_TEXT, temperature=0.0).get("prompt_token_ids")
    if theirs is not None and theirs != ours:
        raise RolloutError(
            f"{client.url} reads the text {_TEXT!r} as {len(theirs)} tokens {theirs[:12]}..., the tokenizer of "
            f"actor_rollout_ref.model.path as {len(ours)} tokens {ours[:12]}...: its {name!r} is another model."
        )
