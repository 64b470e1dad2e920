"""The memory plan: what each stage holds and takes, by arithmetic that can be done by hand."""

import json

import pytest

from burnish.config import batch_plan, load_config
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.memory import GIB, estimate_memory
from burnish.trainer.preflight.memory_check import check_memory, named_device
from burnish.trainer.preflight.steptime import estimate_step_time
from burnish.trainer.preflight.token_counts import micro_batch_tokens
from burnish.utils.device_table import DEVICES, find_device
from burnish.utils.errors import ConfigError

HALF_B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
NUMBER = 494_032_768
TOKEN = 2 * 24 * 2 * 2 * 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half_b")
    (folder / "config.json").write_text(json.dumps(HALF_B))
    return str(folder)


def config_of(model: str, *overrides: str):
    return load_config(
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={model}",
            "data.train_files=none.jsonl",
            "data.train_batch_size=32",
            "data.max_prompt_length=128",
            "data.max_response_length=384",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=25600",
            "trainer.n_gpus_per_node=1",
            *overrides,
        ]
    )


def stages_of(model: str, *overrides: str, workers: int = 1, gib: float = 79.1):
    config = config_of(model, *overrides)
    reports = estimate_memory(config, batch_plan(config, workers), device="cuda", total_bytes=int(gib * GIB))
    return {stage.name: stage for stage in reports[0].stages}, reports


def test_a_policy_holds_two_bytes_and_three_times_four_and_four_for_its_gradient(model):
    stages, _ = stages_of(model)
    assert set(stages) == {"gen", "update_actor"}
    held = stages["update_actor"].held
    assert held == {
        "actor weights": 2 * NUMBER,
        "actor masters": 4 * NUMBER,
        "actor gradients": 4 * NUMBER,
        "actor moments": 8 * NUMBER,
    }


def test_the_cache_of_the_native_engine_is_what_its_sequences_need(model):
    stages, _ = stages_of(model)
    # 256 sequences of 512 tokens in blocks of 32, and 33 more blocks.
    assert stages["gen"].taken["KV cache"] == (256 * 16 + 33) * 32 * TOKEN


def test_a_cache_is_no_larger_than_its_share_of_the_device(model):
    stages, _ = stages_of(model, "actor_rollout_ref.rollout.gpu_memory_utilization=0.02")
    assert stages["gen"].taken["KV cache"] == int(0.02 * int(79.1 * GIB)) - 2 * NUMBER


def test_a_reference_adds_its_weights_and_a_stage(model):
    stages, _ = stages_of(model, "actor_rollout_ref.actor.use_kl_loss=true")
    assert stages["ref"].held["ref weights"] == 2 * NUMBER
    assert stages["update_actor"].held["ref weights"] == 2 * NUMBER
    parked, _ = stages_of(
        model, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.param_offload=true"
    )
    assert "ref weights" not in parked["update_actor"].held
    assert parked["ref"].held["ref weights"] == 2 * NUMBER


def test_a_critic_beside_the_policy_is_held_while_the_policy_trains(model):
    stages, _ = stages_of(model, "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1")
    assert {"values", "update_critic", "update_actor"} <= set(stages)
    assert stages["update_actor"].held["critic moments"] == stages["update_critic"].held["critic moments"]


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ((), "4,096"),
        (("critic.forward_max_token_len_per_gpu=16384",), "16,384"),
        (
            (
                "critic.use_dynamic_bsz=false",
                "critic.ppo_micro_batch_size_per_gpu=2",
                "critic.forward_micro_batch_size_per_gpu=32",
            ),
            "16,384",
        ),
    ],
)
def test_values_are_cut_by_keys_of_their_own(model, overrides, tokens):
    critic = ("algorithm.adv_estimator=gae", "critic.use_prefix_grouper=false", "critic.ppo_max_token_len_per_gpu=4096")
    stages, _ = stages_of(model, *critic, *overrides)
    assert stages["values"].note == f"{tokens} tokens at once"


def test_a_critic_of_a_pool_of_its_own_has_a_report_of_its_own(model):
    own = [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=1",
        "critic.n_gpus_per_node=1",
        "critic.nnodes=1",
    ]
    stages, reports = stages_of(model, *own)
    assert [report.pool for report in reports] == ["policy", "critic"]
    assert "values" not in stages
    assert {stage.name for stage in reports[1].stages} == {"values", "update_critic"}


def test_a_reward_model_is_held_beside_the_policy_or_in_a_pool_of_its_own(model):
    enabled = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={model}"]
    stages, _ = stages_of(model, *enabled)
    # The backbone without its tied head is the whole of it, but for a score's row.
    assert stages["update_actor"].held["reward_model weights"] == pytest.approx(2 * NUMBER, rel=0.001)
    assert "reward_model" in stages
    own = ["enable_resource_pool=true", "n_gpus_per_node=1", "nnodes=1"]
    stages, reports = stages_of(model, *enabled, *(f"reward.reward_model.{key}" for key in own))
    assert [report.pool for report in reports] == ["policy", "reward_model"]
    assert "reward_model weights" not in stages["update_actor"].held


def test_shards_are_a_share_each_and_the_rollout_keeps_its_copy(model):
    stages, _ = stages_of(model, "trainer.n_gpus_per_node=4", workers=4)
    held = stages["update_actor"].held
    assert held["actor weights"] == pytest.approx(NUMBER, rel=0.02)  # A quarter, in float32.
    assert held["rollout weights"] == 2 * NUMBER
    assert "update_weights" in stages


