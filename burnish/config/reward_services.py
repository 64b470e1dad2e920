"""Servers and services that rewards are asked from: a judge, a remote reward, and how often they may be asked."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.section import Section, key


@dataclass(kw_only=True, slots=True)
class JudgeConfig(Section):
    """A language model that scores responses, behind any server with OpenAI's chat completions."""

    url: str | None = key(None)
    """Its address, as `http://host:8000/v1`; null: no judge. It takes the place of the reward function."""
    model: str | None = key(None)
    """The model's name on that server."""
    api_key_env: str | None = key(None)
    """Name of the environment variable that holds the API key; the key itself is never written into a configuration."""
    system: str | None = key(None, blank=True)
    """The judge's system prompt."""
    template: str | None = key(None)
    """What it is asked, a jinja2 template or a file of one (`.jinja`, `.j2`), with `question`, `response`, `ground_truth`,
    `prompt`, `data_source`, `extra_info`, `lowest`, `highest`; null: a template that ends with "Score: X"."""
    score_pattern: str | None = key(None)
    """Regular expression with one group around the number; its last match counts. null: what follows "Score:"."""
    score_json: str | None = key(None)
    """Or the name of the number in a JSON object that the judge writes; the last such object counts."""
    scale: list[float] = key([0.0, 10.0])
    """The lowest and the highest score that it may give; they become 0 and 1. Others are failures."""
    temperature: float = key(0.0, ge=0)
    """Sampling temperature of its answers."""
    max_tokens: int = key(1024, ge=1)
    """Tokens that an answer may have."""
    num_votes: int = key(1, ge=1)
    """Answers that are asked for each response; they need a temperature."""
    vote: str = key("mean", choices=("mean", "median", "majority"))
    """How the scores of several votes become one."""
    extra_body: dict[str, Any] = key({})
    """Further fields of the request, as `top_p`, or `chat_template_kwargs` of vLLM."""
    timeout: float = key(30.0, gt=0)
    """Seconds for one request. All of a row's requests together end at `reward.timeout`."""
    max_attempts: int = key(3, ge=1)
    """How often a request is sent where the server is busy, fails or does not answer (`reward_manager.name=rate_limited`
    sends again by its own rules)."""
    retry_delay: float = key(1.0, ge=0)
    """Seconds before the second attempt, twice as many before each further one; longer where the server says so
    (`Retry-After`)."""


@dataclass(kw_only=True, slots=True)
class RemoteRewardConfig(Section):
    """A server that scores responses: `reward.reward_manager.name=remote`."""

    url: str | None = key(None)
    """Where rows are posted to, as `http://host:9000/score`."""
    api_key_env: str | None = key(None)
    """Name of the environment variable that holds a key, sent as `Authorization: Bearer`."""
    rows_per_request: int = key(32, ge=1)
    """Rows that travel in one request, at most."""
    max_concurrent: int = key(8, ge=1)
    """Requests on their way at once."""
    timeout: float = key(60.0, gt=0)
    """Seconds for one request; `reward.timeout` does not count here."""
    max_attempts: int = key(3, ge=1)
    """How often a request is sent where the server is busy, fails or does not answer."""
    retry_delay: float = key(1.0, ge=0)
    """Seconds before the second attempt, twice as many before each further one; longer where the server says so
    (`Retry-After`)."""


@dataclass(kw_only=True, slots=True)
class RateLimitConfig(Section):
    """How often the reward function is called: `reward.reward_manager.name=rate_limited`."""

    max_concurrent: int = key(32, ge=1)
    """Calls at once."""
    max_rpm: float | None = key(None, gt=0)
    """Calls a minute; null: any number."""
    max_tpm: float | None = key(None, gt=0)
    """Tokens a minute; null: any number."""
    estimated_tokens_per_request: int = key(2000, ge=0)
    """Tokens that a call is expected to take; what it says itself (`num_request_tokens` in its dict) is settled after."""
    timeout: float = key(300.0, gt=0)
    """Seconds for one call, waiting for its turn not counted; it takes the place of `reward.timeout`."""
    max_attempts: int = key(3, ge=1)
    """How often a call that raises is made."""
    retry_delay: float = key(1.0, ge=0)
    """Seconds before the second call, twice as many before each further one; longer where the exception says so
    (`retry_after`, or `response.headers["Retry-After"]` as the clients of OpenAI and httpx keep it)."""
