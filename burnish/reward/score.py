"""What a reward function returned, read as a score."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from burnish.utils.errors import RewardError

LARGEST = 3.4028234663852886e38
"""The largest number that float32 holds."""
_KINDS = "a number, a bool, None (no score), a list of numbers (one for each token) or a dict with 'score'"


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one row: a number that float32 holds, or None.

    Attributes:
        value: of several ``parts`` their sum.
        parts: a number for each token that the policy sampled, or for each of its turns (``per``); empty for one number.
        reason: why the row has no score of the function's: "abstain", "error", "timeout", "non_finite"; "" where it has.
        error: what went wrong, in a line, and the ``traceback``.
    """

    value: float | None
    parts: tuple[float, ...] = ()
    per: Literal["token", "turn"] = "token"
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    error: str | None = None
    traceback: str = ""

    def plus(self, penalty: float) -> Self:
        """With ``penalty`` added, on the last part where there are parts."""
        assert self.value is not None
        parts = (*self.parts[:-1], self.parts[-1] + penalty) if self.parts else ()
        return replace(self, value=self.value + penalty, parts=parts)

    def check_length(self, num_tokens: int, num_turns: int) -> None:
        """Checks that there is a part for each token, or each turn, of the response.

        Raises:
            RewardError: names both numbers.
        """
        wanted = num_tokens if self.per == "token" else num_turns
        if self.parts and len(self.parts) != wanted:
            what = "tokens that the policy sampled" if self.per == "token" else "turns of the policy"
            per_turn = ' For a number per turn return {"score": [...], "per": "turn"}.' if self.per == "token" else ""
            raise RewardError(
                f"The reward function returned a list of {len(self.parts)} numbers, one per {self.per}, but the response has "
                f"{wanted} {what}.{per_turn}"
            )


def read_score(returned: Any) -> Score:
    """The score in what a reward function returned: a number, a bool, None (no score), a list of numbers, or a dict with one
    of these under "score" and extras; beside a list, ``per`` says "token" (the default) or "turn".

    Raises:
        RewardError: it is none of these; names what was returned and what is expected.
    """
    extras: dict[str, Any] = {}
    if isinstance(returned, dict):
        if "score" not in returned:
            raise RewardError(
                f"The reward function returned a dict with the keys {', '.join(map(str, returned)) or '(none)'}; the "
                f"score is expected under 'score'."
            )
        extras = {str(name): plain(value) for name, value in returned.items() if name != "score"}
        returned = returned["score"]
    if returned is None:
        return Score(value=None, extras=extras, reason="abstain")
    returned = plain(returned)
    if isinstance(returned, (list, tuple)):
        return _read_list(returned, extras)
    if not _is_number(returned):
        raise RewardError(
            f"The reward function returned {type(returned).__name__} ({returned!r:.80}); {_KINDS} is expected."
        )
    # Compared before it becomes a float, which a large int cannot; a score that float32 cannot hold is infinite there.
    if not abs(returned) <= LARGEST:
        return Score(value=None, extras=extras, reason="non_finite", error=f"the score is {returned!r:.40}, not finite")
    return Score(value=float(returned), extras=extras)


def _read_list(numbers: Any, extras: dict[str, Any]) -> Score:
    per = extras.pop("per", "token")
    if per not in ("token", "turn"):
        raise RewardError(f"The reward function returned per={per!r} beside a list; 'token' or 'turn' is expected.")
    numbers = [plain(number) for number in numbers]
    for place, number in enumerate(numbers):
        if not _is_number(number):
            raise RewardError(
                f"The reward function returned a list whose element {place} is {type(number).__name__} ({number!r:.40}); "
                f"{_KINDS} is expected."
            )
    finite = all(abs(number) <= LARGEST for number in numbers)
    total = sum(map(float, numbers)) if finite else float("nan")
    if not abs(total) <= LARGEST:
        return Score(value=None, extras=extras, reason="non_finite", error="the scores in its list are not all finite")
    if not numbers:
        raise RewardError("The reward function returned an empty list; one number for each token or turn is expected.")
    return Score(value=total, parts=tuple(map(float, numbers)), per=per, extras=extras)


def plain(value: Any) -> Any:
    """Python's own number, text or list for NumPy's and torch's, anything else as it is."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "tolist"):
        return value
    return value.tolist() if len(shape) == 1 else value.item() if len(shape) == 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
