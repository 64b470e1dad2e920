"""What a run saves, keeps and goes on from makes sense together, or is refused before anything starts."""

import pytest

from burnish.config import load_config
from burnish.config.idle import idle_notices
from burnish.utils.errors import ConfigError

FILES = ["data.train_files=x.jsonl"]
BEST = "trainer.keep_best=val-core/x/acc/mean@1"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["trainer.resume_from_path=/x/global_step_1"], "is taken only with trainer.resume_mode=resume_path"),
        (["trainer.default_local_dir=s3://bucket/run"], "the URL in trainer.default_hdfs_dir"),
        (["trainer.del_local_ckpt_after_load=true"], "would delete the only copy"),
        (
            ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3"],
            "trainer.max_critic_ckpt_to_keep=3.*at most 2",
        ),
        (["trainer.keep_best=critic/score/mean", "trainer.save_freq=1"], "whose names begin with val-core/"),
        ([BEST, "trainer.test_freq=1"], r"trainer.save_freq=-1 .* saves no checkpoint"),
        ([BEST, "trainer.save_freq=1"], r"trainer.test_freq=-1 .* never validates"),
        (["trainer.max_wall_time=0"], "above 0"),
        (["trainer.on_save_error=ignore"], "warn, raise"),
        (["trainer.remove_previous_ckpt_in_save=true"], "trainer.max_actor_ckpt_to_keep=1 keeps the newest"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config([*FILES, *overrides])


def test_keys_of_the_field_are_taken():
    config = load_config(
        [
            *FILES,
            "trainer.save_freq=5",
            "trainer.test_freq=5",
            BEST,
            "trainer.default_hdfs_dir=hdfs://host:9000/run",
            "trainer.del_local_ckpt_after_load=true",
            "trainer.esi_redundant_time=120",
            "trainer.max_critic_ckpt_to_keep=1",
            "trainer.max_actor_ckpt_to_keep=3",
            "trainer.max_wall_time=3600",
        ]
    )
    assert config.trainer.default_hdfs_dir == "hdfs://host:9000/run"
    assert (config.trainer.esi_redundant_time, config.trainer.max_wall_time) == (120, 3600)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.max_actor_ckpt_to_keep=2"], "trainer.max_actor_ckpt_to_keep=2"),
        (["trainer.esi_redundant_time=9"], "trainer.esi_redundant_time=9"),
        (["trainer.save_freq=1", "trainer.keep_best_mode=min"], "trainer.keep_best_mode=min"),
        (
            [
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.rollout.n=4",
                "trainer.save_freq=1",
                "trainer.max_critic_ckpt_to_keep=2",
            ],
            "trainer.max_critic_ckpt_to_keep=2",
        ),
    ],
)
def test_what_has_no_effect_is_told(overrides, key):
    config = load_config([*FILES, *overrides])
    assert any(key in notice for notice in idle_notices(config))


@pytest.mark.parametrize("actor", ["0", "null"])
def test_nothing_and_no_number_keep_all_checkpoints(actor):
    keys = [f"trainer.max_actor_ckpt_to_keep={actor}", "trainer.max_critic_ckpt_to_keep=2", "trainer.save_freq=1"]
    assert not load_config([*FILES, *keys]).trainer.max_actor_ckpt_to_keep
