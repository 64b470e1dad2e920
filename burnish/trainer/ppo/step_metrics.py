"""The metrics of a step: what the stages have said, and what there is to say of the whole."""

from typing import TYPE_CHECKING

from burnish.protocol import DataProto
from burnish.rollout.stats import RolloutStats
from burnish.trainer.ppo.bottleneck import bottleneck_metrics
from burnish.trainer.ppo.metrics import compute_data_metrics
from burnish.trainer.ppo.pace import compute_throughout_metrics, compute_timing_metrics
from burnish.trainer.ppo.updates import joined
from burnish.workers.updates import merge_updates

if TYPE_CHECKING:
    from burnish.trainer.loop import TrainingLoop
    from burnish.trainer.ppo.ray_trainer import RayPPOTrainer


def step_metrics(trainer: "RayPPOTrainer", batch: DataProto) -> dict[str, float]:
    """All that is logged of a finished step: what its stages have measured, its batch, its seconds, its pace."""
    data, timing = trainer.config.data, trainer.timing_raw
    scoring = merge_updates(trainer.reward_model_wg.take_pass_metrics()) if trainer.use_reward_model else {}
    metrics = {
        **joined(trainer.metrics, scoring),
        **compute_data_metrics(batch, trainer.use_critic, data.max_prompt_length, data.max_response_length),
        **compute_timing_metrics(batch, timing, trainer.num_gen_tokens),
        **compute_throughout_metrics(batch, timing, trainer.resource_pool_manager.get_n_gpus()),
        **RolloutStats.of_ranks(trainer.actor_rollout_wg.take_rollout_stats()).metrics(),
        "training/global_step": trainer.global_steps,
        "training/epoch": trainer.prompts.epoch,
    }
    return metrics | bottleneck_metrics(metrics)


def log_unfinished_step(trainer: "TrainingLoop") -> None:
    """Logs what there is of a step that was begun and not logged, as an error or a stop leaves it: what its stages have
    measured, the seconds they took, and ``training/failed``, 1."""
    if trainer.is_logged:
        return
    trainer.is_logged = True
    timing = {f"timing_s/{name}": seconds for name, seconds in trainer.timing_raw.items()}
    trainer.run_log.failed_step({**trainer.metrics, **timing, "training/failed": 1.0}, trainer.global_steps)
