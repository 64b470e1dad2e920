"""The native engine in rare orders of events: what ends, comes, is aborted or trained while others decode."""

import dataclasses
import threading
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.paged_cache import SCRATCH_BLOCK
from burnish.rollout.native.rows import DecodeState, Rows
from burnish.rollout.native.scheduler import Sequence
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_same_responses, make_requests, tiny_llama
from tests.rollout.sampling_contract import letter_tokenizer

# The call's own parameters where each request brings some.
UNUSED = SamplingParams(max_new_tokens=1)


def make_engine(*, max_num_seqs: int = 6, tokenizer: Any = None, **engine: Any) -> NativeRollout:
    config = RolloutConfig(max_num_seqs=max_num_seqs)
    return NativeRollout(tiny_llama(), config, shares_storage=True, tokenizer=tokenizer, **engine)


def various_requests(choices: Random, number: int = 14) -> list[RolloutRequest]:
    """Few prompts, many lengths, and each response drawn and ended in its own way."""
    prompts = [[choices.randint(3, 39) for _ in range(choices.choice([1, 1, 2, 5, 9, 13]))] for _ in range(4)]
    requests = []
    for index in range(number):
        prompt, length = choices.randrange(4), choices.choice([1, 2, 5, 13, 24])
        sampling = SamplingParams(
            max_new_tokens=length,
            min_new_tokens=choices.choice([0, choices.randint(0, length)]),
            temperature=choices.choice([0.0, 1.0, 1.5]),
            top_k=choices.choice([-1, 5]),
            repetition_penalty=choices.choice([1.0, 1.0, 1.4]),
            eos_token_ids=choices.choice([(), (2, 7)]),
            stop_token_ids=choices.choice([(), (11,), tuple(range(20, 32))]),
            stop=choices.choice([(), (), ("ab", "<11>"), ("ba",)]),
            seed=choices.randint(0, 3),
        )
        requests.append(RolloutRequest(f"r{index}", prompts[prompt], f"p{prompt}", index, sampling))
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_a_row_that_has_ended_writes_into_no_block_of_another_one(seed: int) -> None:
    choices = Random(seed)
    requests = [
        RolloutRequest(
            str(index),
            [choices.randint(3, 39) for _ in range(choices.randint(1, 12))],
            f"p{index}",
            sampling=SamplingParams(max_new_tokens=choices.randint(1, 24), seed=1),
        )
        for index in range(14)
    ]
    expected = make_engine(max_num_seqs=5).generate(requests, UNUSED)
    # Long windows, so that rows are idle in them; small blocks, so that many end exactly at the end of a block.
    actual = make_engine(max_num_seqs=5, block_size=4, window=4).generate(requests, UNUSED)
    assert_same_responses(actual, expected)


def test_behind_its_blocks_a_row_has_the_scratch_block() -> None:
    rows, state = Rows(4, 5, 16), DecodeState(4, 4, 5, 8, torch.device("cpu"))
    state.block_tables.fill_(9)  # As earlier windows leave it.

    def append(blocks: list[int]) -> None:
        rows.append([Sequence(RolloutRequest(str(blocks), [5], "p"), UNUSED, blocks=blocks)])

    append([1, 2, 3, 4])
    rows.remove([0], 0)
    append([5, 6])
    append([7])
    rows.upload(state, 2)
    assert state.block_tables[:2, :3].tolist() == [[5, 6, SCRATCH_BLOCK], [7, SCRATCH_BLOCK, SCRATCH_BLOCK]]


