"""The sampler that burnish puts into vLLM, in a model runner that a test drives: vLLM need not be installed.

The runner here holds of a batch what vLLM's holds when it samples; what each row draws is compared with what it draws alone.
"""

import random
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.sampler import Draw, SamplingRows, draw, stream_key
from burnish.rollout.vllm.requests import prepare
from burnish.rollout.vllm.sampler import BurnishSampler, install
from burnish.utils.errors import RolloutError

VOCAB, MAX_ROWS, MAX_LENGTH = 29, 6, 40
PLAIN = SamplingParams(max_new_tokens=12, temperature=1.1, eos_token_ids=(3, 4), seed=7)
VARIANTS = (
    PLAIN,
    replace(PLAIN, temperature=0.0, top_k=3),
    replace(PLAIN, top_k=6, top_p=0.8),
    replace(PLAIN, min_p=0.2),
    replace(PLAIN, repetition_penalty=1.7),
    replace(PLAIN, do_sample=False, repetition_penalty=0.6, min_new_tokens=5),
    replace(PLAIN, min_new_tokens=8, eos_token_ids=tuple(range(10))),
)


class LogprobsTensors(NamedTuple):
    """As ``vllm.v1.outputs`` has it."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor


@pytest.fixture(autouse=True)
def vllm_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two types that the sampler gives back."""
    outputs = ModuleType("vllm.v1.outputs")
    outputs.SamplerOutput = SimpleNamespace  # type: ignore[attr-defined]
    outputs.LogprobsTensors = LogprobsTensors  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)


class Sequence:
    """One request and all its tokens, which an asynchronous runner does not know on the host."""

    def __init__(self, name: str, sampling: SamplingParams, prompt: list[int]) -> None:
        self.request, self.sampling, self.prompt = RolloutRequest(name, prompt, name), sampling, prompt
        self.sampled: list[int] = []
        self.num_computed = 0
        self.state = SimpleNamespace(
            req_id=name,
            sampling_params=SimpleNamespace(extra_args=prepare(self.request, sampling).params["extra_args"]),
        )

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.sampled]

    def logits(self, position: int) -> Tensor:
        """[vocab] behind ``position`` tokens: a function of what the sequence is and of where it is."""
        return 2 * torch.randn(
            VOCAB, generator=torch.Generator().manual_seed(hash((tuple(self.prompt), position)) % 2**32)
        )

    def expected(self) -> Draw:
        """What it draws next alone."""
        sampling, length = self.sampling, len(self.tokens)
        seen = torch.zeros(1, VOCAB, dtype=torch.bool)
        seen[0, self.tokens] = True
        greedy = sampling.greedy
        rows = SamplingRows(
            keys=torch.tensor([stream_key(sampling.seed, self.request.uid, 0)]),
            positions=torch.tensor([length]),
            temperature=torch.tensor([0.0 if greedy else sampling.temperature]),
            top_k=torch.tensor([0 if greedy else max(0, sampling.top_k)], dtype=torch.int32),
            top_p=torch.tensor([1.0 if greedy else sampling.top_p]),
            min_p=torch.tensor([0.0 if greedy else sampling.min_p]),
            repetition_penalty=torch.tensor([sampling.repetition_penalty]),
            stop_ids=torch.tensor([list(sampling.end_token_ids)], dtype=torch.int32),
            may_stop=torch.tensor([len(self.sampled) >= sampling.min_new_tokens]),
            seen=seen,
        )
        return draw(self.logits(length)[None], rows, truncates=sampling.truncates)


