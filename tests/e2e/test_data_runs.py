"""Data of one's own form, from the file to the metrics of a run."""

import json

import pytest

from tests.e2e.runs import logged, tiny_run

OWN = """
from burnish.data import RLHFDataset
class Own(RLHFDataset):
    def on_batch_end(self, batch):
        with open({file!r}, "a") as file:
            print(len(batch), "advantages" in batch.batch.keys(), file=file)
"""


def write(path, questions):
    path.write_text("".join(json.dumps({"question": f"{q}+1=", "answer": str(q + 1)}) + "\n" for q in questions))
    return path


def test_plain_questions_a_curriculum_and_named_validation_sets(tmp_path):
    seven, two = write(tmp_path / "seven.jsonl", range(7)), write(tmp_path / "two.jsonl", range(2))
    (tmp_path / "own.py").write_text(OWN.format(file=str(tmp_path / "heard")))
    tiny_run(
        tmp_path / "run",
        f"data.train_files={write(tmp_path / 'train.jsonl', range(8))}",
        f"data.val_files={{seven:{seven},two:[{two}]}}",
        "data.prompt_key=question",
        "data.answer_key=answer",
        "data.default_data_source=burnish/arithmetic",
        "data.system_prompt=add",
        "data.sampler.name=curriculum",
        f"data.custom_cls.path={tmp_path / 'own.py'}",
        "data.custom_cls.name=Own",
        "data.val_batch_size=4",
        "trainer.test_freq=1",
        "trainer.total_training_steps=1",
    )
    last = [metrics for metrics in logged(tmp_path / "run") if "val-aux/seven/num_prompts" in metrics][-1]
    assert (last["val-aux/seven/num_prompts"], last["val-aux/two/num_prompts"]) == (7, 2)
    assert any(name.startswith("val-core/seven/") for name in last)
    assert (tmp_path / "heard").read_text().split()[1] == "True"


@pytest.mark.slow
def test_validation_over_two_ranks_counts_exactly_its_rows(tmp_path):
    seven = write(tmp_path / "seven.jsonl", range(7))
    tiny_run(
        tmp_path / "run",
        f"data.train_files={seven}",
        f"data.val_files={seven}",
        "data.prompt_key=question",
        "data.answer_key=answer",
        "data.default_data_source=burnish/arithmetic",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_batch_size=4",
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "trainer.val_only=true",
    )
    (metrics,) = logged(tmp_path / "run")
    assert metrics["val-aux/burnish/arithmetic/num_prompts"] == 7
