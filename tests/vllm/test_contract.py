"""vLLM in this process holds the contract of every rollout engine, token for token as the native one draws them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="vLLM is not installed")

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.requests import prepare
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_same_responses, make_requests
from tests.rollout.sampling_contract import letter_tokenizer
from tests.vllm.in_process_engines import Engines
from tests.vllm.vllm_contract import VLLMContract


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


class TestInProcess(VLLMContract):
    @pytest.fixture(autouse=True)
    def _lend_engines(self, engines: Engines) -> None:
        self.engines = engines

    def native(self, requests: list[RolloutRequest], sampling: SamplingParams) -> list[RolloutResponse]:
        """What the native engine answers."""
        engine = NativeRollout(
            self.tiny(),
            RolloutConfig(max_num_seqs=8),
            shares_storage=True,
            device="cpu",
            tokenizer=letter_tokenizer(),
        )
        return engine.generate(requests, sampling)

    @pytest.mark.parametrize("way", ["sampled", "truncated", "greedy", "stop"])
    def test_it_answers_token_for_token_as_the_native_engine(self, way: str) -> None:
        sampling = {
            "sampled": replace(self.sampled, max_new_tokens=30),
            "truncated": replace(self.truncated, max_new_tokens=30),
            "greedy": SamplingParams(max_new_tokens=20, temperature=0.0, repetition_penalty=1.3),
            "stop": replace(self.sampled, max_new_tokens=30, temperature=1.5, stop=("ab", "c")),
        }[way]
        requests = make_requests(7, 4)
        mine, native = self.make_with_tokenizer().generate(requests, sampling), self.native(requests, sampling)
        assert_same_responses(mine, native)
        assert [r.stop_reason for r in mine] == [r.stop_reason for r in native]
        for a, b in zip(mine, native, strict=True):
            assert (a.truncated_log_probs is None) == (b.truncated_log_probs is None)
            truncated = torch.tensor([a.truncated_log_probs or [], b.truncated_log_probs or []])
            torch.testing.assert_close(truncated[0], truncated[1], atol=1e-5, rtol=0)

    def test_a_request_that_vllm_refuses_leaves_none_of_the_others_behind(self) -> None:
        core = self.make().core
        good, bad, later = (prepare(request, self.sampled) for request in make_requests(3, 1))
        with pytest.raises(RolloutError, match=rf"refuses request '{bad.request_id}': .*prompt"):
            core.run([good, replace(bad, prompt_ids=[])], lambda _: None, set)
        finished: list[str] = []
        core.run([later], lambda response: finished.append(response.request_id), set)
        assert finished == [later.request_id]

    def test_the_weights_of_the_folder_are_those_that_it_starts_with(self) -> None:
        """Before any update: the folder's model is that of ``tiny``."""
        responses = self.engines.unsent(max_num_seqs=11).generate(make_requests(), self.sampled)
        assert_same_responses(responses, self.make().generate(make_requests(), self.sampled))

    def test_prompts_longer_than_a_batch_are_taken_in_in_parts(self) -> None:
        requests = [RolloutRequest(f"long/{i}", [3 + (i * j) % 30 for j in range(40)], f"p{i}", 0) for i in range(4)]
        parts = self.make(max_num_seqs=2, max_num_batched_tokens=16).generate(requests, self.truncated)
        assert_same_responses(parts, self.native(requests, self.truncated))

    def test_sequences_that_lose_their_place_in_the_cache_come_to_the_same_tokens(self) -> None:
        # Five blocks of 32 tokens for eight sequences of up to 60.
        config = {"max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 6}
        engine = self.engines.rollout(self.tiny(), engine_kwargs=config, max_num_seqs=8)
        requests, sampling = make_requests(4, 2), replace(self.truncated, max_new_tokens=45, ignore_eos=True)
        responses = engine.generate(requests, sampling)
        assert sum(response.num_preemptions for response in responses) > 0
        assert engine.stats.num_preemptions == sum(response.num_preemptions for response in responses)
        assert_same_responses(responses, self.native(requests, sampling))

    def test_a_pause_lets_other_weights_in_and_every_token_keeps_its_version(self) -> None:
        engine, requests = self.make(), make_requests(4, 1)
        sampling = SamplingParams(max_new_tokens=12, temperature=1.3, seed=5)
        short = [
            replace(r, sampling=replace(sampling, max_new_tokens=4)) if i == 0 else r for i, r in enumerate(requests)
        ]
        other = self.tiny(seed=1)
        before = engine.generate(requests, sampling)

        def swap(response: RolloutResponse) -> None:
            if response.request_id == requests[0].request_id:
                engine.pause()
                engine_thread_update(engine, other)

        responses = engine.generate(short, sampling, swap)
        for response, old in zip(responses[1:], before[1:], strict=True):
            assert response.policy_version == 0
            assert response.policy_versions == ((0, 4), (9, 8))
            assert response.token_ids[:4] == old.token_ids[:4]
        # The rest is what the other policy goes on with.
        rest = [
            replace(r, prompt_ids=[*r.prompt_ids, *a.token_ids[:4]])
            for r, a in zip(requests[1:], responses[1:], strict=True)
        ]
        expected = self.make(other).generate(rest, replace(sampling, max_new_tokens=8))
        assert [r.token_ids[4:] for r in responses[1:]] == [r.token_ids for r in expected]


def engine_thread_update(engine: VLLMRollout, model: PreTrainedModel) -> None:
    """Another thread fills the engine while it is paused, and lets it go on."""
    import threading

    def update() -> None:
        engine.pause()  # Returns once the engine stands still.
        engine.update_weights(model.named_parameters(), version=9)
        engine.resume()

    threading.Thread(target=update).start()