def test_vllm_takes_its_whole_share_while_it_generates_and_gives_it_back(model):
    stages, _ = stages_of(model, "actor_rollout_ref.rollout.name=vllm")
    assert stages["gen"].taken == {"vLLM": int(0.5 * int(79.1 * GIB))}
    assert "vLLM" not in stages["update_actor"].held
    keeps, _ = stages_of(
        model, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.free_cache_engine=false"
    )
    assert keeps["update_actor"].held["vLLM"] == stages["gen"].taken["vLLM"]


def test_under_auto_a_smaller_device_recomputes_until_it_fits(model):
    large, _ = stages_of(model)
    small, _ = stages_of(model, gib=24)
    least, _ = stages_of(model, gib=17)
    assert "0 of 24 blocks recomputed" in large["update_actor"].note
    assert "and the MLP of" in small["update_actor"].note
    assert "0 of 24 blocks recomputed" not in least["update_actor"].note
    assert least["update_actor"].bytes < small["update_actor"].bytes < large["update_actor"].bytes


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # 32 prompts of 128 tokens computed once, 256 responses of 384: 102,400 in all, and 25,600 at once.
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=25600", 25_600),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000000", 102_400),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", 2_048),
    ],
)
def test_tokens_of_a_micro_batch(model, override, expected):
    config = config_of(model, override)
    plan = batch_plan(config, 1)
    assert micro_batch_tokens(plan.actor, plan, None) == expected


def test_what_does_not_fit_is_an_error_that_names_sizes_and_keys(model):
    findings = Findings()
    config = config_of(model)
    check_memory(config, batch_plan(config, 1), findings, device=named_device("A10G"))
    assert findings.ok, "0.5 B trains on 22 GiB under auto"
    config = config_of(
        model,
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=102400",
    )
    findings = Findings()
    check_memory(config, batch_plan(config, 1), findings, device=named_device("A10G"))
    (error,) = findings.of("error")
    assert error.key == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    for words in (
        "update_actor",
        "GiB",
        "22.1 GiB of A10G",
        "ppo_max_token_len_per_gpu=102400",
        "optimizer_offload=true",
    ):
        assert words in error.message
    assert findings.facts["memory"]["policy"]["stages"]["update_actor"]["needed_bytes"] > 22.1 * GIB


def test_the_time_of_a_step_is_never_below_the_devices_ceilings(model):
    config = config_of(model, "actor_rollout_ref.actor.use_kl_loss=true")
    plan = batch_plan(config, 1)
    models = estimate_memory(config, plan, device="cuda", total_bytes=None)[0].models
    device = named_device("H100")
    time = estimate_step_time(config, plan, models, device)
    tokens = 256 * 512
    assert time.stages["update_actor"] >= 6 * NUMBER * tokens / device.bf16_flops
    assert time.stages["gen"] >= 384 * 2 * NUMBER / device.bandwidth
    slow = estimate_step_time(config, plan, models, named_device("L4"))
    assert slow.seconds > 3 * time.seconds


def test_of_a_critic_on_devices_of_its_own_a_step_waits_for_the_rest_of_its_work(model):
    def asked(*overrides: str):
        return config_of(model, "algorithm.adv_estimator=gae", f"critic.model.path={model}", *overrides)

    # Wherever they are, and with a reference or without: the models are of one size.
    kl = asked("actor_rollout_ref.actor.use_kl_loss=true")
    reports = estimate_memory(kl, batch_plan(kl, 1), device="cuda", total_bytes=None)
    models = {role: estimate for report in reports for role, estimate in report.models.items()}

    def time_of(*overrides: str):
        config = asked(*overrides)
        return estimate_step_time(config, batch_plan(config, 1), models, named_device("H100")).stages

    apart = ("critic.nnodes=1", "critic.n_gpus_per_node=1", "trainer.controller=ray")
    together, beside = time_of(), time_of(*apart)
    assert together["update_critic"] > 0
    # The head that gives the values is all that it has more than the policy.
    assert 0 <= beside["update_critic"] < 1e-4 * together["update_critic"]
    assert beside["values"] == together["values"]
    assert beside["update_actor"] == together["update_actor"]
    with_kl = time_of(*apart, "actor_rollout_ref.actor.use_kl_loss=true")
    assert 0 <= with_kl["values"] < 0.01 * beside["values"]
    twice = time_of(*apart, "critic.ppo_epochs=2")
    assert 0.9 < twice["update_critic"] / together["update_critic"] < 1.1
    halved = time_of("critic.nnodes=1", "critic.n_gpus_per_node=2", "trainer.controller=ray")
    assert halved["values"] == pytest.approx(together["values"] / 2)


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("h100 80gb", "H100"), ("NVIDIA L40S", "L40S"),
     ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), ("NVIDIA A100-SXM4-80GB", "A100"), ("L4", "L4")],
)  # fmt: skip
def test_devices_are_found_by_what_pytorch_and_people_call_them(name, found):
    assert find_device(name).name == found


def test_an_unknown_device_is_refused_with_the_list():
    assert find_device("Quantum 9000") is None
    with pytest.raises(ConfigError, match=r"Quantum 9000.*H100.*B200"):
        named_device("Quantum 9000")
    assert all(device.memory_gib > 0 and device.bandwidth < device.bf16_flops for device in DEVICES)
