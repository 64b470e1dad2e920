"""vLLM's scheduler, kept from losing a token of each response that is interrupted by other weights.

Imported by vLLM alone, in the engine's process.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class UpdatableScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's for asynchronous scheduling, where ``reset_prefix_cache`` interrupts requests that run.

    That of vLLM 0.21 drops the next token of every interrupted request, as the one that was still on its way from before.
    Where the engine stood still there is none on its way, as behind a pause, and a prompt that is read in parts has none
    either: the token that is dropped is then the first of the new weights, and what follows was computed behind it. Newer
    versions count what is on its way; nothing is changed there.
    """

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """See vLLM's."""
        waits_for_token = [(request, request.num_output_placeholders > 0) for request in self.running]
        done: bool = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        if reset_running_requests:
            for request, waits in waits_for_token:
                if hasattr(request, "discard_latest_async_tokens"):
                    request.discard_latest_async_tokens = waits
        return done
