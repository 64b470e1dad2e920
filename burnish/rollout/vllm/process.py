"""A vLLM engine in processes of its own: it goes on by itself while this one does other things, scores responses say."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from burnish.rollout.base import WeightStream
from burnish.rollout.vllm.adapters import lora_request
from burnish.rollout.vllm.arrivals import Arrival, Running, StepCounter
from burnish.rollout.vllm.broadcast import WeightBroadcast
from burnish.rollout.vllm.engine_log import EngineLog
from burnish.rollout.vllm.engine_watch import GLANCE_S, EngineWatch, Heartbeat
from burnish.rollout.vllm.failures import start_failure
from burnish.rollout.vllm.launch import is_alone, launch_environment, with_executor
from burnish.rollout.vllm.requests import Finished, Prepared, Progress
from burnish.rollout.vllm.transports import send_in_buckets
from burnish.rollout.vllm.undisturbed import undisturbed
from burnish.utils import env
from burnish.utils.errors import RolloutError

Transport = Literal["memory", "broadcast"]
"""How weights reach the engine: through memory that both see (its GPUs are the trainer's), or by a broadcast."""


class ProcessCore:
    """`burnish.rollout.vllm.core.Core` on vLLM's ``AsyncLLM``: one request for each sample, each finished as it ends.

    Args:
        arguments: keywords of vLLM's ``EngineArgs``, see `burnish.rollout.vllm.arguments.engine_arguments`.
        environment: what vLLM must find in the environment; ``CUDA_VISIBLE_DEVICES`` in it puts the engine on other GPUs.
        tokenizer: the model's, for stop strings.
        device: where the trained weights are, and the engine computes.
        timeout: seconds after which an engine that does not answer counts as dead.
        transport: how weights reach it.

    Raises:
        RolloutError: vLLM does not start; the cause in its log is in the message.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        tokenizer: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
        transport: Transport = "memory",
    ) -> None:
        self.num_steps = self.max_running = self.num_prefilled_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._tokenizer, self._timeout, self._transport = tokenizer, timeout, transport
        self._version = 0
        self._closed = self._paused = False
        self._asleep: set[str] = set()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._broadcast: WeightBroadcast | None = None
        self._engine: Any = None
        self._processes: list[Any] = []
        # Whoever asks vLLM to tell more wants to read it.
        self._log = EngineLog(hides_start=env.get("VLLM_LOGGING_LEVEL") not in ("DEBUG", "INFO"))
        self._watch = EngineWatch(self._log, timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm-client")
        self._thread.start()
        atexit.register(self.close)
        try:
            if self._device.type == "cpu" and is_alone(arguments):
                # Read on a CPU alone: else vLLM would start another process for the one worker.
                environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            self._start(with_executor(arguments), environment)
            self.call("install_sampler")
            self.cache_bytes: int = sum(self.call("measure_cache"))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> Sequence[Any]:
        """The engine's processes, as ``multiprocessing`` has them; tensor-parallel workers are children of these."""
        return self._processes

    @property
    def lives(self) -> bool:
        """Whether it can be used."""
        try:
            self._watch.check()
        except RolloutError:
            return False
        return True

    def run(
        self,
        requests: Sequence[Prepared],
        on_finished: Callable[[Finished], None],
        take_aborts: Callable[[], set[str]],
    ) -> None:
        """See `Core.run`."""
        self._watch.check()
        self._arrivals = queue.SimpleQueue()
        self.num_prefilled_tokens = 0
        self._steps.begin()
        running = {
            request.request_id: Running(Progress(request, self._tokenizer), cumulative=not request.stop)
            for request in requests
        }
        served = self._submit(self._serve_all(requests))
        aborts = []
        heartbeat = Heartbeat(self._watch, lambda: self._submit(self._engine.is_sleeping()), self._timeout)
        try:
            while running:
                if named := take_aborts() & running.keys():
                    aborts.append(self._submit(self._abort(named)))
                try:
                    arrival = self._arrivals.get(timeout=GLANCE_S)
                except queue.Empty:
                    self._watch.check()
                    heartbeat.check()
                    continue
                heartbeat.beat()
                request = running.get(arrival.request_id)
                if request is None:  # Answered: a stop string ended it, and the engine had not heard of that yet.
                    continue
                if arrival.error is not None:
                    raise self._watch.named(arrival.error)
                if arrival.mark is not None:
                    request.marks.append((arrival.version, arrival.mark))
                elif finished := request.take(arrival):
                    del running[arrival.request_id]
                    num_prompt_tokens = len(request.progress.prepared.prompt_ids)
                    self.num_prefilled_tokens += num_prompt_tokens - arrival.num_cached_tokens
                    if arrival.output.finish_reason is None:
                        aborts.append(self._submit(self._abort([arrival.request_id])))
                    on_finished(finished)
        finally:
            steps = self._steps
            self.num_steps, self.max_running = steps.num_steps, steps.max_running
            self.prefill_seconds, self.decode_seconds = steps.prefill_seconds, steps.decode_seconds
            if self._watch.dead is None:
                if running:
                    aborts.append(self._submit(self._abort(list(running))))
                # None may be on its way when the next requests come, which may have the same names.
                for abort in aborts:
                    self._wait(abort)
                self._wait(served)

    def call(self, method: str, *args: Any) -> list[Any]:
        """See `Core.call`."""
        result: list[Any] = self._wait(self._begin_call(method, *args))
        return result

    def send(self, stream: WeightStream, bucket_bytes: int, version: int = 0) -> None:
        """See `Core.send`. What runs stands still meanwhile, and keeps its tokens."""
        with self._updating(version):
            self._transfer(stream, bucket_bytes)

    def receive(self, address: Mapping[str, Any], first_rank: int, version: int) -> None:
        """See `Core.receive`. What runs stands still meanwhile, and keeps its tokens."""
        with self._updating(version):
            self.call("take_broadcast", dict(address), first_rank)

    def pause(self) -> None:
        """Stands still until `resume`: nothing is sampled, what runs keeps its tokens. A second call changes nothing."""
        if not self._paused:
            self._wait(self._submit(self._pause()))
            self._paused = True

    def resume(self) -> None:
        """Ends `pause`."""
        if self._paused:
            self._paused = False
            if not self._asleep:
                self._wait(self._submit(self._engine.resume_generation()))

    def sleep(self, level: int) -> None:
        """See `Core.sleep`; on a CPU vLLM has nothing to free. What runs keeps its tokens."""
        if self._device.type == "cuda" and not self._asleep:
            if self._tasks:
                self._wait(self._submit(self._pause()))
            self._wait(self._submit(self._engine.sleep(level, mode="keep")))
            self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `Core.wake_up`."""
        if self._asleep:
            waking = self._submit(self._engine.wake_up(None if tags is None else list(tags)))
            # vLLM resumes when it wakes up, that of 0.21 even where its cache sleeps on. The pause is on its way before that: an
            # engine makes no step between two calls that wait for it.
            pausing = self._submit(self._pause()) if self._paused else None
            self._wait(waking)
            self._asleep -= self._asleep if tags is None else set(tags)
            if pausing is not None:
                self._wait(pausing)

    def close(self) -> None:
        """See `Core.close`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._watch.dead = self._watch.dead or "it was closed"
        if self._broadcast is not None:
            self._broadcast.close()
        if self._engine is not None:
            self._loop.call_soon_threadsafe(self._engine.shutdown)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
        self._loop.call_soon_threadsafe(asyncio.ensure_future, self._end_tasks())
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        self._loop.stop()

    def _start(self, arguments: dict[str, Any], environment: Mapping[str, str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        with undisturbed(), launch_environment(environment), self._log:
            try:
                # vLLM itself watches the processes that it starts.
                self._engine = self._submit(start()).result()
            except Exception as error:
                raise start_failure(arguments["model"], error, self._log.lines()) from error
        self._steps = StepCounter(self._engine.output_processor)
        self._engine.output_processor.process_outputs = self._steps
        manager = self._engine.engine_core.resources.engine_manager
        self._processes = list(getattr(manager, "processes", ()))
        self._watch.begin(self._processes, lambda: self._engine.errored)
        self._num_workers = self._engine.vllm_config.parallel_config.world_size * max(1, len(self._processes))
        self._dtype: torch.dtype = self._engine.vllm_config.model_config.dtype

    def _transfer(self, stream: WeightStream, bucket_bytes: int) -> None:
        if self._transport == "memory":
            send_in_buckets(
                stream,
                bucket_bytes,
                dtype=self._dtype,
                device=self._device,
                take=lambda address, items: self._begin_call("take_bucket", address, items),
                release=lambda: self._begin_call("close_buckets"),
                wait=self._wait,
            )
            return
        if self._broadcast is None:
            self._broadcast = WeightBroadcast(self._num_workers, self._device, timeout_s=self._timeout)
        taken = self._begin_call("take_broadcast", self._broadcast.address, 1)

        def check() -> None:
            self._watch.check()
            if taken.done():
                self._wait(taken)  # It ended before its time: this raises why.

        self._broadcast.send(stream, bucket_bytes, dtype=self._dtype, check=check)
        self._wait(taken)

    async def _serve_all(self, requests: Sequence[Prepared]) -> None:
        tasks = {request.request_id: asyncio.create_task(self._serve(request, self._arrivals)) for request in requests}
        self._tasks = tasks
        try:
            await asyncio.gather(*tasks.values())
        finally:
            self._tasks = {}

    async def _serve(self, prepared: Prepared, arrivals: queue.SimpleQueue[Arrival]) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # Only a stop string needs each token as it comes; handing them over costs more than a small model's steps.
        kind = RequestOutputKind.DELTA if prepared.stop else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**prepared.params, output_kind=kind)
        name = prepared.request_id
        try:
            prompt, adapters = tokens_input(prepared.prompt_ids), lora_request() if prepared.with_adapters else None
            async for output in self._engine.generate(prompt, params, name, lora_request=adapters):
                cached = output.num_cached_tokens or 0
                arrivals.put(Arrival(name, self._version, output=output.outputs[0], num_cached_tokens=cached))
        except Exception as error:  # noqa: BLE001  Raised in the thread that waits for it.
            arrivals.put(Arrival(name, self._version, error=error))

    async def _abort(self, names: Collection[str]) -> None:
        known = self._engine.output_processor.external_req_ids
        for name in names:
            task = self._tasks.get(name)
            while task is not None and not task.done() and not known.get(name):
                await asyncio.sleep(0.001)  # vLLM ignores the abort of what is still on its way to it.
        await self._engine.abort(list(names))

    async def _pause(self) -> None:
        """The engine stands still, and all that it sampled has arrived, or is marked to be of this version."""
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        processor, core = self._engine.output_processor, self._engine.engine_core
        while not core.outputs_queue.empty():
            await asyncio.sleep(0)
        # vLLM takes a step's outputs in parts of 128 and lets others in between; then each request's task must run.
        for _ in range(4 + len(processor.request_states) // 128):
            await asyncio.sleep(0)
        for state in list(processor.request_states.values()):
            count = state.detokenizer.num_output_tokens()
            self._arrivals.put(Arrival(state.external_req_id, self._version, mark=count))

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        with self._standing_still():
            self.call("begin_update", version)
            yield
            self.call("end_update")
            # Sequences that are in the middle of their response are prefilled again, with the new weights.
            self._wait(self._submit(self._engine.reset_prefix_cache(reset_running_requests=True)))
            self._version = version

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        if not self._tasks or self._paused or self._asleep:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            if self._watch.dead is None:
                self.resume()

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        if self._loop.is_closed():
            coroutine.close()
            self._watch.check()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _begin_call(self, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        return self._submit(self._call_workers(method, args))

    async def _call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        client = self._engine.engine_core
        if len(client.core_engines) == 1:
            return list(await self._engine.collective_rpc(method, args=args))
        # Of data-parallel engines vLLM's own call asks all and returns what the first one says.
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
            for engine in client.core_engines
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    def _wait(self, future: concurrent.futures.Future[Any]) -> Any:
        return self._watch.wait(future)
