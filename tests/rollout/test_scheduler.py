"""Slots: never more than there are, never shared, refilled at once, packed at the front."""

from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rollout.base import RolloutRequest
from burnish.rollout.native.scheduler import Scheduler


def request(name: int | str, prompt: tuple[int, ...] = (1,)) -> RolloutRequest:
    return RolloutRequest(str(name), prompt, "p", 0)


def test_requests_start_in_their_order_and_free_slots_go_to_the_next() -> None:
    scheduler = Scheduler([request(i, (i,)) for i in range(5)], num_slots=2, max_prefill_tokens=100)
    assert [(g.requests[0].request_id, g.slots) for g in scheduler.admit()] == [("0", [0]), ("1", [1])]
    assert scheduler.admit() == []
    assert [r.request_id for r in scheduler.release([0])] == ["0"]
    assert [(g.requests[0].request_id, g.slots) for g in scheduler.admit()] == [("2", [0])]


def test_equal_prompts_share_one_group_and_its_tokens_count_once() -> None:
    requests = [request(i, (7, 7, 7)) for i in range(4)] + [request(4, (8, 8, 8)), request(5, (9, 9, 9))]
    groups = Scheduler(requests, num_slots=10, max_prefill_tokens=6).admit()
    assert [(len(g.requests), g.slots) for g in groups] == [(4, [0, 1, 2, 3]), (1, [4])]


def test_a_prompt_longer_than_a_prefill_goes_alone() -> None:
    scheduler = Scheduler([request(0, (1,) * 9), request(1, (2,))], num_slots=4, max_prefill_tokens=5)
    assert [g.slots for g in scheduler.admit()] == [[0]]
    assert [g.slots for g in scheduler.admit()] == [[1]]


def test_abort_finds_running_slots_and_drops_the_waiting() -> None:
    scheduler = Scheduler([request(i, (i,)) for i in range(4)], num_slots=2, max_prefill_tokens=100)
    scheduler.admit()
    slots, dropped = scheduler.abort({"1", "3", "unknown"})
    assert slots == [1]
    assert [r.request_id for r in dropped] == ["3"]
    assert scheduler.num_running == 2
    assert scheduler.num_waiting == 1


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.integers(0, 4), max_size=30),
    num_slots=st.integers(1, 6),
    budget=st.integers(1, 10),
    choices=st.randoms(use_true_random=False),
)
def test_any_schedule_serves_every_request_once_and_never_shares_a_slot(prompts, num_slots, budget, choices) -> None:
    requests = [request(i, (prompt,) * (prompt + 1)) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(requests, num_slots, budget)
    content: dict[int, str] = {}  # What a cache would hold in each slot.
    served: list[str] = []
    while not scheduler.done:
        while groups := scheduler.admit():
            assert sum(len(g.prompt_ids) for g in groups) <= budget or len(groups) == 1
            for group in groups:
                assert all(tuple(r.prompt_ids) == tuple(group.prompt_ids) for r in group.requests)
                for slot, req in zip(group.slots, group.requests, strict=True):
                    content[slot] = req.request_id
        assert 0 < scheduler.num_running <= num_slots
        assert scheduler.num_running == num_slots or scheduler.num_waiting == 0
        moves = scheduler.compact()
        assert not {m.source for m in moves} & {m.target for m in moves}
        for move in moves:
            content[move.target] = content[move.source]
        running = range(scheduler.num_running)
        assert [scheduler.request_in(slot).request_id for slot in running] == [content[slot] for slot in running]
        ended = [slot for slot in running if choices.random() < 0.4]
        served += [r.request_id for r in scheduler.release(ended)]
    assert sorted(served) == sorted(r.request_id for r in requests)