@pytest.mark.parametrize("engine", [{}, {"block_size": 4, "num_blocks": 17, "window": 4}], ids=["plain", "scarce"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_else_runs_and_is_preempted_or_aborted_a_response_is_what_it_is_alone(
    engine: dict[str, Any], seed: int
) -> None:
    choices, tokenizer = Random(seed), letter_tokenizer()
    requests = various_requests(choices)
    alone = make_engine(tokenizer=tokenizer)
    expected = {r.request_id: alone.generate([r], UNUSED)[0] for r in requests}
    rollout = make_engine(tokenizer=tokenizer, **engine)
    finished: dict[str, RolloutResponse] = {}

    def finish(response: RolloutResponse) -> None:
        assert response.request_id not in finished
        finished[response.request_id] = response
        if choices.random() < 0.2:
            rollout.abort([choices.choice(requests).request_id])

    with rollout.open_session(on_finished=finish) as session:
        coming = list(requests)
        while coming or len(finished) < len(requests):
            count = choices.randint(0, 3)
            session.add(coming[:count])
            del coming[:count]
            session.step()
    for name, whole in expected.items():
        response, count = finished[name], len(finished[name].token_ids)
        if response.finish_reason != "abort":
            assert (response.finish_reason, response.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert count == len(whole.token_ids)
        as_long = dataclasses.replace(whole, token_ids=whole.token_ids[:count], log_probs=whole.log_probs[:count])
        assert_same_responses([response], [dataclasses.replace(as_long, finish_reason=response.finish_reason)])


def test_what_is_added_and_aborted_while_the_engine_is_paused_is_aborted() -> None:
    engine = make_engine()
    finished: dict[str, RolloutResponse] = {}
    late = RolloutRequest("late", [5, 6], "p", 1, SamplingParams(max_new_tokens=30))
    with engine.open_session(on_finished=lambda response: finished.update({response.request_id: response})) as session:
        session.add([RolloutRequest("first", [5, 6], "p", 0, SamplingParams(max_new_tokens=3))])
        session.step()

        def interfere() -> None:
            engine.pause()  # Returns when the step below stands still.
            session.add([late])
            engine.abort(["late"])
            engine.resume()

        engine.pause()
        thread = threading.Thread(target=interfere)
        thread.start()
        while session.step():
            pass
        thread.join()
    assert (finished["late"].finish_reason, finished["late"].token_ids) == ("abort", [])
    assert finished["first"].finish_reason == "length"


def test_an_abort_that_came_too_late_does_not_end_the_next_request_of_that_name() -> None:
    engine = make_engine()
    finished: list[RolloutResponse] = []
    request = RolloutRequest("a", [5, 6], "p", 0, SamplingParams(max_new_tokens=1))
    with engine.open_session(
        on_tokens=lambda *_: engine.abort(["a"]) if not finished else None, on_finished=finished.append
    ) as session:
        for _ in range(2):
            session.add([request])
            while session.step():
                pass
    assert [response.finish_reason for response in finished] == ["length", "length"]


def test_a_wait_for_resume_that_is_broken_off_leaves_the_engine_free() -> None:
    lifecycle = Lifecycle(shares_storage=True)

    def break_off() -> None:
        raise KeyboardInterrupt

    lifecycle.pause()
    lifecycle._go.wait = break_off  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt), lifecycle.generating():
        lifecycle.stand_still_while_paused()
    with lifecycle.exclusive("update_weights"):
        pass


def test_a_tokenizer_that_does_not_do_for_stop_strings_is_refused_when_they_are_asked_for() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    engine = make_engine(tokenizer=words)
    finished: list[RolloutResponse] = []
    request = RolloutRequest("a", [5, 6], "p", 0, SamplingParams(max_new_tokens=3))
    with engine.open_session(on_finished=finished.append) as session:
        session.add([request])
        session.step()
        with pytest.raises(RolloutError, match="has no decoder"):
            session.add([RolloutRequest("b", [5], "p", 1, SamplingParams(max_new_tokens=3, stop=("x",)))])
        while session.step():
            pass
    assert [response.request_id for response in finished] == ["a"]


def test_what_rows_have_seen_is_uploaded_only_while_one_has_a_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []
    upload = Rows._upload_seen

    def noted(rows: Rows, seen: torch.Tensor) -> None:
        uploads.append(len(rows))
        upload(rows, seen)

    monkeypatch.setattr(Rows, "_upload_seen", noted)
    engine, requests = make_engine(), make_requests()
    engine.generate(requests, SamplingParams(max_new_tokens=4, repetition_penalty=1.3))
    assert uploads
    uploads.clear()
    engine.generate(requests, SamplingParams(max_new_tokens=4))
    assert not uploads


def penalised(name: str, prompt: list[int], penalty: float = 1.3) -> Sequence:
    """A sequence with its block."""
    sampling = SamplingParams(max_new_tokens=50, repetition_penalty=penalty)
    return Sequence(RolloutRequest(name, prompt, name), sampling, blocks=[1])


@pytest.mark.parametrize("seed", range(5))
def test_what_is_noted_of_a_row_goes_with_it_wherever_it_goes(seed: int) -> None:
    choices, vocab, num_rows = Random(seed), 60, 6
    rows, state = Rows(num_rows, 1, 50), DecodeState(num_rows, 1, 1, 8, torch.device("cpu"))
    state.remember_seen(vocab)
    assert state.seen is not None
    number, tokens = 0, dict[Sequence, set[int]]()
    for _ in range(60):
        while len(rows) < num_rows and choices.random() < 0.6:
            new = [penalised(str(number), [choices.randrange(vocab)], choices.choice([1.0, 1.3]))]
            rows.append(new)
            tokens |= {one: set(one.prompt_ids) for one in new}
            number += 1
        if not len(rows):
            continue
        rows.reorder(choices.sample(range(len(rows)), len(rows)))
        rows.upload(state, num_rows)
        if rows.penalises:
            for row, sequence in enumerate(rows.sequences):
                if sequence.sampling.repetition_penalty != 1:
                    assert set(state.seen[row].nonzero().flatten().tolist()) == tokens[sequence]
        # A step of the device.
        drawn = [choices.randrange(vocab) for _ in rows.sequences]
        state.window_tokens[0, : len(rows)] = torch.tensor(drawn, dtype=torch.int32)
        for row, (sequence, token) in enumerate(zip(rows.sequences, drawn, strict=True)):
            tokens[sequence].add(token)
            state.seen[row, token] = True
        rows.read(state, 1, truncates=False)
        rows.remove(choices.sample(range(len(rows)), choices.randrange(0, min(3, len(rows)))), 0)


@pytest.mark.timeout(20)
def test_rows_with_a_penalty_come_and_go_without_noting_the_others_anew() -> None:
    num_rows, prompt = 128, list(range(1000)) * 20
    rows, state = Rows(num_rows, 1, 50), DecodeState(num_rows, 1, 1, 8, torch.device("cpu"))
    state.remember_seen(1000)
    rows.append([penalised(str(number), prompt) for number in range(num_rows)])
    for number in range(300):
        rows.upload(state, num_rows)
        rows.remove([number % num_rows], 0)
        rows.append([penalised(f"later {number}", prompt)])
    assert len(rows) == num_rows


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"Request '0/0' has 40 in stop_token_ids.* 40 rows"):
        make_engine().generate(make_requests(), SamplingParams(max_new_tokens=4, stop_token_ids=(5, 40)))
