"""GRPO (arXiv:2402.03300) in one file: the stages of burnish's trainer, one after the other, in one process.

    python examples/minimal/grpo_loop.py --steps 20

Each step samples `n` responses to each prompt, scores them, compares each with the others of its prompt, and makes the
better ones more likely. What is left out here (many processes, several updates per batch, a reference policy, a critic,
resuming) is in `burnish.trainer`, whose stages have these names and pass on the same `DataProto`.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from burnish.config import DataConfig, FSDPActorConfig, RolloutConfig
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.policy_losses import get_policy_loss_fn
from burnish.data import RLHFDataset, collate_fn, create_dataloader
from burnish.model.load import eos_token_ids, load_causal_lm
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule
from burnish.protocol import DataProto
from burnish.render import load_tokenizer
from burnish.reward import NaiveRewardManager
from burnish.rollout.base import SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.to_batch import requests_from_dataproto, responses_to_dataproto

TINY_MODEL = Path(__file__).parents[1] / "tiny_model"


@dataclass(kw_only=True)
class Settings:
    """What a run is told; the defaults suit the tiny model on a CPU."""

    model: str = str(TINY_MODEL / "model")
    train_file: str = str(TINY_MODEL / "data" / "train.jsonl")
    test_file: str = str(TINY_MODEL / "data" / "test.jsonl")
    steps: int = 20
    num_prompts: int = 64
    """Prompts of one step."""
    n: int = 8
    """Responses sampled to each prompt."""
    num_test: int = 256
    """Held-out prompts that accuracy is measured on."""
    max_response_length: int = 8
    temperature: float = 1.0
    lr: float = 3e-4
    clip_grad: float = 1.0
    seed: int = 0


class GRPO:
    """Policy, rollout, reward and data of one run; a method per stage."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.model)
        model = load_causal_lm(settings.model, torch.float32)
        self.policy = PolicyModule(model)
        # The rollout decodes with the very tensors that the optimizer changes: there are no weights to send.
        self.rollout = NativeRollout(model, RolloutConfig(max_num_seqs=512), shares_storage=True)
        self.reward = NaiveRewardManager(self.tokenizer)
        self.actor_config = FSDPActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2)
        self.policy_loss = get_policy_loss_fn("vanilla")
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=settings.lr, weight_decay=0.0)
        self.eos = eos_token_ids(model, self.tokenizer)

    def dataloader(self, file: str, batch_size: int, *, shuffle: bool, max_samples: int = -1) -> StatefulDataLoader:
        """Batches of rendered, left-padded prompts."""
        dataset = RLHFDataset(file, self.tokenizer, DataConfig(), max_samples=max_samples)
        return create_dataloader(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=self.settings.seed,
            drop_last=shuffle,
            collate_fn=partial(collate_fn, pad_token_id=self.tokenizer.pad_token_id),
        )

    def generate(self, prompts: DataProto, n: int, temperature: float) -> DataProto:
        """Rollout: `n` responses to each prompt, with the log-probs they were sampled with."""
        sampling = SamplingParams(
            max_new_tokens=self.settings.max_response_length,
            temperature=temperature,
            eos_token_ids=self.eos,
            seed=self.settings.seed,
        )
        rows = prompts.repeat(n, interleave=True)
        rows.non_tensor_batch["sample_index"] = np.tile(np.arange(n), len(prompts)).astype(object)
        responses = self.rollout.generate(requests_from_dataproto(rows), sampling)
        generated = responses_to_dataproto(rows, responses, self.tokenizer.pad_token_id)
        rows.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
        return rows.union(generated)

    def score(self, batch: DataProto) -> torch.Tensor:
        """Reward: adds scores, on the last token of each response; returns the score of each row [batch]."""
        result = self.reward(batch)
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = result.token_level_scores
        batch.batch["valid"] = result.valid
        return result.token_level_scores.sum(-1)

    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on the whole batch; the policy sampled it itself, so old log-probs are the present ones."""
        tensors = batch.batch
        packed = pack(tensors["input_ids"], tensors["attention_mask"], tensors["response_mask"])
        outputs = self.policy(packed, self.settings.temperature, ("log_probs", "entropy"))
        log_probs, mask = outputs["log_probs"], tensors["loss_mask"]
        if not mask.any():
            return {}
        loss, _ = self.policy_loss(
            log_probs.detach(), log_probs, tensors["advantages"], mask, "token-mean", self.actor_config
        )
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Rollout and training compute the same log-probs up to rounding: if not, the ratio above is not one.
        difference = (log_probs.detach() - tensors["rollout_log_probs"]).abs()[mask].max()
        return {
            "entropy": float(outputs["entropy"].detach()[mask].mean()),
            "grad_norm": float(grad_norm),
            "log_prob_difference_max": float(difference),
        }

    def step(self, prompts: DataProto) -> dict[str, float]:
        """One step of GRPO: rollout, reward, advantages, update."""
        batch = self.generate(prompts, self.settings.n, self.settings.temperature)
        scores = self.score(batch)
        # A response's advantage is how far it lies above its group, in standard deviations of the group.
        batch = compute_advantage(batch, "grpo", num_repeat=self.settings.n)
        metrics = self.update(batch)
        lengths = batch.batch["response_mask"].sum(-1).float()
        return {"reward": float(scores.mean()), "response_length": float(lengths.mean())} | metrics

    def accuracy(self) -> float:
        """Share of the held-out prompts that are answered right, greedily."""
        loader = self.dataloader(self.settings.test_file, 512, shuffle=False, max_samples=self.settings.num_test)
        batches = (self.generate(DataProto.from_single_dict(rows), n=1, temperature=0.0) for rows in loader)
        return float(torch.cat([self.score(batch) for batch in batches]).mean())

    def fit(self) -> dict[str, float]:
        """Train for the given number of steps; returns accuracy before and after."""
        start = time.perf_counter()
        before = self.accuracy()
        print(f"accuracy on held-out prompts: {before:.1%}")
        loader = self.dataloader(self.settings.train_file, self.settings.num_prompts, shuffle=True)
        step = epoch = 0
        while step < self.settings.steps:
            loader.sampler.set_epoch(epoch)
            for rows in loader:
                step_start = time.perf_counter()
                # The uid names the random stream of a response: another one each epoch.
                rows["uid"] = np.array([f"{epoch}:{uid}" for uid in rows["uid"]], dtype=object)
                metrics = self.step(DataProto.from_single_dict(rows))
                step += 1
                shown = "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())
                print(f"step {step:3d}  {shown}  {time.perf_counter() - step_start:.2f} s")
                if step == self.settings.steps:
                    break
            epoch += 1
        after = self.accuracy()
        print(f"accuracy on held-out prompts: {after:.1%}, after {time.perf_counter() - start:.0f} s")
        return {"accuracy_before": before, "accuracy_after": after}


def main() -> None:
    """Read the command line and train; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    print(json.dumps(GRPO(Settings(**vars(parser.parse_args()))).fit()))


if __name__ == "__main__":
    main()
