"""Keys of a rollout that servers elsewhere do."""

import pytest

from burnish.config import load_config
from burnish.utils.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
SERVER = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=server"]
URL = f"{ROLLOUT}.server.url=[http://localhost:8000]"
WEIGHTS = f"{ROLLOUT}.server.weights_dir=/shared"


def test_a_server_for_training_and_one_for_validation():
    trained = load_config([*SERVER, URL, WEIGHTS]).actor_rollout_ref.rollout.server
    assert (trained.url, trained.weights_dir, trained.model) == (["http://localhost:8000"], "/shared", None)
    assert load_config([*SERVER, URL, "trainer.val_only=true"]).actor_rollout_ref.rollout.server.weights_dir is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*SERVER, WEIGHTS], rf"needs the address of a server, as {ROLLOUT}\.server\.url=http://localhost:8000"),
        ([*SERVER, WEIGHTS, f"{ROLLOUT}.server.url=[localhost:8000]"], "begins with http:// or https://"),
        ([*SERVER, URL], r"would never get the trained weights: set .*weights_dir.* or trainer\.val_only=true"),
        (
            [*SERVER, URL, WEIGHTS, "actor_rollout_ref.model.lora_rank=8"],
            "trains adapters, but .* hands whole models over",
        ),
        ([f"{ROLLOUT}.mode=server", URL, WEIGHTS], rf"{ROLLOUT}\.name=native.* runs in the workers"),
    ],
)
def test_what_cannot_be_is_named_before_anything_starts(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(overrides)
