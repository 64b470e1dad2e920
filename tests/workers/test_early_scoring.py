"""Rewards begin while generation runs, belong to their rows, and equal what is scored afterwards."""

from collections.abc import Hashable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config import RolloutConfig, usage
from burnish.config.reward import RewardConfig
from burnish.protocol import DataProto, object_array
from burnish.render import load_tokenizer
from burnish.reward import NaiveRewardManager
from burnish.reward.managers.base import OUTCOME_COLUMN
from burnish.reward.outcome import Outcome
from burnish.rollout import RolloutRequest, RolloutResponse, requests_from_dataproto
from burnish.single_controller import NUM_PADDING
from burnish.single_controller.sharding import split_rows
from burnish.workers import ActorRolloutRefWorker
from burnish.workers.early_scoring import EarlyScoring, shared_manager
from tests.workers.test_actor import prompts, worker_of


def score_by_text(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(len(solution_str)), "row": extra_info["row"], "truth": ground_truth}


class Watched:
    """A scorer that notes when it is told of a row, and scores when it is asked."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.rows = events, {}

    def submit(self, key: Hashable, row: dict[str, Any]) -> None:
        assert key not in self.rows
        self.events.append("submitted")
        self.rows[key] = row

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        return {key: Outcome(score_by_text(**self.rows.pop(key))) for key in keys}

    def close(self) -> None:
        pass


def manager_of(path: str, events: list[str]) -> NaiveRewardManager:
    manager = NaiveRewardManager(load_tokenizer(path), score_by_text, RewardConfig())
    manager._scorer = Watched(events)  # type: ignore[assignment]
    return manager


def columns(batch: DataProto) -> DataProto:
    batch.non_tensor_batch |= {
        "data_source": object_array(["mine"] * 3),
        "reward_model": object_array([{"ground_truth": str(row)} for row in range(3)]),
        "extra_info": object_array([{"row": row} for row in range(3)]),
    }
    return batch


@pytest.fixture
def worker(tiny_model_path: str) -> ActorRolloutRefWorker:
    return worker_of(tiny_model_path)


def test_scoring_begins_before_generation_ends(worker: ActorRolloutRefWorker, tiny_model_path: str) -> None:
    events: list[str] = []
    worker.reward_manager = manager_of(tiny_model_path, events)
    generate = worker.rollout.generate

    def one_after_the_other(requests: Any, sampling: Any, on_finished: Any = None) -> list[RolloutResponse]:
        responses = [generate([request], sampling, on_finished)[0] for request in requests]
        events.append("generated")
        return responses

    worker.rollout.generate = one_after_the_other
    worker.generate_sequences(columns(prompts()))
    assert events == ["submitted", "submitted", "submitted", "generated"]


def test_outcomes_belong_to_their_rows_and_equal_those_of_the_driver(
    worker: ActorRolloutRefWorker, tiny_model_path: str
) -> None:
    manager = manager_of(tiny_model_path, [])
    worker.reward_manager = manager
    batch = columns(prompts())
    asked = batch.pop(["input_ids", "attention_mask", "position_ids"])
    asked.non_tensor_batch = dict(batch.non_tensor_batch)
    batch = batch.union(worker.generate_sequences(asked))
    early = manager(batch)
    assert [outcome.value["row"] for outcome in batch.non_tensor_batch.pop(OUTCOME_COLUMN)] == [0, 1, 2]
    in_driver = NaiveRewardManager(load_tokenizer(tiny_model_path), score_by_text, RewardConfig(num_workers=0))(batch)
    assert early.token_level_scores.equal(in_driver.token_level_scores)
    assert {name: list(values) for name, values in early.extras.items()} == {
        name: list(values) for name, values in in_driver.extras.items()
    }


def test_rows_that_only_make_a_batch_divisible_are_not_scored(
    worker: ActorRolloutRefWorker, tiny_model_path: str
) -> None:
    events: list[str] = []
    worker.reward_manager = manager_of(tiny_model_path, events)
    shards = split_rows(columns(prompts()), 2)
    assert [shard.num_padding for shard in shards] == [0, 1]
    results = [worker.generate_sequences(shard) for shard in shards]
    assert events == ["submitted"] * 3
    assert [outcome.value["row"] for outcome in results[1].non_tensor_batch[OUTCOME_COLUMN]] == [2]
    assert NUM_PADDING not in results[1].meta_info


def test_a_manager_of_whole_batches_leaves_scoring_to_the_driver(
    worker: ActorRolloutRefWorker, tiny_model_path: str
) -> None:
    worker.reward_manager = manager_of(tiny_model_path, [])
    worker.reward_manager.scorer = lambda: None
    assert OUTCOME_COLUMN not in worker.generate_sequences(columns(prompts())).non_tensor_batch


def test_each_response_is_scored_once_even_where_the_engine_tells_of_it_twice_or_never(tiny_model_path: str) -> None:
    events: list[str] = []
    manager = manager_of(tiny_model_path, events)
    batch = columns(prompts())
    requests: list[RolloutRequest] = requests_from_dataproto(batch)
    scoring = EarlyScoring(manager, manager._scorer, batch, requests)  # type: ignore[arg-type]
    responses = [
        RolloutResponse(request.request_id, [7] * row, [0.0] * row, finish_reason="abort", policy_version=0)
        for row, request in enumerate(requests)
    ]
    scoring.submit(responses[2])
    scoring.submit(responses[2])
    outcomes, seconds = scoring.collect(responses)
    assert events == ["submitted"] * 3
    assert [outcome.value["truth"] for outcome in outcomes] == ["0", "1", "2"]
    # What was sampled of an aborted response is what is scored.
    assert outcomes[0].value["score"] == 0
    assert outcomes[2].value["score"] > 0
    assert seconds >= 0


def test_workers_share_the_processes_of_their_node(tiny_model_path: str) -> None:
    manager = NaiveRewardManager(load_tokenizer(tiny_model_path), score_by_text, RewardConfig(num_workers=8))
    mine = shared_manager(manager, per_node=4, in_all=8)
    assert (mine.config.num_workers, mine.num_sharing) == (2, 8)
    assert manager.config.num_workers == 8
    assert shared_manager(manager, per_node=1, in_all=1) is manager


def test_what_a_worker_reads_of_its_part_of_the_configuration_counts_as_read(tiny_model_path: str) -> None:
    manager = NaiveRewardManager(load_tokenizer(tiny_model_path), score_by_text, RewardConfig(num_workers=8))
    rank = SimpleNamespace(config=SimpleNamespace(rollout=RolloutConfig()), rank=0, world_size=2)
    mine = ActorRolloutRefWorker._own_manager(rank, manager, num_nodes=1)
    usage._reads.clear()
    assert mine.config.memory_limit_mb is None
    assert usage.reads() == {"reward.memory_limit_mb"}
