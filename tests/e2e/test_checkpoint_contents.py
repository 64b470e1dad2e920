"""What a run's checkpoint holds for others, and what a run takes over from another system's."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import TINY, logged, tiny_run

ALL = "[model,optimizer,extra,hf_model]"


@pytest.mark.slow
def test_the_hugging_face_folder_of_each_role_is_a_model_of_its_own(tmp_path: Path) -> None:
    tiny_run(
        tmp_path,
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "algorithm.adv_estimator=gae",
        f"actor_rollout_ref.actor.checkpoint.save_contents={ALL}",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        f"critic.checkpoint.save_contents={ALL}",
    )
    step = tmp_path / "global_step_1"
    folder = step / "actor" / "huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("1 + 1", return_tensors="pt").input_ids
    whole = AutoModelForCausalLM.from_pretrained(step / "actor")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)
    assert (step / "critic" / "huggingface" / "value_head.safetensors").exists()


def verl_folder(folder: Path) -> Path:
    """A checkpoint of the tiny model as one rank of verl's writes it."""
    actor = folder / "global_step_7" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    for file in (TINY / "model").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, actor / "huggingface")
    return actor


@pytest.mark.slow
def test_a_run_starts_from_verls_folder_as_from_the_model_in_it(tmp_path: Path) -> None:
    actor = verl_folder(tmp_path / "verl")
    tiny_run(tmp_path / "plain", "trainer.total_training_steps=1")
    tiny_run(tmp_path / "ours", "trainer.total_training_steps=1", f"actor_rollout_ref.model.path={actor}")
    assert logged(tmp_path / "plain") == logged(tmp_path / "ours")


@pytest.mark.slow
def test_a_run_goes_on_from_verls_checkpoint(tmp_path: Path) -> None:
    actor = verl_folder(tmp_path / "verl")
    resumed = tiny_run(
        tmp_path / "ours",
        "trainer.total_training_steps=8",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={actor.parent}",
    )
    assert resumed.steps == 8
    assert len(logged(tmp_path / "ours")) == 1
