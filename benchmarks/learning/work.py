"""What burnish and a peer are both given to learn, and each setting in the words of either.

Every side's interpreter reads this file, so it imports nothing but Python's own.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NO_DUAL_CLIP = 1e9
"""Where PPO's second clip would begin (arXiv:1912.09729); TRL has none."""


@dataclass(frozen=True, kw_only=True)
class LearningWork:
    """A run of GRPO: the same prompts in the same order, as many updates, the same loss.

    Attributes:
        model: folder of the model that both begin with.
        train_file, val_file: JSONL rows, as burnish's ``data.train_files`` has them. The first holds exactly the prompts of all
            steps, in their order.
        reward: function as ``module:name``; called with ``solution_str`` and ``ground_truth`` (and what else it has).
        prompts, samples: of a step.
        updates: of a step; each takes ``prompts / updates`` prompts' worth of responses.
        prompt_length, response_length: tokens at most.
        steps: rollouts.
        lr: learning rate, constant from the first update on.
        kl: coefficient of the KL to the first model in the loss; 0: there is no reference.
        clip: PPO's, on both sides of 1.
        seed: of sampling. The order of the rows is that of ``train_file``.
        save_every: steps between the models that are measured.
        micro_batch_rows: rows of one forward pass of a peer, which pads them to the longest.
        device, dtype: where, and what is computed in; weights and moments are float32.
        engine_memory: share of the GPU's memory for whatever samples.
        peer_engine: what a peer samples with on a GPU: ``vllm``, or of TRL ``hf``, transformers' `generate`, as on a CPU.
        peer_settings: more of a peer's configuration, in its own words, that decides nothing of what is learnt.
    """

    model: str
    train_file: str
    val_file: str
    reward: str
    prompts: int
    samples: int
    updates: int = 1
    prompt_length: int
    response_length: int
    steps: int
    lr: float
    kl: float = 0.0
    clip: float = 0.2
    seed: int
    save_every: int
    micro_batch_rows: int
    device: str
    dtype: str
    engine_memory: float = 0.3
    peer_engine: str = "vllm"
    peer_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples

    @property
    def measured_steps(self) -> list[int]:
        """Steps whose models are measured, the last one always."""
        return sorted({*range(self.save_every, self.steps + 1, self.save_every), self.steps})

    def describe(self) -> str:
        """For people."""
        updates = "one update a step" if self.updates == 1 else f"{self.updates} updates a step"
        return (
            f"{self.steps} steps of {self.prompts} prompts x {self.samples} samples, at most {self.response_length} tokens, "
            f"{updates}, learning rate {self.lr:g}, KL coefficient {self.kl:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def check(self) -> None:
        """Both sides can do it: a step can be cut into updates and micro-batches of equal size.

        Raises:
            ValueError: not so.
        """
        if self.peer_engine not in ("vllm", "hf"):
            raise ValueError(f"A peer samples with vllm or hf, not with {self.peer_engine!r}.")
        if self.prompts % self.updates:
            raise ValueError(f"{self.prompts} prompts a step cannot be cut into {self.updates} updates of equal size.")
        rows = self.num_rows // self.updates
        if rows % self.micro_batch_rows:
            raise ValueError(
                f"An update of {rows} rows cannot be cut into micro-batches of {self.micro_batch_rows} rows; give a divisor."
            )


@dataclass(frozen=True)
class Setting:
    """One thing that both sides must do alike, and how it is said to each.

    Attributes:
        what: for people.
        burnish, trl, verl: configuration by key; empty where a side does so without being told.
        note: what remains different.
    """

    what: str
    burnish: dict[str, Any]
    trl: dict[str, Any]
    verl: dict[str, Any]
    note: str = ""


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def settings(work: LearningWork) -> list[Setting]:
    """Everything that decides what is learnt, but for files and folders."""
    accumulation = work.num_rows // work.updates // work.micro_batch_rows
    batch = {"data.train_batch_size": work.prompts, f"{_ROLLOUT}.n": work.samples}
    mini_batch = {f"{_ACTOR}.ppo_mini_batch_size": work.prompts // work.updates, f"{_ACTOR}.ppo_epochs": 1}
    lengths = {"data.max_prompt_length": work.prompt_length, "data.max_response_length": work.response_length}
    sampling = {f"{_ROLLOUT}.temperature": 1.0, f"{_ROLLOUT}.top_p": 1.0, f"{_ROLLOUT}.top_k": -1}
    advantage = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": True}
    clip = {
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_low": work.clip,
        f"{_ACTOR}.clip_ratio_high": work.clip,
        f"{_ACTOR}.clip_ratio_c": NO_DUAL_CLIP,
    }
    kl: dict[str, Any] = {"algorithm.use_kl_in_reward": False, f"{_ACTOR}.use_kl_loss": work.kl > 0}
    if work.kl > 0:
        kl |= {f"{_ACTOR}.kl_loss_coef": work.kl, f"{_ACTOR}.kl_loss_type": "low_var_kl"}
    optimizer = {
        f"{_ACTOR}.optim.optimizer": "AdamW",
        f"{_ACTOR}.optim.lr": work.lr,
        f"{_ACTOR}.optim.betas": [0.9, 0.999],
        f"{_ACTOR}.optim.weight_decay": 0.0,
    }
    schedule = {f"{_ACTOR}.optim.lr_scheduler_type": "constant", f"{_ACTOR}.optim.lr_warmup_steps": 0}
    steps = {"trainer.total_training_steps": work.steps, "trainer.total_epochs": 1}
    aggregation, entropy = {f"{_ACTOR}.loss_agg_mode": "token-mean"}, {f"{_ACTOR}.entropy_coeff": 0.0}
    bf16 = work.dtype == "bfloat16"
    return [
        Setting(
            "prompts of a step, responses to each",
            batch,
            {
                "num_generations": work.samples,
                "per_device_train_batch_size": work.micro_batch_rows,
                "gradient_accumulation_steps": accumulation,
                "steps_per_generation": accumulation * work.updates,
            },
            batch | {f"{_ACTOR}.ppo_micro_batch_size_per_gpu": work.micro_batch_rows},
        ),
        Setting(
            "updates of a step",
            mini_batch,
            {"num_iterations": 1},
            mini_batch,
            "TRL cuts its mini-batches from shuffled rows, burnish and verl from whole groups (several updates a step only)",
        ),
        Setting("steps", steps, {"max_steps": work.steps * work.updates}, steps),
        Setting(
            "order of the prompts",
            {"data.shuffle": False},
            {"shuffle_dataset": False},
            {"data.shuffle": False},
        ),
        Setting("lengths", lengths, {"max_completion_length": work.response_length}, lengths),
        Setting("sampling", sampling, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, sampling),
        Setting(
            "advantage: (score - mean of the group) / (standard deviation of the group + epsilon)",
            advantage,
            {"scale_rewards": "group"},
            advantage,
            "epsilon is 1e-6 in burnish and verl, 1e-4 in TRL",
        ),
        Setting(
            "loss: PPO's clip, no second one",
            clip,
            {"epsilon": work.clip, "epsilon_high": work.clip, "importance_sampling_level": "token"},
            clip | {f"{_ACTOR}.clip_ratio": work.clip},
        ),
        Setting("mean over all tokens of an update", aggregation, {"loss_type": "dapo"}, aggregation),
        Setting("truncated responses are trained on", {}, {"mask_truncated_completions": False}, {}),
        Setting("KL to the first model", kl, {"beta": work.kl, "use_bias_correction_kl": False}, kl),
        Setting("no entropy bonus", entropy, {"entropy_coef": 0.0}, entropy),
        Setting(
            "no correction for the rollout's rounding",
            {},
            {"vllm_importance_sampling_correction": False},
            {},
            "what a rollout engine rounds otherwise than the trainer is left uncorrected by all",
        ),
        Setting(
            "AdamW",
            optimizer,
            {
                "optim": "adamw_torch_fused" if work.device == "cuda" else "adamw_torch",
                "learning_rate": work.lr,
                "adam_beta1": 0.9,
                "adam_beta2": 0.999,
                "adam_epsilon": 1e-8,
                "weight_decay": 0.0,
            },
            optimizer,
        ),
        Setting(
            "constant learning rate, no warm-up",
            schedule,
            {"lr_scheduler_type": "constant", "warmup_steps": 0},
            schedule,
        ),
        Setting(
            "gradient norm",
            {f"{_ACTOR}.optim.clip_grad": 1.0},
            {"max_grad_norm": 1.0},
            {f"{_ACTOR}.optim.clip_grad": 1.0, f"{_ACTOR}.grad_clip": 1.0},
        ),
        Setting(
            "precision",
            {f"{_ACTOR}.fsdp_config.dtype": work.dtype},
            {"bf16": bf16, "gradient_checkpointing": False},
            {
                f"{_ACTOR}.fsdp_config.model_dtype": "fp32",
                f"{_ROLLOUT}.dtype": work.dtype,
                "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            },
            "weights and moments are float32; in bfloat16 TRL and verl cast by autocast and FSDP, burnish computes on a copy",
        ),
        Setting(
            "seed of sampling",
            {"trainer.seed": work.seed},
            {"seed": work.seed},
            {f"{_ROLLOUT}.seed": work.seed, "data.seed": work.seed},
            "the same seed draws other responses on each side",
        ),
    ]


def merged(work: LearningWork, side: str) -> dict[str, Any]:
    """All settings in the words of ``side``.

    Raises:
        ValueError: two settings say one key differently.
    """
    found: dict[str, Any] = {}
    said = [getattr(setting, side) for setting in settings(work)]
    if side != "burnish":
        said.append(work.peer_settings)
    for keys in said:
        for key, value in keys.items():
            if found.setdefault(key, value) != value:
                raise ValueError(f"{key} is {found[key]!r} and {value!r}.")
    return found


def words(values: dict[str, Any]) -> list[str]:
    """``key=value`` as Hydra reads it."""
    return [f"{key}={_word(value)}" for key, value in values.items()]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)


def map_table(work: LearningWork, sides: tuple[str, ...] = ("burnish", "trl", "verl")) -> str:
    """The settings as a table in Markdown: what, and the keys of each side."""

    def said(values: dict[str, Any]) -> str:
        shown = (f"`{key.removeprefix('actor_rollout_ref.')}={_word(value)}`" for key, value in values.items())
        return "<br>".join(shown) or "as it comes"

    names = {"burnish": "burnish", "trl": "TRL", "verl": "verl"}
    head = " | ".join(["what", *(names[side] for side in sides), "what remains different"])
    lines = [f"| {head} |", "|" + "---|" * (len(sides) + 2)]
    for setting in settings(work):
        cells = [setting.what, *(said(getattr(setting, side)) for side in sides), setting.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_rows(source: Path, target: Path, count: int, seed: int) -> None:
    """``count`` rows of ``source`` in an order of ``seed``'s, as many rounds through it as that takes."""
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        draw.shuffle(lines)
        rows += lines[: count - len(rows)]
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def reward_function(name: str) -> Callable[..., Any]:
    """The function called ``module:name``."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def score_of(reward: Callable[..., Any], row: dict[str, Any], text: str) -> float:
    """The score of one response to a row, called as burnish calls a reward function."""
    said = reward(
        data_source=row["data_source"],
        solution_str=text,
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row.get("extra_info"),
    )
    return float(said["score"] if isinstance(said, dict) else said)
