"""Training on responses that another run has kept: ``trainer.replay_rollouts``.

Everything behind the rollout is computed as ever, from the same numbers: with the same weights, data and settings a replayed run
is the run that it replays, to the last bit on a CPU. That makes a step that went wrong one that can be looked at again and again,
with another loss or another estimator, and without an engine.
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from burnish.config import ActorRolloutRefConfig, PPOTrainerConfig
from burnish.protocol import DataProto
from burnish.reward import RewardManager
from burnish.reward.result import RewardResult
from burnish.rollout import RolloutResponse, responses_to_dataproto
from burnish.trainer import rollout_store
from burnish.trainer.ppo.dumps import tokenizer_fingerprint
from burnish.trainer.ppo.scoring import score_for_training
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from burnish.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger("burnish.trainer")

_KEY = "trainer.replay_rollouts"


class RolloutReplay:
    """The rollout stage of a run that samples nothing.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        total_steps: the run's last step.

    Raises:
        ConfigError: the folder has no responses, only some of each step, those of another tokenizer, or not of all steps.
    """

    def __init__(self, config: PPOTrainerConfig, tokenizer: Any, total_steps: int) -> None:
        self.config = config
        self.folder = local_paths.expanded(str(config.trainer.replay_rollouts))
        self.takes_scores = config.trainer.replay_rewards == "stored"
        self._pad_token_id = tokenizer.pad_token_id
        self._check(tokenizer, total_steps)
        self._step: _Step | None = None

    def _check(self, tokenizer: Any, total_steps: int) -> None:
        asked = f"{_KEY}={self.folder}"
        steps = [
            step for step in rollout_store.steps(self.folder) if rollout_store.tokens_path(self.folder, step).is_file()
        ]
        if not steps:
            raise ConfigError(
                f"{asked}: there are no responses in this folder (files 1.jsonl and 1.tokens.parquet). A run writes them with "
                f"trainer.rollout_data_dir."
            )
        if steps[-1] < total_steps:
            raise ConfigError(
                f"{asked}: the responses end at step {steps[-1]}, and the run at step {total_steps}. Set "
                f"trainer.total_training_steps={steps[-1]}."
            )
        if missing := sorted(set(range(steps[0], total_steps + 1)) - set(steps)):
            raise ConfigError(f"{asked}: there are no responses of step {missing[0]}.")
        notes = rollout_store.read_notes(self.folder, steps[0])
        if not notes.get("complete"):
            raise ConfigError(
                f"{asked}: these are samples of a run (trainer.sample_rollouts), a few responses of each step. Name a folder "
                f"that was written with trainer.rollout_data_dir."
            )
        ours, theirs = tokenizer_fingerprint(tokenizer), notes.get("tokenizer")
        if theirs != ours:
            raise ConfigError(
                f"{asked}: the responses were sampled with another tokenizer (its fingerprint is {theirs}, this one's {ours}): "
                f"their tokens would be others here. Use the model, or the tokenizer, of that run."
            )

    def stand_in(self, trainer: "RayPPOTrainer", batch: DataProto) -> DataProto:
        """The rollout stage of ``trainer``, with the reward model's scores where responses are scored anew."""
        batch = self.respond(batch, trainer.global_steps)
        trainer.num_gen_tokens += int(batch.tensors["response_mask"].count_nonzero())
        return batch if self.takes_scores else trainer._score_by_model(batch)

    def respond(self, batch: DataProto, step: int) -> DataProto:
        """Adds to a batch of prompts what the rollout adds, of the responses that were sampled in that step.

        Raises:
            DataError: the step has no response to one of these rows, or had another prompt there.
        """
        if self._step is None or self._step.number != step:
            self._tell_unused()
            self._step = _Step(self.folder, step)
        stored = self._step.rows_of(batch)
        self._step.round_rows = stored
        rows = [self._step.tokens[row] for row in stored]
        _check_prompts(batch, rows, self._step)
        prompts = batch.select(batch_keys=["input_ids", "attention_mask", "position_ids"])
        batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
        generated = responses_to_dataproto(
            prompts, self._responses(batch, rows, stored), pad_token_id=self._pad_token_id
        )
        generated.tensors["response_mask"] = _padded(
            [row["response_mask"] for row in rows], generated.tensors["responses"].shape[1], torch.bool
        )
        batch = batch.union(generated)
        if rows[0]["reward_baseline"] is not None:
            batch.tensors["reward_baselines"] = torch.tensor([row["reward_baseline"] for row in rows])
        return batch

    def _responses(
        self, batch: DataProto, rows: Sequence[dict[str, Any]], stored: Sequence[int]
    ) -> list[RolloutResponse]:
        assert self._step is not None
        uids, indices = batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample_index"]
        return [
            RolloutResponse(
                request_id=f"{number}:{uid}:{index}",
                token_ids=row["response_ids"].tolist(),
                log_probs=row["rollout_log_probs"].tolist(),
                finish_reason=self._step.texts[place]["finish_reason"],
                policy_version=row["policy_version"],
                policy_versions=((row["last_policy_version"], len(row["response_ids"])),),
                truncated_log_probs=None if row["truncated_log_probs"] is None else row["truncated_log_probs"].tolist(),
                num_preemptions=row["num_preemptions"],
            )
            for number, (row, place, uid, index) in enumerate(zip(rows, stored, uids, indices, strict=True))
        ]

    def score(
        self, reward_fn: RewardManager, batch: DataProto, config: PPOTrainerConfig
    ) -> tuple[DataProto, dict[str, float]]:
        """As `burnish.trainer.ppo.scoring.score_for_training`, with the scores that the responses got when they were sampled,
        where those are asked for.

        Args:
            batch: what `respond` gave last.
        """
        if not self.takes_scores:
            return score_for_training(reward_fn, batch, config)
        assert self._step is not None
        batch, metrics = score_for_training(self._stored_scores, batch, config)
        return batch, self._step.next_round_metrics(metrics)

    def _stored_scores(self, data: DataProto) -> RewardResult:
        assert self._step is not None
        places = self._step.round_rows
        rows = [self._step.tokens[place] for place in places]
        width = data.tensors["responses"].shape[1]
        extras = {
            name: np.array(
                [*(self._step.texts[place].get(rollout_store.extra_field(name)) for place in places), None], object
            )[:-1]
            for name in self._step.notes.get("extras", [])
        }
        return RewardResult(
            token_level_scores=_padded([row["token_level_scores"] for row in rows], width, torch.float32),
            valid=torch.tensor([row["valid"] for row in rows]),
            extras={name: values for name, values in extras.items() if any(value is not None for value in values)},
        )

    def _tell_unused(self) -> None:
        if self._step is not None and (num_unused := len(self._step.tokens) - len(self._step.used)):
            logger.warning(
                "%d of the %d responses that are kept of step %d were not used: this run has fewer prompts or samples.",
                *(num_unused, len(self._step.tokens), self._step.number),
            )


