"""What vLLM's scheduler, as burnish's engines have it on a GPU, makes of responses that new weights interrupt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from burnish.rollout.vllm.scheduler import UpdatableScheduler

LENGTH = 8
BLOCK = 16


def make_scheduler(folder: Path) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    about = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "float32", **sizes}
    (folder / "config.json").write_text(json.dumps(about))
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=4,
            max_model_len=128,
            enable_chunked_prefill=True,
            async_scheduling=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = 100
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return UpdatableScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


class Engine:
    """vLLM's loop around a scheduler, a step ahead; its model's tokens are their places in their sequences."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.underway: list[tuple[Any, Any]] = []
        self.tokens: list[int] = []

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.underway.append((scheduled, self._execute(scheduled)))
            if len(self.underway) < 2 and scheduled.total_num_scheduled_tokens:
                return
        if self.underway:
            for outputs in self.scheduler.update_from_output(*self.underway.pop(0)).values():
                for output in outputs.outputs:
                    self.tokens += output.new_token_ids

    def _execute(self, scheduled: Any) -> ModelRunnerOutput:
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, sampled = list(scheduled.num_scheduled_tokens), []
        for name, count in scheduled.num_scheduled_tokens.items():
            end = starts[name] + count
            known = self.scheduler.requests[name].num_tokens if name in self.scheduler.requests else 0
            sampled.append([end] if end >= known else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: row for row, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


@pytest.mark.parametrize("stands_still", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 7])
def test_a_response_that_new_weights_interrupt_loses_no_token(
    tmp_path: Path, num_steps: int, stands_still: bool
) -> None:
    engine = Engine(make_scheduler(tmp_path))
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0)
    prompt = [1] * 6  # More than one batch takes.
    engine.scheduler.add_request(Request("r", prompt, params, None))
    for _ in range(num_steps):
        engine.step()
    if stands_still:
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while engine.underway or engine.scheduler.has_requests():
            engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(50):
        engine.step()
    assert engine.tokens == list(range(len(prompt), len(prompt) + LENGTH))
