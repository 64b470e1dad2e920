"""burnish's side of a rollout benchmark: its engine on the weights of a training engine, and what bounds it."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from burnish.config import FSDPEngineConfig, HFModelConfig, RolloutConfig
from burnish.engine.fsdp import FSDPEngine
from burnish.protocol import DataProto
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout


class Native:
    """The native engine as a trainer makes it: it reads the parameters of the engine that trains.

    Attributes:
        start_seconds: of loading the model and making both engines.

    Args:
        memory: share of the GPU that weights and cache may take.
    """

    def __init__(
        self, model: str, dtype: str, device: str, *, max_num_seqs: int, max_model_len: int, memory: float
    ) -> None:
        begin = time.perf_counter()
        self.device = torch.device(device)
        self._path = model
        self.trainer = self._trainer(dtype)
        self.model: Any = self.trainer.module.model
        config = RolloutConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, gpu_memory_utilization=memory)
        self.engine = NativeRollout(self.model, config, shares_storage=True, device=device)
        self._cache_bytes = 0
        self.start_seconds = time.perf_counter() - begin

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def run(self, requests: Sequence[RolloutRequest], sampling: SamplingParams) -> tuple[float, list[RolloutResponse]]:
        """Seconds of one call of ``generate``, and its responses."""
        begin = time.perf_counter()
        responses = self.engine.generate(requests, sampling)
        seconds = time.perf_counter() - begin
        self._cache_bytes = max(self._cache_bytes, self.engine.stats.cache_bytes)
        return seconds, responses

    @property
    def weight_bytes(self) -> int:
        """Of all parameters, a tied pair once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * dim * self.model.dtype.itemsize)

    def forget_memory(self) -> None:
        """Begins to measure memory anew."""
        self._cache_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """GiB held at most since `forget_memory`, and against weights and cache; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        expected = self.weight_bytes + self._cache_bytes
        peak = torch.cuda.max_memory_allocated()
        return {
            "memory_peak_gib": peak / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "weights_gib": self.weight_bytes / 2**30,
            "cache_gib": self._cache_bytes / 2**30,
            "memory_over_weights_and_cache": peak / expected,
        }

    def floor_share(self, requests: Sequence[RolloutRequest], lengths: Sequence[int], bandwidth: float) -> float:
        """How close the last call's decoding came to reading, at ``bandwidth`` bytes/s, what its steps must read.

        In each step the weights once (an embedding that is not the head as well is only looked up), and of every running
        sequence the keys and values of its tokens so far. Samples of one prompt count their prompt each.
        """
        stats = self.engine.stats
        weights = self.weight_bytes
        if self.model.get_input_embeddings().weight is not self.model.get_output_embeddings().weight:
            weights -= self.model.get_input_embeddings().weight.nbytes
        tokens = sum(
            length * len(request.prompt_ids) + length * (length - 1) // 2
            for request, length in zip(requests, lengths, strict=True)
        )
        read = stats.num_steps * weights + tokens * self.cache_bytes_per_token
        return read / bandwidth / stats.decode_seconds

    def log_prob_differences(
        self, requests: Sequence[RolloutRequest], responses: Sequence[RolloutResponse], num_rows: int
    ) -> dict[str, float]:
        """Between the log-probs of the first responses and those of the trainer's packed forward on the same tokens.

        In bf16 also of both to the trainer's in float32, which says how much of it is rounding that no engine avoids.
        """
        rows = list(zip(requests, responses, strict=True))[:num_rows]
        width = max(len(response.token_ids) for _, response in rows)
        prompt = len(rows[0][0].prompt_ids)
        input_ids = torch.zeros(len(rows), prompt + width, dtype=torch.int64)
        log_probs = torch.zeros(len(rows), width)
        mask = torch.zeros(len(rows), prompt + width, dtype=torch.int64)
        for row, (request, response) in enumerate(rows):
            end = prompt + len(response.token_ids)
            input_ids[row, :end] = torch.tensor([*request.prompt_ids, *response.token_ids])
            log_probs[row, : end - prompt] = torch.tensor(response.log_probs)
            mask[row, :end] = 1
        batch = DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": mask,
                "responses": input_ids[:, prompt:],
                "response_mask": mask[:, prompt:].bool(),
            }
        )
        limit = max(8192 if self.device.type == "cuda" else 2048, prompt + width)
        valid = mask[:, prompt:].bool()

        def score(trainer: FSDPEngine) -> Tensor:
            return trainer.infer_batch(batch, max_token_len=limit)["log_probs"].cpu()[valid]

        scored = score(self.trainer)
        differences = (scored - log_probs[valid]).abs()
        figures = {
            "log_prob_max_difference": float(differences.max()),
            "log_prob_mean_difference": float(differences.mean()),
        }
        if self.trainer.dtype != torch.float32:
            exact = score(self._trainer("float32"))
            figures["log_prob_mean_difference_to_float32"] = float((exact - log_probs[valid]).abs().mean())
            figures["trainer_mean_difference_to_float32"] = float((exact - scored).abs().mean())
        return figures

    def _trainer(self, dtype: str) -> FSDPEngine:
        return FSDPEngine(HFModelConfig(path=self._path), FSDPEngineConfig(dtype=dtype), None, device=self.device)

    def profile(self, requests: Sequence[RolloutRequest], windows: int, path: Path) -> None:
        """Writes to ``path`` a table of what ``windows`` windows of decode steps of these requests spend their time on."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with self.engine.open_session() as session:
            session.add(requests)
            # Prefill and the first windows, with what they compile, stay outside.
            running = all(session.step() for _ in range(2))
            with profile(activities=activities) as profiler:
                begin = time.perf_counter()
                taken = 0
                while running and taken < windows:
                    running = session.step()
                    taken += 1
                seconds = time.perf_counter() - begin
            self.engine.abort()
            while session.step():
                pass
        head = f"{taken} windows of decode steps of {len(requests)} sequences in {seconds:.4f} s under the profiler"
        path.write_text("\n".join([head, *_busiest(profiler, self.device.type == "cuda", seconds)]) + "\n")


def _busiest(profiler: profile, on_gpu: bool, seconds: float) -> list[str]:
    """Kernels on a GPU, operators on a CPU, by the time they took themselves; first how much of ``seconds`` they cover."""
    taken: list[tuple[float, int, str]] = []
    for event in profiler.key_averages():
        # On a GPU the operators' own entries repeat the time of the kernels they launch.
        if not on_gpu:
            taken.append((event.self_cpu_time_total, event.count, event.key))
        elif event.device_type == DeviceType.CUDA:
            taken.append((event.self_device_time_total, event.count, event.key))
    total = sum(time for time, _, _ in taken) or 1.0
    lines = [
        f"{total / 1e6:.4f} s in what follows, {total / 1e6 / seconds:.0%} of the time",
        "     ms  share   calls  what",
    ]
    for time_us, calls, name in sorted(taken, reverse=True)[:60]:
        lines.append(f"{time_us / 1e3:9.3f} {time_us / total:6.1%} {calls:7}  {name[:110]}")
    return lines


def memory_bandwidth(device: str) -> float:
    """Bytes/s that copying (reading and writing) or summing 1 GiB (256 MiB on a CPU) reaches, the best of ten of each."""
    cuda = torch.device(device).type == "cuda"
    source = torch.ones((1 << 28) if cuda else (1 << 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    works: list[tuple[int, Callable[[], object]]] = [(2, partial(target.copy_, source)), (1, source.sum)]
    best = 0.0
    for passes, work in works:
        for _ in range(11):
            begin = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            best = max(best, passes * source.nbytes / (time.perf_counter() - begin))
    return best