def make_replay(config: PPOTrainerConfig, tokenizer: Any, total_steps: int) -> RolloutReplay | None:
    """What ``trainer.replay_rollouts`` asks for; None where responses are sampled."""
    return None if config.trainer.replay_rollouts is None else RolloutReplay(config, tokenizer, total_steps)


def without_engine(config: ActorRolloutRefConfig) -> ActorRolloutRefConfig:
    """The policy's section with an engine that does nothing."""
    config = copy.deepcopy(config)
    config.rollout.name = "burnish.rollout.idle:IdleRollout"
    config.rollout.mode = "async"
    config.rollout.tensor_model_parallel_size = config.rollout.data_parallel_size = 1
    return config


class _Step:
    """What a folder has of one step."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.path = rollout_store.tokens_path(folder, number)
        self.tokens = rollout_store.read_tokens(folder, number)
        self.texts = rollout_store.read_texts(folder, number)
        self.notes = rollout_store.read_notes(folder, number)
        if not self.tokens:
            raise DataError(f"{_KEY}: {self.path} is missing: there are no responses of step {number}.")
        if len(self.tokens) != len(self.texts):
            raise DataError(
                f"{_KEY}: {self.path} has {len(self.tokens)} responses, and {rollout_store.texts_path(folder, number)} has "
                f"{len(self.texts)}: they do not belong together."
            )
        self._places = {(row["uid"], row["sample_index"]): place for place, row in enumerate(self.tokens)}
        self._num_rounds = 0
        self.used: set[int] = set()
        self.round_rows: list[int] = []

    def rows_of(self, batch: DataProto) -> list[int]:
        """Where the responses to the rows of ``batch`` are."""
        others = batch.non_tensor_batch
        keys = [(str(uid), int(index)) for uid, index in zip(others["uid"], others["sample_index"], strict=True)]
        for uid, index in keys:
            if (uid, index) not in self._places:
                raise DataError(
                    f"{_KEY}: {self.path} has no sample {index} of prompt {uid}, which step {self.number} draws; it begins with "
                    f"{self.tokens[0]['uid']}. The prompts come in another order, or are others: data.train_files, "
                    f"data.train_batch_size, data.seed, data.shuffle, trainer.seed and rollout.n have to be those of the run "
                    f"that is replayed."
                )
        places = [self._places[key] for key in keys]
        self.used.update(places)
        return places

    def next_round_metrics(self, computed: dict[str, float]) -> dict[str, float]:
        """What the reward manager has said of a round, where that was kept."""
        kept = self.notes.get("reward_metrics", [])
        metrics = kept[self._num_rounds] if self._num_rounds < len(kept) else computed
        self._num_rounds += 1
        return dict(metrics)


def _check_prompts(batch: DataProto, rows: Sequence[dict[str, Any]], step: _Step) -> None:
    ids, masks = batch.tensors["input_ids"].numpy(), batch.tensors["attention_mask"].bool().numpy()
    for place, row in enumerate(rows):
        ours, theirs = ids[place][masks[place]], row["prompt_ids"]
        if not np.array_equal(ours, theirs):
            same = min(len(ours), len(theirs))
            differing = np.flatnonzero(ours[:same] != theirs[:same])
            first = int(differing[0]) if len(differing) else same
            raise DataError(
                f"{_KEY}: prompt {row['uid']} of step {step.number} has {len(ours)} tokens, and {len(theirs)} in {step.path}; "
                f"they differ from token {first} on. Another row of the data, chat template or data.max_prompt_length: its "
                f"responses would answer another question."
            )


def _padded(rows: Sequence[np.ndarray], width: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows' values, and zeros behind them, [batch, width]."""
    values = torch.zeros(len(rows), width, dtype=dtype)
    for number, row in enumerate(rows):
        values[number, : len(row)] = torch.from_numpy(np.array(row))
    return values
