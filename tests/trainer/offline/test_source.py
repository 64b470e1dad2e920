"""Which model a name stands for."""

import json
from pathlib import Path

import pytest

from burnish.trainer.offline.source import find_model
from burnish.utils.errors import ConfigError


def write(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(run: Path, step: int, *, complete: bool = True, critic: bool = False) -> Path:
    """A checkpoint as far as names go."""
    folder = run / f"global_step_{step}"
    write(folder / "actor" / "config.json")
    write(folder / "actor" / "tokenizer.json")
    if critic:
        write(folder / "critic" / "config.json")
        write(folder / "critic" / "value_head.safetensors")
    if complete:
        write(folder / "trainer_state.json", json.dumps({"global_steps": step}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for step in (2, 4, 10):
        checkpoint(folder, step, critic=step == 4)
    checkpoint(folder, 12, complete=False)
    write(folder / "config.yaml")
    return folder


def test_a_run_is_its_newest_complete_checkpoint(run: Path) -> None:
    found = find_model(str(run))
    assert (found.folder, found.step, found.role) == (str(run / "global_step_10" / "actor"), 10, "actor")
    assert found.tokenizer == found.folder
    assert found.run_config == run / "config.yaml"
    # What was written last, also where an older run left a higher number.
    write(run / "latest_checkpointed_iteration.txt", "4")
    assert find_model(str(run)).step == 4
    assert find_model(f"{run}@newest").step == 4


def test_another_checkpoint_of_a_run_is_named_behind_an_at(run: Path) -> None:
    assert find_model(f"{run}@2").folder == str(run / "global_step_2" / "actor")
    with pytest.raises(ConfigError, match="keeps no best checkpoint"):
        find_model(f"{run}@best")
    write(run / "best_checkpoint.txt", "4")
    assert find_model(f"{run}@best").step == 4
    with pytest.raises(ConfigError, match="no complete checkpoint of step 12; there is step 2, step 4, step 10"):
        find_model(f"{run}@12")
    with pytest.raises(ConfigError, match="newest, best or the number"):
        find_model(f"{run}@last")
    with pytest.raises(ConfigError, match="no checkpoints .* to choose 3 from"):
        find_model(f"{run / 'global_step_2' / 'actor'}@3")


def test_a_folder_with_an_at_in_its_name_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model@2"
    write(folder / "config.json")
    assert find_model(str(folder)).folder == str(folder)


def test_a_checkpoint_is_its_actor_unless_the_critic_is_asked_for(run: Path) -> None:
    step = run / "global_step_4"
    assert find_model(str(step)).folder == str(step / "actor")
    critic = find_model(str(step), role="critic")
    assert (critic.folder, critic.role) == (str(step / "critic"), "critic")
    # The critic has none of its own.
    assert critic.tokenizer == str(step / "actor")
    assert find_model(str(step / "critic")).role == "critic"
    with pytest.raises(ConfigError, match="holds no critic"):
        find_model(str(run / "global_step_2"), role="critic")
    with pytest.raises(ConfigError, match="a model already"):
        find_model(str(step / "actor"), role="critic")


def test_adapters_name_their_base_or_are_told_it(tmp_path: Path) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    write(adapter / "adapter_config.json", json.dumps({"base_model_name_or_path": str(base)}))
    write(base / "config.json")
    write(base / "tokenizer.json")
    found = find_model(str(adapter))
    assert (found.kind, found.base, found.model_path, found.tokenizer) == ("adapters", str(base), str(base), str(base))
    write(adapter / "adapter_config.json", json.dumps({"base_model_name_or_path": "/moved/away"}))
    with pytest.raises(ConfigError, match="/moved/away, and there is no such folder here. Name it by --base"):
        find_model(str(adapter))
    assert find_model(str(adapter), base=str(base)).base == str(base)
    with pytest.raises(ConfigError, match="needs no base"):
        find_model(str(base), base=str(base))


def test_shards_of_verl_are_a_model_whose_tokenizer_lies_below(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_3" / "actor"
    for name in ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "huggingface/config.json"):
        write(actor / name)
    write(actor / "huggingface" / "tokenizer.json")
    for name in (tmp_path, tmp_path / "global_step_3", actor):
        found = find_model(str(name))
        assert (found.kind, found.folder, found.tokenizer, found.step) == (
            "verl",
            str(actor),
            f"{actor}/huggingface",
            3,
        )


def test_what_is_no_model_is_said_with_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="holds no model.*It holds: notes.txt"):
        find_model(str(tmp_path))
    write(tmp_path / "unsaved" / "run_id")
    with pytest.raises(ConfigError, match="this run has saved no checkpoint. Train it with trainer.save_freq above 0"):
        find_model(str(tmp_path / "unsaved"))
    with pytest.raises(ConfigError, match="there is no folder"):
        find_model(str(tmp_path / "nowhere"))
    checkpoint(tmp_path / "started", 1, complete=False)
    with pytest.raises(ConfigError, match="holds no complete checkpoint, only: step 1"):
        find_model(str(tmp_path / "started"))
    assert find_model("org/name").folder == "org/name"


def test_a_model_at_a_url_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    import fsspec

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.put(f"{run}/", "/offline-source/run", recursive=True)
    try:
        found = find_model("memory://offline-source/run@4")
        assert (found.step, (Path(found.folder) / "config.json").read_text()) == (4, "{}")
        assert find_model("memory://offline-source/run/global_step_2/actor").step == 2
        with pytest.raises(ConfigError, match="there is no folder memory://"):
            find_model("memory://offline-source/other")
    finally:
        system.rm("/offline-source", recursive=True)
