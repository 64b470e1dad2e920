"""Keys of dumps and replay: a folder has one use, and a key that nobody reads is told."""

import pytest

from burnish.config import load_config
from burnish.config.dump_checks import samples_responses
from burnish.utils.errors import ConfigError

BASE = ("actor_rollout_ref.model.path=x/y", "data.train_files=t.jsonl")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["trainer.rollout_data_dir=/d", "trainer.validation_data_dir=/d/"],
            r"_data_dir and trainer\.validation_data_dir are",
        ),
        (
            ["trainer.rollout_data_dir=/d", "trainer.replay_rollouts=/x/../d"],
            r"_data_dir and trainer\.replay_rollouts are",
        ),
        (
            ["trainer.default_local_dir=/r", "trainer.replay_rollouts=/r/rollouts"],
            r"replay_rollouts and trainer\.default_local_dir are the same folder",
        ),
        (["trainer.rollout_data_dir=s3://bucket/d"], r"responses are kept on this machine's disk"),
        (["actor_rollout_ref.rollout.skip_rollout=true"], r"skip_rollout.*trainer\.replay_rollouts="),
        (["trainer.replay_rewards=new"], r"replay_rewards=new"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        load_config([*BASE, *keys])


def test_keys_that_nobody_reads_are_told(caplog):
    load_config([*BASE, "trainer.replay_rewards=compute", "trainer.rollout_data_dir=/d", "trainer.sample_rollouts=4"])
    assert "trainer.replay_rewards" in caplog.text
    assert "trainer.sample_rollouts" in caplog.text


def test_false_is_no_folder():
    assert load_config([*BASE, "trainer.replay_rollouts=false"]).trainer.replay_rollouts is None


@pytest.mark.parametrize(
    ("keys", "has_validation", "samples"),
    [
        ([], False, True),
        (["trainer.replay_rollouts=/d", "trainer.val_before_train=false"], True, False),
        (["trainer.replay_rollouts=/d"], True, True),
        (["trainer.replay_rollouts=/d"], False, False),
        (["trainer.replay_rollouts=/d", "trainer.val_before_train=false", "trainer.test_freq=5"], True, True),
    ],
)
def test_an_engine_is_needed_where_something_is_sampled(keys, has_validation, samples):
    config = load_config([*BASE, *keys])
    assert samples_responses(config, has_validation=has_validation) is samples
