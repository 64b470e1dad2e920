"""What drives a vLLM engine, wherever it lives: in this process (`in_process`) or in others (`process`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from burnish.rollout.base import WeightStream
from burnish.rollout.vllm.requests import Finished, Prepared


class Core(Protocol):
    """One vLLM engine with its workers, which have `burnish.rollout.vllm.extension.WorkerExtension`.

    All methods are called from one thread, the one that uses the engine, except that ``send`` may come from another one
    while ``take_aborts`` does not return (the engine is paused then).
    """

    num_steps: int
    """Passes of the model in the last ``run``; 0 where it is not known."""
    prefill_seconds: float
    """Of the last ``run``, for steps that took in prompts."""
    decode_seconds: float
    """Of the last ``run``, for all other steps."""
    max_running: int
    """The most sequences that ran at once in the last ``run``."""
    num_prefilled_tokens: int
    """Prompt tokens that went through the model in the last ``run``."""
    cache_bytes: int
    """Memory of the key-value cache; 0 where it is not known."""

    def run(
        self,
        requests: Sequence[Prepared],
        on_finished: Callable[[Finished], None],
        take_aborts: Callable[[], set[str]],
    ) -> None:
        """Serves all requests to their end.

        Args:
            on_finished: called from this thread, once for each request, as it ends. What it raises ends the run: the
                others are aborted, and the engine stays usable.
            take_aborts: called from this thread between steps: ids of requests that must end soon. It may block, while
                the engine is paused.

        Raises:
            RolloutError: the engine died (with its log's cause); logits that are not finite.
        """
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """What this method of the worker extension returns on every rank of the engine; plain arguments only."""
        ...

    def send(self, stream: WeightStream, bucket_bytes: int, version: int = 0) -> None:
        """Fills the engine's copy of the weights, reads the stream to its end and forgets cached keys and values.

        The version is that of all tokens sampled from now on.

        Raises:
            RolloutError: a name that is missing, unknown, given twice, or of another shape here. What the stream itself
                raises comes through. Either way the next ``send`` may begin anew.
        """
        ...

    def receive(self, address: Mapping[str, Any], first_rank: int, version: int) -> None:
        """As ``send``, of weights that another process broadcasts.

        Args:
            address: `burnish.rollout.vllm.broadcast.WeightBroadcast.address`.
            first_rank: of this engine's workers in that group.
        """
        ...

    def pause(self) -> None:
        """Samples nothing until ``resume``, where the engine goes on by itself between the steps of ``run``."""
        ...

    def resume(self) -> None:
        """Ends ``pause``."""
        ...

    def sleep(self, level: int) -> None:
        """Frees memory: level 1 keeps the weights in host memory, level 2 forgets them."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends ``sleep`` for these tags (``weights``, ``kv_cache``); None: for all."""
        ...

    def close(self) -> None:
        """Ends the engine and its processes; may be called twice."""
        ...
