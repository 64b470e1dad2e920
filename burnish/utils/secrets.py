"""Keeps tokens, passwords and keys out of everything that is shown, logged or written.

A value is secret by the name it stands under (``hf_token``, ``WANDB_API_KEY``, ``reward_kwargs.password``), in a configuration
as in the environment; it is then hidden wherever it turns up, in the text of an error too.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from burnish.utils import env

HIDDEN = "<redacted>"

_WORDS = ("token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "authorization")
_PAIRS = ("api_key", "access_key", "private_key", "secret_key", "auth_key", "auth_header")
# A name that ends so tells where a secret is, or of what kind, and holds none.
# Of a tokenizer.
_SPECIAL_TOKENS = ("pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "end", "max", "per", "stop")
_HARMLESS_ENDS = ("env", "file", "path", "dir", "folder", "url", "name", "type", "mode", "id", "ids", "format")
# Shorter values would be found inside ordinary words.
_LEAST_LENGTH = 8
_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
# ``?token=...&sig=...`` of a signed address.
_IN_QUERY = re.compile(r"(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&\s#'\"<>]+)")
_BEARER = re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}")
# Possessive, and begun only where a name begins: a text without signs, as a long word is, takes one pass.
_TO_VALUE = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)['\"]?+\s*+[=:]\s*+")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s,;}\])'\"]+")

# Values that a configuration held; from then on they are hidden in every text.
_known: set[str] = set()


# Every text that is hidden asks for the names of all environment variables.
@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a value under that name, of a key or of an environment variable, is to be hidden."""
    last = name.rpartition(".")[2]
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()) if word]
    if not words or words[-1] in _HARMLESS_ENDS:
        return False
    if words[-1] == "token" and len(words) > 1 and words[-2] in _SPECIAL_TOKENS:
        return False
    joined = "_".join(words)
    return words[-1] in _WORDS or any(f"_{pair}_" in f"_{joined}_" for pair in _PAIRS) or "secret" in words


def redact(value: Any, name: str = "") -> Any:
    """A copy of a configuration (mappings, lists, plain values) whose secrets are hidden.

    Texts alone can be secret: a number under ``max_token`` is a number. What is hidden once is remembered and is hidden in
    texts from then on.

    Args:
        name: under which ``value`` stands.
    """
    if isinstance(value, Mapping):
        return {key: redact(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(entry, name) for entry in value)
    if not isinstance(value, str) or not value:
        return value
    if is_secret_name(name) and not value.startswith("$"):
        if len(value) >= _LEAST_LENGTH:
            _known.add(value)
        return HIDDEN
    return redact_text(value)


def redact_text(text: str) -> str:
    """``text`` without the values of secret environment variables and keys, passwords in addresses, and ``name=value`` of
    secret names."""
    text = _IN_URL.sub(HIDDEN, text)
    text = _IN_QUERY.sub(_hide_in_query, text)
    text = _BEARER.sub(HIDDEN, text)
    text = _hide_assigned(text)
    for value in sorted(_known | _secrets_of_environment(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _hide_in_query(match: re.Match[str]) -> str:
    name = match["name"].lower()
    is_secret = is_secret_name(name) or name.endswith(("sig", "signature"))
    return f"{match['name']}={HIDDEN}" if is_secret else match[0]


def _hide_assigned(text: str) -> str:
    """``text`` without the values of secret names. What stands behind any other name is looked through as well: of
    ``error:token=...`` the token is hidden."""
    shown, place = [], 0
    for found in _TO_VALUE.finditer(text):
        if found.start() < place or not is_secret_name(found["name"].lstrip("0123456789.-")):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or _is_harmless(value[0], after=found[0]):
            continue
        bare = value[0].strip("'\"")
        if len(bare) >= _LEAST_LENGTH and not bare.startswith("$"):
            _known.add(bare)
        shown += [text[place : found.end()], HIDDEN]
        place = value.end()
    return "".join([*shown, text[place:]])


def _is_harmless(value: str, after: str) -> bool:
    # A word of a sentence behind a colon is no assignment, a number is no secret, and what is hidden already stays so.
    bare = value.strip("'\"")
    is_in_sentence = after.endswith(": ") and not value.startswith(("'", '"'))
    return HIDDEN in value or bare in ("", "None", "null", "true", "false") or is_in_sentence or _is_number(bare)


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdigit()


def _secrets_of_environment() -> set[str]:
    values = (env.get(name) or "" for name in env.names() if is_secret_name(name))
    return {value for value in values if len(value) >= _LEAST_LENGTH}


class HidingFormatter(logging.Formatter):
    """Writes log records, and the tracebacks that come with them, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return redact_text(super().format(record))
