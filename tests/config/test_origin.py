"""Where each value of a configuration comes from, as the run's folder has it."""

import json

from burnish.config import ORIGIN_FILE, PPOTrainerConfig, load_config, origin_table, write_origins
from burnish.config.schema import leaves

MODEL = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet"]


def givers(*overrides, **options):
    config = load_config([*MODEL, *overrides], **options)
    return {key: entry["origin"] for key, entry in origin_table(config).items()}


def test_every_key_has_an_origin():
    assert list(givers()) == list(leaves())


def test_the_command_line_wins_over_a_recipe_and_a_recipe_over_the_default():
    found = givers("recipe=demo", "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert found["data.train_batch_size"] == "command line"
    assert found["actor_rollout_ref.actor.optim.lr"] == "recipe demo"
    assert found["trainer.nnodes"] == "default"


def test_values_from_a_file_and_from_python_say_so(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n  total_epochs: 7\n  project_name: burnish\n")
    found = givers({"trainer.seed": 3}, config_name="mine", config_path=str(tmp_path))
    assert found["trainer.total_epochs"] == "config file"
    assert found["trainer.project_name"] == "config file"
    assert found["trainer.seed"] == "python"


def test_a_key_that_follows_another_names_it():
    found = givers("data.max_response_length=77")
    assert found["data.max_response_length"] == "command line"
    assert found["actor_rollout_ref.rollout.response_length"] == "follows data.max_response_length"


def test_a_preset_and_what_was_left_open_are_told_apart():
    found = givers(
        "algorithm.rollout_correction.preset=decoupled_token_is", "actor_rollout_ref.rollout.calculate_log_probs=true"
    )
    assert found["algorithm.rollout_correction.rollout_is"] == "follows algorithm.rollout_correction.preset"
    assert found["critic.enable"] == "resolved"


def test_an_entry_of_an_open_dictionary_gives_the_dictionary_its_origin():
    assert givers("ray_kwargs.ray_init.num_cpus=3")["ray_kwargs.ray_init"] == "command line"


def test_a_size_over_all_workers_is_the_origin_of_the_size_for_each():
    found = givers("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size=8")
    assert found["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == "command line"


def test_a_change_after_loading_is_resolved_and_a_hand_made_config_is_python():
    config = load_config(MODEL)
    config.trainer.device = "cpu"
    assert origin_table(config)["trainer.device"] == {"value": "cpu", "origin": "resolved"}
    made = PPOTrainerConfig()
    made.trainer.nnodes = 3
    table = origin_table(made)
    assert table["trainer.nnodes"] == {"value": 3, "origin": "python"}
    assert table["trainer.seed"]["origin"] == "default"


def test_the_file_hides_secrets(tmp_path):
    config = load_config([*MODEL, "ray_kwargs.ray_init.api_key=sk-very-secret-1234"])
    write_origins(config, tmp_path)
    text = (tmp_path / ORIGIN_FILE).read_text()
    assert "sk-very-secret-1234" not in text
    assert json.loads(text)["ray_kwargs.ray_init"]["value"]["api_key"] == "<redacted>"