class Runner:
    """What `BurnishSampler` reads of vLLM's ``GPUModelRunner``.

    Args:
        is_async: the host learns of a sampled token only when its request joins the batch anew, as with asynchronous scheduling.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self.device = torch.device("cpu")
        self.speculative_config = None
        self.model_config = SimpleNamespace(logits_processors=None, dtype=torch.float32, get_hidden_size=lambda: 8)
        self.model = SimpleNamespace()
        self.sampler: Any = SimpleNamespace(logprobs_mode="raw_logprobs")
        self.requests: dict[str, Any] = {}
        self.rows: list[Sequence] = []
        self.seq_lens = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self.discard_request_mask = SimpleNamespace(gpu=torch.zeros(MAX_ROWS, dtype=torch.bool))
        names = ("num_prompt_tokens", "num_tokens_no_spec", "num_computed_tokens_cpu")
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_reqs=0,
            sampling_metadata=None,
            token_ids_cpu=np.zeros((MAX_ROWS, MAX_LENGTH), np.int32),
            **{name: np.zeros(MAX_ROWS, np.int32) for name in names},
        )

    def set_rows(self, rows: list[Sequence], removed: tuple[Sequence, ...] = ()) -> None:
        """Makes these the batch. Rows that were not in the last one, or ``removed`` since, have all their tokens on the host."""
        if not removed and [id(row) for row in rows] == [id(row) for row in self.rows]:
            return
        batch, gone = self.input_batch, set(map(id, removed))
        before = {id(row): number for number, row in enumerate(self.rows) if id(row) not in gone}
        host = batch.token_ids_cpu.copy()
        for number, row in enumerate(rows):
            if id(row) in before:
                host[number] = batch.token_ids_cpu[before[id(row)]]
            else:
                host[number, : len(row.tokens)] = row.tokens
            batch.num_prompt_tokens[number] = len(row.prompt)
        batch.token_ids_cpu = host
        self.rows, self.requests = list(rows), {**self.requests, **{row.request.request_id: row.state for row in rows}}
        batch.req_ids, batch.num_reqs = [row.request.request_id for row in rows], len(rows)
        batch.sampling_metadata = SimpleNamespace(max_num_logprobs=max(row.sampling.truncates for row in rows))

    def step(self, num_scheduled: list[int]) -> list[tuple[Sequence, int, list[float]]]:
        """One pass over the batch; the sequences that got a token, the token, and its log-probs."""
        batch, count = self.input_batch, len(self.rows)
        lengths = [len(row.tokens) for row in self.rows]
        batch.num_tokens_no_spec[:count] = lengths
        batch.num_computed_tokens_cpu[:count] = [row.num_computed for row in self.rows]
        reached = [row.num_computed + more for row, more in zip(self.rows, num_scheduled, strict=True)]
        self.seq_lens[:count] = torch.tensor(reached, dtype=torch.int32)
        self.discard_request_mask.gpu[:count] = torch.tensor(
            [at < all_ for at, all_ in zip(reached, lengths, strict=True)]
        )
        logits = torch.stack([row.logits(at) for row, at in zip(self.rows, reached, strict=True)])
        output = self.sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
        got = []
        for number, row in enumerate(self.rows):
            row.num_computed = reached[number]
            if reached[number] == lengths[number]:
                token = int(output.sampled_token_ids[number, 0])
                batch.token_ids_cpu[number, lengths[number]] = -1 if self.is_async else token
                got.append((row, token, output.logprobs_tensors.logprobs[number].tolist()))
        return got


def sequence(number: int, sampling: SamplingParams, rng: random.Random) -> Sequence:
    return Sequence(f"request {number}", sampling, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))])


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(3))
def test_each_row_draws_what_it_draws_alone_while_rows_join_leave_move_wait_and_start_again(
    seed: int, is_async: bool
) -> None:
    rng = random.Random(seed)
    runner = Runner(is_async=is_async)
    install(runner)
    waiting = [sequence(number, rng.choice(VARIANTS), rng) for number in range(25)]
    num_drawn = num_restarts = 0
    while waiting or any(len(row.sampled) < row.sampling.max_new_tokens for row in runner.rows):
        rows = [row for row in runner.rows if len(row.sampled) < row.sampling.max_new_tokens]
        for row in runner.rows:
            if row not in rows:
                runner.requests.pop(row.request.request_id, None)
        removed = []
        if len(rows) > 1 and rng.random() < 0.15:  # Preempted: its cache is gone.
            removed.append(rows.pop(rng.randrange(len(rows))))
            removed[0].num_computed = 0
            num_restarts += 1
        if len(rows) > 1 and rng.random() < 0.1:  # Not scheduled for a while.
            removed.append(rows.pop(rng.randrange(len(rows))))
        waiting[:0] = removed
        if rng.random() < 0.2:
            rng.shuffle(rows)
        while waiting and len(rows) < MAX_ROWS and rng.random() < 0.6:
            rows.append(waiting.pop(0))
        if not rows:
            continue
        runner.set_rows(rows, tuple(removed))
        todo = [len(row.tokens) - row.num_computed for row in rows]
        for row, token, log_probs in runner.step([rng.randrange(1, left + 1) for left in todo]):
            expected = row.expected()
            assert token == expected.tokens.item()
            torch.testing.assert_close(log_probs[0], expected.log_probs.item())
            if row.sampling.truncates:
                assert expected.truncated_log_probs is not None
                torch.testing.assert_close(log_probs[1], expected.truncated_log_probs.item())
            row.sampled.append(token)
            num_drawn += 1
    assert num_drawn == 25 * PLAIN.max_new_tokens
    assert num_restarts > 3


def test_a_request_whose_id_was_used_before_draws_as_its_own_parameters_say() -> None:
    runner, rng = Runner(), random.Random(0)
    install(runner)
    first = sequence(0, replace(PLAIN, repetition_penalty=1.9), rng)
    runner.set_rows([first])
    runner.step([len(first.prompt)])
    second = Sequence(first.request.request_id, replace(VARIANTS[4], seed=99), [1])
    runner.set_rows([second])
    [(_, token, _)] = runner.step([1])
    assert token == second.expected().tokens.item()


def test_tokens_that_the_engine_took_back_are_not_penalised() -> None:
    runner, rng = Runner(is_async=True), random.Random(1)
    install(runner)
    row, other = sequence(0, replace(PLAIN, repetition_penalty=4.0, temperature=0.0), rng), sequence(1, PLAIN, rng)
    runner.set_rows([row])
    runner.step([len(row.prompt)])  # This token never reaches the host: a reset of the cache drops it.
    row.num_computed = 0
    runner.set_rows([other, row], removed=(row,))
    got = runner.step([1, len(row.prompt)])
    assert {row_: token for row_, token, _ in got}[row] == row.expected().tokens.item()


def test_rows_are_looked_at_only_when_the_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, rng = Runner(), random.Random(2)
    install(runner)
    looks: list[int] = []
    follow = BurnishSampler._follow_batch
    monkeypatch.setattr(BurnishSampler, "_follow_batch", lambda self, vocab: (looks.append(1), follow(self, vocab))[1])
    rows = [sequence(number, PLAIN, rng) for number in range(3)]
    runner.set_rows(rows)
    for _ in range(4):
        for row, token, _ in runner.step([len(row.tokens) - row.num_computed for row in rows]):
            row.sampled.append(token)
    assert len(looks) == 1
    runner.set_rows(rows[1:])
    runner.step([1, 1])
    assert len(looks) == 2


def test_memory_for_seen_tokens_is_held_only_while_a_row_has_a_penalty() -> None:
    runner, rng = Runner(), random.Random(3)
    install(runner)
    plain, penalised = sequence(0, PLAIN, rng), sequence(1, VARIANTS[4], rng)
    sizes = []
    for rows in ([plain], [plain, penalised], [plain]):
        runner.set_rows(rows)
        runner.step([len(row.tokens) - row.num_computed or 1 for row in rows])
        seen = runner.sampler._seen.tokens
        sizes.append(None if seen is None else tuple(seen.shape))
    assert sizes == [None, (2, VOCAB), None]


def test_forgotten_requests_give_their_slots_back() -> None:
    runner, rng = Runner(), random.Random(4)
    install(runner)
    for number in range(300):
        row = sequence(number, PLAIN, rng)
        runner.requests.clear()
        runner.set_rows([row])
        runner.step([len(row.prompt)])
    assert len(runner.sampler._table.truncates) == 64


def test_more_stop_tokens_than_rows_had_room_for() -> None:
    runner, rng = Runner(), random.Random(5)
    install(runner)
    few, many = (
        sequence(0, VARIANTS[5], rng),
        sequence(1, replace(VARIANTS[6], eos_token_ids=tuple(range(VOCAB - 1))), rng),
    )
    for rows in ([few], [few, many]):
        runner.set_rows(rows)
        for row, token, _ in runner.step([len(row.tokens) - row.num_computed for row in rows]):
            assert token == row.expected().tokens.item()
            row.sampled.append(token)
    assert many.sampled == [VOCAB - 1]


def test_the_second_log_prob_is_under_another_id_than_the_drawn_token() -> None:
    runner, rng = Runner(), random.Random(6)
    install(runner)
    rows = [sequence(number, replace(PLAIN, top_k=5), rng) for number in range(6)]
    rows[0] = Sequence("zero", replace(PLAIN, min_new_tokens=1, eos_token_ids=tuple(range(1, VOCAB))), [5])
    runner.set_rows(rows)
    output = runner.sampler(
        logits=torch.stack([row.logits(1) for row in rows]), sampling_metadata=runner.input_batch.sampling_metadata
    )
    ids = output.logprobs_tensors.logprob_token_ids
    assert output.sampled_token_ids[0, 0] == 0
    assert (ids[:, 0] == output.sampled_token_ids[:, 0]).all()
    assert (ids[:, 0] != ids[:, 1]).all()


def test_log_probs_that_nobody_asked_for_are_not_given() -> None:
    runner, rng = Runner(), random.Random(7)
    install(runner)
    row = sequence(0, PLAIN, rng)
    runner.set_rows([row])
    runner.input_batch.sampling_metadata.max_num_logprobs = None
    output = runner.sampler(logits=row.logits(1)[None], sampling_metadata=runner.input_batch.sampling_metadata)
    assert output.logprobs_tensors is None


def test_a_warm_up_goes_to_the_sampler_of_vllm() -> None:
    runner = Runner()
    runner.sampler = lambda logits, sampling_metadata: ("vllm", logits)
    install(runner)
    assert runner.sampler(logits=1, sampling_metadata=object()) == ("vllm", 1)


def test_installing_twice_is_installing_once() -> None:
    runner = Runner()
    install(runner)
    sampler = runner.sampler
    install(runner)
    assert runner.sampler is sampler
    assert sampler.logprobs_mode == "raw_logprobs"


def test_a_request_that_burnish_did_not_make_is_refused_by_name() -> None:
    runner = Runner()
    install(runner)
    row = sequence(0, PLAIN, random.Random(0))
    row.state.sampling_params.extra_args = None
    runner.set_rows([row])
    with pytest.raises(RolloutError, match=r"'request 0' came to the engine without extra_args\['burnish'\]"):
        runner.step([1])


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("speculative_config", object(), "speculative_config"),
        ("model_config", SimpleNamespace(logits_processors=["mine"]), "logits_processors"),
    ],
)
def test_options_that_would_decide_instead_are_refused(attribute: str, value: Any, message: str) -> None:
    runner = Runner()
    setattr(runner, attribute, value)
    with pytest.raises(RolloutError, match=message):
        install(runner)


def test_another_model_runner_is_refused_with_the_way_out() -> None:
    runner = Runner()
    del runner.discard_request_mask
    with pytest.raises(RolloutError, match=r"has no discard_request_mask.*VLLM_USE_V2_MODEL_RUNNER=0"):
        install(runner)
