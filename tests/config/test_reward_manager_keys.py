import pytest

from burnish.config import load_config
from burnish.config.idle import idle_keys
from burnish.utils.errors import ConfigError

BASE = ["recipe=demo", "actor_rollout_ref.model.path=/m"]


def loaded(*arguments):
    return load_config([*BASE, *arguments])


def test_the_limits_of_older_scripts_are_those_of_rate_limit():
    config = loaded(
        "reward_model.reward_manager=rate_limited",
        "reward_model.max_concurrent=4",
        "reward_model.max_rpm=60",
        "reward.reward_model.max_tpm=9000",
        "reward_model.estimated_tokens_per_request=500",
        "reward_model.timeout=20",
    )
    limits = config.reward.rate_limit
    assert config.reward.reward_manager.name == "rate_limited"
    assert (limits.max_concurrent, limits.max_rpm, limits.max_tpm) == (4, 60, 9000)
    assert (limits.estimated_tokens_per_request, limits.timeout) == (500, 20)


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "reward.reward_manager.source=importlib",
            "reward.reward_manager.name=M",
            "reward.reward_manager.module.path=m.py",
        ],
        [
            "reward_model.reward_loop_source=importlib",
            "reward_model.reward_loop_class_name=M",
            "reward_model.reward_loop_module_path=m.py",
        ],
    ],
)
def test_a_manager_of_a_file_under_both_names(arguments):
    manager = loaded(*arguments).reward.reward_manager
    assert (manager.source, manager.name, manager.module.path) == ("importlib", "M", "m.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reward.reward_manager.name=naiv"],
            r"'naiv' is no value of this key\. Did you mean naive\? There is: naive, dapo",
        ),
        (["reward.reward_manager.name=remote"], r"needs reward\.remote\.url"),
        (["reward.reward_manager.name=prime", "reward.num_workers=0"], "this manager calls the function in processes"),
        (["reward.reward_manager.source=importlib"], r"needs reward\.reward_manager\.module\.path"),
        (["reward.reward_manager.module.path=m.py"], r"needs reward\.reward_manager\.source=importlib"),
        (["reward.judge.url=http://h"], r"needs reward\.judge\.model"),
        (
            ["reward.judge.url=http://h", "reward.judge.model=m", "custom_reward_function.path=r.py"],
            "each is the reward function",
        ),
        (
            ["reward.judge.url=http://h", "reward.judge.model=m", "reward.functions.a.path=r.py"],
            "Make the judge one of them",
        ),
        (
            ["reward.judge.url=http://h", "reward.judge.model=m", "reward.reward_manager.name=batch"],
            "does not ask a judge",
        ),
        (
            [
                "reward.reward_manager.name=remote",
                "reward.remote.url=http://h",
                "reward.custom_reward_function.path=r.py",
            ],
            "the server scores",
        ),
    ],
)
def test_what_does_not_fit_together_is_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        loaded(*arguments)


@pytest.mark.parametrize(
    ("key", "readers"),
    [
        ("reward.judge.temperature=0.5", ["reward.judge.url=http://h", "reward.judge.model=m"]),
        ("reward.remote.timeout=3", ["reward.reward_manager.name=remote", "reward.remote.url=http://h"]),
        ("reward.rate_limit.max_rpm=3", ["reward.reward_manager.name=rate_limited"]),
        ("reward.judge.vote=median", ["reward.judge.url=http://h", "reward.judge.model=m", "reward.judge.num_votes=3"]),
    ],
)
def test_keys_of_servers_that_are_not_asked_are_named(key, readers):
    name = key.partition("=")[0]
    assert name in idle_keys(loaded(key))
    assert name not in idle_keys(loaded(key, *readers))
    assert name not in idle_keys(loaded(key, "reward.reward_manager.name=mine:Manager"))
