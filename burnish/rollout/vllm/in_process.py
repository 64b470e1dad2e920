"""A vLLM engine in this process: its steps are made here, one after the other, so nothing happens between two of them."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from burnish.rollout.base import FinishReason, WeightStream
from burnish.rollout.vllm.adapters import lora_request
from burnish.rollout.vllm.failures import start_failure
from burnish.rollout.vllm.launch import read_environment_anew
from burnish.rollout.vllm.requests import Finished, Prepared, Progress
from burnish.rollout.vllm.sleep_memory import let_go
from burnish.rollout.vllm.undisturbed import undisturbed
from burnish.utils import env, progress
from burnish.utils.errors import RolloutError


@dataclass(slots=True)
class _Running:
    """A request in the engine."""

    progress: Progress
    state: Any
    """vLLM's own ``Request``."""


class InProcessCore:
    """`Core` on vLLM's ``LLMEngine`` without processes of its own.

    With ``tensor_parallel_size`` above 1 that many neighbouring ranks of ``torch.distributed`` make one of these each and are
    given the same requests in the same order; all come to the same tokens.

    Args:
        arguments: keywords of vLLM's ``EngineArgs``, see `burnish.rollout.vllm.arguments.engine_arguments`.
        environment: what vLLM must find in the environment, see `engine_environment`.
        tokenizer: the model's, for stop strings.

    Raises:
        RolloutError: vLLM does not start; its own words are in the message.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        tokenizer: Any = None,
    ) -> None:
        self.num_steps = self.max_running = self.num_prefilled_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.version = 0
        self._tokenizer = tokenizer
        self._running: dict[str, _Running] = {}
        self._num_added = 0
        self._is_closed = False
        self._asleep: set[str] = set()
        env.set_all(dict(environment))
        read_environment_anew()
        _Group.enter()
        try:
            with undisturbed():
                if arguments["distributed_executor_backend"] == "external_launcher":
                    env.set_all(_launcher_environment())
                self._llm = _start(arguments)
        except BaseException:
            _Group.leave()
            raise
        self._client = self._llm.engine_core
        # vLLM would end the trainer's process group with the engine, also where that is only forgotten.
        if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
            finalizer.detach()
        self._scheduler = self._client.engine_core.scheduler
        self.call("install_sampler")
        self.cache_bytes = _cache_bytes(self._client.engine_core)

    def run(
        self,
        requests: Sequence[Prepared],
        on_finished: Callable[[Finished], None],
        take_aborts: Callable[[], set[str]],
    ) -> None:
        """See `Core.run`."""
        self.num_steps = self.max_running = self.num_prefilled_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        ids: dict[str, str] = {}
        try:
            for request in requests:
                ids[request.request_id] = self._add(request)
            while self._running:
                for request_id in sorted(self._agreed(take_aborts())):
                    if ids.get(request_id) in self._running:
                        on_finished(self._cut(ids[request_id]))
                if self._running:
                    for finished in self._step():
                        on_finished(finished)
        finally:
            self._client.abort_requests(list(self._running))
            try:
                self._drain()
            finally:
                self._running.clear()

    def call(self, method: str, *args: Any) -> list[Any]:
        """See `Core.call`; with tensor parallelism only what this rank returns."""
        result: list[Any] = self._client.collective_rpc(method, None, args)
        return result

    def send(self, stream: WeightStream, bucket_bytes: int, version: int = 0) -> None:
        """See `Core.send`; the stream itself is handed over, so nothing is copied but into the engine's own weights."""
        del bucket_bytes
        self._update(version, "take_weights", stream)

    def receive(self, address: Mapping[str, Any], first_rank: int, version: int) -> None:
        """See `Core.receive`."""
        self._update(version, "take_broadcast", dict(address), first_rank)

    def _update(self, version: int, take: str, *args: Any) -> None:
        self.call("begin_update", version)
        self.call(take, *args)
        self.call("end_update")
        # Sequences that are in the middle of their response are prefilled again, with the new weights.
        self._client.reset_prefix_cache(True)
        self.version = version

    def pause(self) -> None:
        """See `Core.pause`: its steps are those of ``run``, which stands still by itself."""

    def resume(self) -> None:
        """See `Core.resume`."""

    def sleep(self, level: int) -> None:
        """See `Core.sleep`."""
        self._client.reset_prefix_cache()  # What it holds is gone.
        self._client.engine_core.model_executor.sleep(level)
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `Core.wake_up`."""
        self._client.engine_core.model_executor.wake_up(None if tags is None else list(tags))
        self._asleep -= self._asleep if tags is None else set(tags)

    def close(self) -> None:
        """See `Core.close`. Nothing refers to the model afterwards, and its memory is free."""
        if self._is_closed:
            return
        self._is_closed = True
        self.call("forget_model")
        self._client.engine_core.model_executor.shutdown()
        self._scheduler.shutdown()
        self._running.clear()
        self._llm = self._client = self._scheduler = None
        _Group.leave(self._asleep)

    def _add(self, prepared: Prepared) -> str:
        """Hands a request to the scheduler.

        Returns:
            vLLM's own id of it.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        try:
            request = self._llm.input_processor.process_inputs(
                prepared.request_id,
                tokens_input(prepared.prompt_ids),
                SamplingParams(**prepared.params),
                supported_tasks=("generate",),
                lora_request=lora_request() if prepared.with_adapters else None,
            )
        except Exception as error:  # Whatever it is, it is vLLM's, and its words are in ours.
            raise RolloutError(f"vLLM refuses request {prepared.request_id!r}: {error}") from error
        # A name of its own, since the caller may use his again while the last one is not forgotten everywhere; and the same
        # one on every rank, unlike those that vLLM makes up.
        self._num_added += 1
        request.external_req_id, request.request_id = prepared.request_id, f"{self._num_added}-{prepared.request_id}"
        self._client.add_request(request)
        state = self._scheduler.requests[request.request_id]
        self._running[request.request_id] = _Running(Progress(prepared, self._tokenizer), state)
        return str(request.request_id)

    def _step(self) -> Iterator[Finished]:
        """One pass of the model; what has ended with it."""
        start = time.perf_counter()
        outputs = self._next_outputs()
        seconds = time.perf_counter() - start
        self.num_steps += 1
        progress.tick()
        self.max_running = max(self.max_running, len(self._scheduler.running), len(outputs))
        firsts = 0
        ended: list[tuple[str, FinishReason, int | str | None]] = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if not running.progress.token_ids:
                firsts += 1
                if output.prefill_stats is not None:
                    self.num_prefilled_tokens += output.prefill_stats.num_computed_tokens
            stop = self._take(running, output) if output.new_token_ids else None
            if stop is not None:
                self._client.abort_requests([output.request_id])
                ended.append((output.request_id, "stop", stop))
            elif output.finish_reason is not None:
                ended.append((output.request_id, *_ending(output)))
        if firsts or not outputs:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
        # All of them are out of the engine before the first callback, which may raise.
        finished = [self._finished(internal, reason, stop_reason) for internal, reason, stop_reason in ended]
        return iter(finished)

    def _next_outputs(self) -> Any:
        try:
            return self._client.get_output().outputs
        except RolloutError:
            raise
        except Exception as error:  # Whatever it is, it is vLLM's, and its words are in ours.
            raise RolloutError(
                f"vLLM failed in the middle of {len(self._running)} responses: {type(error).__name__}: {error}"
            ) from error

    def _drain(self) -> None:
        """With asynchronous scheduling vLLM has begun a step beyond the last one that anybody waits for."""
        while getattr(self._client.engine_core, "batch_queue", None):
            self._next_outputs()

    def _take(self, running: _Running, output: Any) -> str | None:
        columns = output.new_logprobs.logprobs
        truncated = columns[:, 1].tolist() if running.progress.truncated is not None else None
        return running.progress.take(output.new_token_ids, columns[:, 0].tolist(), truncated, self.version)

    def _agreed(self, aborts: set[str]) -> set[str]:
        """What any rank of the engine wants to abort: all must cut the same requests before the same step."""
        if self._llm.vllm_config.parallel_config.tensor_parallel_size == 1:
            return aborts
        import torch.distributed as dist
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group().cpu_group
        wants_any = torch.tensor([bool(aborts)], dtype=torch.int32)
        dist.all_reduce(wants_any, dist.ReduceOp.MAX, group=group)
        if not wants_any:
            return aborts
        wanted: list[set[str]] = [set() for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(wanted, aborts, group=group)
        return set().union(*wanted)

    def _cut(self, internal: str) -> Finished:
        self._client.abort_requests([internal])
        return self._finished(internal, "abort", None)

    def _finished(self, internal: str, reason: FinishReason, stop_reason: int | str | None) -> Finished:
        running = self._running.pop(internal)
        running.progress.num_preemptions = running.state.num_preemptions
        return running.progress.finished(reason, stop_reason)


class _Group:
    """What engines of one process share: the process groups that vLLM makes, which the last of them ends (the trainer's it leaves
    alone), and the memory for sleep.
    """

    num_engines = 0
    is_vllms = False
    """Whether vLLM made the default one too, as where a run has one process."""

    @classmethod
    def enter(cls) -> None:
        """Another engine starts."""
        if cls.num_engines == 0:
            let_go()  # Of one that did not start: while its error was alive, so was what it had allocated.
            cls.is_vllms = not torch.distributed.is_initialized()
        cls.num_engines += 1

    @classmethod
    def leave(cls, asleep: Collection[str] | None = None) -> None:
        """An engine has ended, or did not start.

        Args:
            asleep: what of its memory slept when it ended; None: it did not start.
        """
        cls.num_engines -= 1
        if cls.num_engines:
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        if cls.is_vllms:
            destroy_distributed_environment()
        if asleep is not None:
            let_go(asleep)


def _ending(output: Any) -> tuple[FinishReason, int | str | None]:
    """vLLM's reason in burnish's words.

    Raises:
        RolloutError: vLLM gave the request up.
    """
    reason = str(output.finish_reason)
    if reason == "stop":
        return "stop", output.stop_reason
    if reason == "length":
        return "length", None
    raise RolloutError(
        f"vLLM ended request {output.request_id!r} with the reason {reason!r}, in the middle of its response."
    )


def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        engine_args = EngineArgs(**arguments)
        config = engine_args.create_engine_config()
        if config.model_config.using_transformers_backend():
            # It changes the classes of transformers, and the trained model in this process is one of them.
            raise RolloutError(
                f"vLLM has no model of its own for {arguments['model']} and would run that of transformers, which in this "
                f"process is the trained one. Set rollout.mode=async, where vLLM has a process of its own."
            )
        return LLMEngine.from_vllm_config(config, disable_log_stats=engine_args.disable_log_stats)
    except RolloutError:
        raise
    except Exception as error:  # Whatever it is, it is vLLM's, and its words are in ours.
        raise start_failure(arguments["model"], error) from error


def _cache_bytes(engine_core: Any) -> int:
    """Memory of the key-value cache; 0 where vLLM does not tell."""
    config = getattr(engine_core.scheduler, "kv_cache_config", None)
    return sum(int(tensor.size) for tensor in getattr(config, "kv_cache_tensors", ()))


def _launcher_environment() -> dict[str, str]:
    """What vLLM's external launcher reads: this process's place among all; neighbours in that order become one engine."""
    import torch.distributed as dist

    # Not the number of the process on its node: Ray shows each only its own GPU, which is its first one.
    local = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
    return {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(local), "WORLD_SIZE": str(dist.get_world_size())}
