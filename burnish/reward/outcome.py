"""What became of one call of a reward function."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["returned", "raised", "timeout", "died"]

_NO_GPU = (
    " (Reward processes see no GPU: CUDA_VISIBLE_DEVICES is empty there. A model that scores belongs into a reward model "
    "worker, reward.reward_model.enable=true, or behind HTTP.)"
)

_ASKS_FOR_GPU = (
    "No CUDA GPUs are available",
    "no CUDA-capable device",
    "Found no NVIDIA driver",
    "not compiled with CUDA enabled",
    "torch.cuda.is_available() is False",
    "invalid device ordinal",
)


@dataclass(frozen=True)
class Outcome:
    """What became of one call of a reward function.

    Attributes:
        value: what it returned.
        error: one line, "Type: message"; None where it returned.
        traceback: of what it raised, as text.
        kind: "returned", "raised", "timeout" (it took longer than allowed and was stopped) or "died" (it took its
            process down).
        seconds: how long it ran.
    """

    value: Any = None
    error: str | None = None
    traceback: str = ""
    kind: Kind = "returned"
    seconds: float = 0.0


def one_line(error: BaseException) -> str:
    """An exception as "Type: message" in one line, with advice where it asked for a GPU."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  an exception of others, whose text may raise
        message = "(its message cannot be read)"
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return said + _NO_GPU if any(words in message for words in _ASKS_FOR_GPU) else said
