"""Keys that were set and never read are found."""

import dataclasses
import pickle

import pytest

from burnish.config import FSDPActorConfig, load_config, to_dict
from burnish.config.usage import mark_read, reads, track, track_section, unread

SET = ["trainer.balance_batch=false", "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo"]


def test_a_key_that_is_set_and_not_read_is_listed_until_it_is_read():
    config = track(load_config(SET))
    assert unread(config) == ["actor_rollout_ref.rollout.n", "algorithm.adv_estimator", "trainer.balance_batch"]
    assert config.actor_rollout_ref.rollout.n == 4
    assert unread(config) == ["algorithm.adv_estimator", "trainer.balance_batch"]
    mark_read(["trainer.balance_batch", "algorithm.adv_estimator"])
    assert unread(config) == []
    assert "actor_rollout_ref.rollout.n" in reads()


def test_copies_comparisons_and_printing_of_the_package_are_no_reads_but_copies_are_tracked():
    config = track(load_config(SET))
    to_dict(config)
    copy = dataclasses.replace(config.actor_rollout_ref.rollout, temperature=0.5)
    assert len(unread(config)) == 3
    assert copy.n == 4
    assert "actor_rollout_ref.rollout.n" not in unread(config)


def test_sections_of_one_class_are_told_apart():
    config = track(load_config(["critic.optim.lr=1e-4", "actor_rollout_ref.actor.optim.lr=1e-5"]))
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert unread(config) == ["critic.optim.lr"]


def test_a_key_is_read_through_the_one_that_follows_it():
    config = track(load_config(["trainer.seed=7"]))
    assert config.data.seed == 7
    assert unread(config) == []


def test_what_was_told_to_have_no_effect_is_not_told_again():
    told = ["actor_rollout_ref.model.use_remove_padding=True", "algorithm.filter_groups.metric=acc"]
    config = load_config([*told, "algorithm.adv_estimator=reinforce_plus_plus", "critic.optim.lr=1e-4"])
    assert unread(track(config)) == ["algorithm.adv_estimator"]


def test_a_tracked_config_is_the_same_config():
    config = load_config(SET)
    tracked = track(pickle.loads(pickle.dumps(config)))
    assert isinstance(tracked.actor_rollout_ref.actor, FSDPActorConfig)
    assert to_dict(tracked) == to_dict(config)
    assert pickle.loads(pickle.dumps(tracked)) == config
    tracked.trainer.device = "cpu"
    assert tracked.trainer.device == "cpu"
    with pytest.raises(AttributeError):
        tracked.trainer.devise = "cpu"


def test_what_only_a_shipped_recipe_sets_is_not_held_against_the_user():
    config = track(load_config(["recipe=demo", "data.train_files=x.jsonl", "trainer.balance_batch=false"]))
    assert "trainer.test_freq" in config.set_keys
    assert unread(config) == ["data.train_files", "trainer.balance_batch"]


def test_a_section_that_is_reached_by_two_ways_is_read_by_either_also_in_another_process():
    keys = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.loss_type=reinforce"]
    config = track(load_config([*keys, "algorithm.rollout_correction.bypass_mode=true"]))
    assert unread(config) == ["algorithm.rollout_correction.loss_type", "algorithm.rollout_correction.rollout_is"]
    assert config.actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type == "reinforce"
    assert unread(config) == ["algorithm.rollout_correction.rollout_is"]
    section = pickle.loads(pickle.dumps(config.actor_rollout_ref))
    track_section(section, "actor_rollout_ref")
    assert section.actor.policy_loss.rollout_correction.rollout_is == "token"
    assert unread(config) == []


def test_a_key_that_the_configuration_itself_obeys_or_leaves_idle_is_not_listed():
    clip = ["actor_rollout_ref.actor.clip_ratio_low=0.8", "actor_rollout_ref.actor.clip_ratio_high=1.2"]
    obeyed = ["actor_rollout_ref.actor.allow_wide_clip=true", "algorithm.rollout_correction.preset=decoupled_token_is"]
    idle = ["actor_rollout_ref.actor.tau_pos=2", "algorithm.rollout_correction.loss_type=reinforce"]
    assert unread(track(load_config([*clip, *obeyed, *idle]))) == [override.split("=")[0] for override in clip[::-1]]
