"""Keys of where a model's state lies and what its backward computes again."""

import pytest

from burnish.config import load_config, load_with_notices
from burnish.trainer import main_ppo
from burnish.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor.fsdp_config"
REF = "actor_rollout_ref.ref.fsdp_config"
CRITIC = "critic.model.fsdp_config"
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
TWO = ["trainer.n_gpus_per_node=2", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
KL = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.enable_gradient_checkpointing", f"{ACTOR}.defer_gradient_sync"]
)
def test_auto_or_a_switch_in_any_spelling(key):
    def value(*typed: str):
        found = load_config([f"{key}={word}" for word in typed])
        for name in key.split("."):
            found = getattr(found, name)
        return found

    assert value() == "auto"
    assert [value(word) for word in ("auto", "'auto'", "True", "false", "'False'", "on")] == [
        "auto", "auto", True, False, False, True,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'always' is no value of this key.* There is: auto\. Or true or false\."):
        value("always")


def test_the_critic_has_the_keys_too():
    overrides = ["critic.model.enable_gradient_checkpointing=true", "critic.model.enable_activation_offload=true"]
    critic = load_config(
        [*overrides, *(f"{CRITIC}.{name}=true" for name in ("param_offload", "optimizer_offload"))]
    ).critic
    assert critic.model.enable_gradient_checkpointing is True
    assert critic.model.enable_activation_offload is True
    assert (critic.model.fsdp_config.param_offload, critic.model.fsdp_config.optimizer_offload) == (True, True)


@pytest.mark.parametrize(
    ("typed", "fsdp_config"),
    [("actor_rollout_ref.actor.use_torch_compile", "actor"), ("actor_rollout_ref.ref.use_torch_compile", "ref")],
)
def test_compilation_is_a_key_of_the_layout_under_either_name(typed, fsdp_config):
    policy = load_config([f"{typed}=True"]).actor_rollout_ref
    assert getattr(policy, fsdp_config).fsdp_config.use_torch_compile is True
    assert load_config([]).actor_rollout_ref.actor.fsdp_config.use_torch_compile is False


@pytest.mark.parametrize("size", [-1, 1, 2, 4, 8])
def test_a_copy_may_be_shared_by_any_number_that_divides_the_workers(size):
    overrides = ["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_size={size}", f"{REF}.fsdp_size={size}"]
    assert load_config(overrides).actor_rollout_ref.actor.fsdp_config.fsdp_size == size


@pytest.mark.parametrize(("size", "nearest"), [(3, 2), (5, 4), (7, 8), (16, 8), (0, 1)])
def test_a_number_that_does_not_is_an_error_that_names_those_that_do(size, nearest):
    with pytest.raises(
        ConfigError, match=rf"fsdp_size={size}: .* or 1, 2, 4, 8\. The nearest value is .*={nearest}\.$"
    ):
        load_config(["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_size={size}"])


@pytest.mark.parametrize(
    ("overrides", "idle", "reason"),
    [
        (
            ["trainer.n_gpus_per_node=1"],
            f"{ACTOR}.forward_prefetch=true",
            "each worker has a whole copy of the model (one worker)",
        ),
        (["trainer.n_gpus_per_node=1"], f"{ACTOR}.offload_policy=true", "one worker"),
        ([*TWO, f"{ACTOR}.fsdp_size=1"], f"{ACTOR}.defer_gradient_sync=true", f"({ACTOR}.fsdp_size=1)"),
        ([*TWO, KL, f"{REF}.fsdp_size=1"], f"{REF}.reshard_after_forward=false", f"({REF}.fsdp_size=1)"),
        (["trainer.n_gpus_per_node=1"], f"{BUCKET}=64", "one worker"),
        ([*TWO, KL], f"{REF}.optimizer_offload=true", "a reference is not trained"),
        (
            [*TWO, f"{ACTOR}.offload_policy=true"],
            f"{ACTOR}.param_offload=true",
            f"{ACTOR}.offload_policy=true keeps that on the CPU already",
        ),
    ],
)
def test_a_key_that_the_layout_leaves_without_effect_is_told(overrides, idle, reason):
    (notice,) = [text for text in load_with_notices([*overrides, idle]).notices if idle in text and "No effect" in text]
    assert reason in notice


@pytest.mark.parametrize(
    "key",
    [
        f"{ACTOR}.forward_prefetch=true",
        f"{ACTOR}.defer_gradient_sync=true",
        f"{ACTOR}.param_offload=true",
        f"{ACTOR}.optimizer_offload=true",
        f"{ACTOR}.offload_policy=true",
        f"{REF}.param_offload=true",
        f"{REF}.forward_prefetch=true",
        f"{CRITIC}.optimizer_offload=true",
        f"{BUCKET}=64",
    ],
)
def test_on_two_workers_the_keys_act(key):
    assert not [text for text in load_with_notices([*TWO, KL, "critic.enable=true", key]).notices if key in text]


def test_a_copy_shared_by_more_workers_than_auto_finds_is_refused_before_anything_starts(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = load_config([f"{ACTOR}.fsdp_size=2", "trainer.n_gpus_per_node=auto"])
    with pytest.raises(ConfigError, match=rf"{ACTOR}\.fsdp_size=2: 1 workers cannot be divided .*fsdp_size=1\.$"):
        main_ppo.resolve_machine(config)


def test_keys_that_idle_on_the_one_worker_that_auto_finds_are_told_then(caplog, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    key = f"{ACTOR}.offload_policy=true"
    config = load_config([key, "trainer.n_gpus_per_node=auto"])
    assert not caplog.records
    main_ppo.resolve_machine(config)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"No effect here: {key}. The reason: each worker has a whole copy of the model (one worker)")
    caplog.clear()
    # With a number of workers the loader has told it already.
    config = load_config([key, "trainer.n_gpus_per_node=1"])
    assert key in caplog.text
    caplog.clear()
    main_ppo.resolve_machine(config)
    assert not caplog.records
