"""Keys of the sandbox: read where code is run, named as idle elsewhere."""

import pytest

from burnish.config import load_config
from burnish.config.idle import idle_keys
from burnish.reward.sandbox import sandbox_settings


def test_keys_become_settings() -> None:
    config = load_config(
        [
            "reward.sandbox.timeout=3",
            "reward_model.sandbox_fusion.url=http://s",
            "reward.sandbox_fusion.max_concurrent=5",
        ],
        train_rows_given=True,
    )
    settings = sandbox_settings(config.reward)
    assert (settings.timeout, settings.fusion_url, settings.fusion_concurrency) == (3.0, "http://s", 5)


@pytest.mark.parametrize(
    ("key", "idle_beside"),
    [
        ("reward.sandbox_fusion.max_concurrent=5", ""),
        ("reward.sandbox.memory_limit_mb=99", "reward.sandbox_fusion.url=http://s"),
        ("reward.sandbox.timeout=3", "reward.custom_reward_function.path=mine.py"),
    ],
)
def test_what_nothing_reads_is_idle(key: str, idle_beside: str) -> None:
    config = load_config([key, *filter(None, [idle_beside])], train_rows_given=True)
    assert list(idle_keys(config)) == [key.partition("=")[0]]
    read = "reward.sandbox_fusion.url=http://s" if "fusion" in key else "reward.sandbox.max_processes=9"
    assert key.partition("=")[0] not in idle_keys(load_config([key, read], train_rows_given=True))
