"""A language model that judges responses: any server with OpenAI's chat completions.

It is a reward function like others (``reward.judge.url``), so the manager's rules hold for it: an answer without a score
fails that row (``reward.on_error``) and is counted. Beside rules it is one of ``reward.functions``:
``path=pkg://burnish.reward.judge name=compute_score``, its settings as ``reward_kwargs``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import jinja2

from burnish.config.reward import JudgeConfig
from burnish.reward.http import JsonClient, RequestError
from burnish.reward.judge_template import compiled_template, template_text
from burnish.utils.errors import ConfigError, RewardError

# Possessive: blanks without a number behind them are looked through once.
DEFAULT_PATTERN = r"(?i)score\**+\s*+[:=]\s*+\**+\s*+([-+]?\d+(?:\.\d+)?)"
_KEY = "reward.judge"
_SHOWN = 300  # Characters of the judge's answer that are shown in an error.


class Judge:
    """Asks a model for the score of one response: renders the template, reads the score out of the answer, and takes the
    scale to 0..1.

    The score comes with the extras ``judge_score`` (on the judge's own scale), ``judge_text`` (its answer; of several votes
    the first), ``judge_failed_votes`` (answers without a score, where others had one) and ``num_request_tokens`` (all
    requests together, where the server counts them).

    Raises:
        ConfigError: the address, the template, the pattern or the scale is of no use; names the key.
    """

    takes_prompt = True
    """The manager gives it the conversation as ``prompt`` too."""
    most_workers = 1
    """It waits for answers, for many rows at once, in one process; more of them would only ask more at once."""

    def __init__(self, config: JudgeConfig, key: str = _KEY) -> None:
        self.config = config
        self._key = key
        if not config.url or not config.model:
            raise ConfigError(
                f"{key}: a judge needs {key}.url (as http://host:8000/v1) and {key}.model, its name there."
            )
        self._client = JsonClient(
            chat_completions(config.url),
            key=f"{key}.url",
            api_key_env=config.api_key_env,
            timeout=config.timeout,
            max_attempts=config.max_attempts,
            retry_delay=config.retry_delay,
        )
        self._template_text = template_text(config.template, key)
        self._scale = _checked_scale(config.scale, key)
        _compiled_pattern(config.score_pattern, key)
        compiled_template(self._template_text, key)
        if config.num_votes > 1 and config.temperature == 0:
            raise ConfigError(
                f"{key}.num_votes={config.num_votes} with {key}.temperature=0: all votes would be the same. Raise the "
                f"temperature, as {key}.temperature=0.7, or ask once."
            )
        if config.score_json is not None and config.score_pattern is not None:
            raise ConfigError(f"{key}.score_json and {key}.score_pattern: the score is read in one way; unset one.")

    def once(self) -> Judge:
        """The same judge, which does not ask again by itself: for a manager that does."""
        other = object.__new__(Judge)
        other.__dict__.update(self.__dict__)
        config = self.config
        other._client = JsonClient(
            chat_completions(config.url or ""),
            key=f"{self._key}.url",
            api_key_env=config.api_key_env,
            timeout=config.timeout,
            max_attempts=1,
        )
        return other

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        prompt: Sequence[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The score of a response, 0..1, and extras.

        Raises:
            RequestError: the server gave no answer.
            RewardError: no vote has a score; shows the first answer.
        """
        body = self._body(data_source, solution_str, ground_truth, extra_info or {}, prompt)
        votes = await asyncio.gather(*(self._vote(body) for _ in range(self.config.num_votes)), return_exceptions=True)
        scores, failures, texts, num_tokens = [], [], [], 0
        for vote in votes:
            if isinstance(vote, RewardError):
                failures.append(vote)
            elif isinstance(vote, BaseException):
                raise vote
            else:
                text, tokens = vote
                num_tokens += tokens
                texts.append(text)
                try:
                    scores.append(self.read(text))
                except RewardError as error:
                    failures.append(error)
        if not scores:
            raise failures[0]
        score = _combined(scores, self.config.vote)
        lowest, highest = self._scale
        result: dict[str, Any] = {
            "score": (score - lowest) / (highest - lowest),
            "judge_score": score,
            "judge_text": texts[0],
            "judge_failed_votes": len(failures),
        }
        return result | ({"num_request_tokens": num_tokens} if num_tokens else {})

    def read(self, text: str) -> float:
        """The score in the judge's answer, on its own scale; of several the last. What stands before ``</think>`` is
        not read.

        Raises:
            RewardError: there is none, or it lies outside the scale.
        """
        answer = text.rpartition("</think>")[2]
        if self.config.score_json is not None:
            score = _last_json_number(answer, self.config.score_json)
            wanted = f"no JSON object with a number under {self.config.score_json!r}"
        else:
            found = _compiled_pattern(self.config.score_pattern, self._key).findall(answer)
            score = _number(found[-1]) if found else None
            wanted = "no score"
        if score is None:
            raise RewardError(f"There is {wanted} in the judge's answer, which ends: {answer[-_SHOWN:]!r}.")
        lowest, highest = self._scale
        if not lowest <= score <= highest:
            raise RewardError(f"The judge gives {score:g}, which is outside its scale {lowest:g} to {highest:g}.")
        return score

    async def _vote(self, body: dict[str, Any]) -> tuple[str, int]:
        """The judge's answer, and the tokens that the server counted."""
        answer = await self._client.post(body)
        try:
            choice = answer["choices"][0]
            text = _text(choice["message"]["content"])
        except (TypeError, KeyError, IndexError):
            raise RequestError(
                f"The judge's server answers, but not with a chat completion: "
                f"{self._client.hide(json.dumps(answer))[:_SHOWN]}."
            ) from None
        usage = answer.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if not text.strip():
            raise RewardError(
                f"The judge's answer is empty (finish_reason {choice.get('finish_reason')!r}); a model that thinks first "
                f"may need more than {self._key}.max_tokens={self.config.max_tokens}."
            )
        return text, tokens if isinstance(tokens, int) else 0

    def _body(
        self,
        data_source: str,
        response: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        prompt: Sequence[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        config = self.config
        variables: dict[str, Any] = {
            "response": response,
            "ground_truth": ground_truth,
            "data_source": data_source,
            "extra_info": extra_info,
            "prompt": list(prompt or []),
            "lowest": f"{self._scale[0]:g}",
            "highest": f"{self._scale[1]:g}",
        }
        if (question := _question(prompt, extra_info)) is not None:
            variables["question"] = question
        try:
            text = compiled_template(self._template_text, self._key).render(variables)
        except jinja2.TemplateError as error:
            hint = " There is neither a prompt nor extra_info.question." if question is None else ""
            raise RewardError(f"{self._key}.template cannot be filled in: {error}.{hint}") from error
        system = [{"role": "system", "content": config.system}] if config.system else []
        return {
            "model": config.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    prompt: Sequence[dict[str, Any]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A judge as one of several functions: ``settings`` are the keys of ``reward.judge``."""
    judge = _judge_of(json.dumps(settings, sort_keys=True))
    return await judge(data_source, solution_str, ground_truth, extra_info, prompt)


compute_score.takes_prompt = True  # type: ignore[attr-defined]


@functools.cache
def _judge_of(settings: str) -> Judge:
    given = json.loads(settings)
    try:
        config = JudgeConfig(**given)
    except TypeError as error:
        raise ConfigError(f"reward_kwargs of the judge: {error}. They are the keys of reward.judge.") from error
    return Judge(config, key="reward_kwargs")


def chat_completions(url: str) -> str:
    """The address that chat completions are asked at, of the server's, of its API's (``/v1``) or of its own."""
    url = url.rstrip("/")
    if url.endswith("/chat/completions"):
        return url
    has_path = "/" in url.partition("://")[2]
    return f"{url}/chat/completions" if has_path else f"{url}/v1/chat/completions"


@functools.lru_cache(maxsize=32)
def _compiled_pattern(pattern: str | None, key: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern or DEFAULT_PATTERN)
    except re.error as error:
        raise ConfigError(f"{key}.score_pattern={pattern}: this is no regular expression: {error}.") from error
    if compiled.groups != 1:
        raise ConfigError(
            f"{key}.score_pattern={pattern}: there must be one group, in parentheses, around the number; there are "
            f"{compiled.groups}."
        )
    return compiled


def _checked_scale(scale: Sequence[float], key: str) -> tuple[float, float]:
    if len(scale) != 2 or not scale[0] < scale[1] or not all(map(math.isfinite, scale)):
        raise ConfigError(f"{key}.scale={list(scale)}: two numbers are needed, the lowest and the highest score.")
    return float(scale[0]), float(scale[1])


def _question(prompt: Sequence[dict[str, Any]] | None, extra_info: dict[str, Any]) -> str | None:
    """What was asked: ``extra_info.question``, else the last message of the user, else the prompt's text."""
    if isinstance(extra_info.get("question"), str):
        return str(extra_info["question"])
    if isinstance(prompt, str):
        return prompt
    texts = [_text(message.get("content")) for message in prompt or [] if message.get("role") == "user"]
    return texts[-1] if texts else None


def _text(content: Any) -> str:
    """The text of a message, of its parts where it has parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _last_json_number(text: str, name: str) -> float | None:
    """The number under ``name`` in the last JSON object that has one."""
    decoder = json.JSONDecoder()
    found, position = None, text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            number = _number(value.get(name)) if isinstance(value, dict) else None
            found = found if number is None else number
        position = text.find("{", end)
    return found


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _combined(scores: list[float], vote: str) -> float:
    if vote == "mean":
        return statistics.fmean(scores)
    if vote == "median":
        return statistics.median(scores)
    # The most frequent one; of several the lower, since a doubtful answer should not be learned.
    counts = {score: scores.count(score) for score in scores}
    return min(score for score, count in counts.items() if count == max(counts.values()))
