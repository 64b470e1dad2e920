"""Training on the responses of another run: the same to the last bit, and a sentence where it cannot be."""

import copy
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from burnish.protocol import DataProto, object_array
from burnish.render import load_tokenizer
from burnish.rollout.idle import IdleRollout
from burnish.rollout.native.engine import NativeRollout
from burnish.trainer import rollout_store
from burnish.trainer.ppo.replay import RolloutReplay
from burnish.utils.errors import ConfigError, DataError, RolloutError
from burnish.utils.events import read_events
from tests.e2e.runs import TINY, logged, tiny_config, tiny_run

STEPS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
)


def weights(run):
    return {
        (path.name, name): tensor
        for path in sorted((run / "global_step_2").glob("*/model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_run(run, other):
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert logged(run) == logged(other)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run that has kept its responses, and where."""
    folder = tmp_path_factory.mktemp("kept")
    tiny_run(folder / "run", *STEPS, f"trainer.rollout_data_dir={folder / 'rollouts'}")
    return folder


def replay(tmp_path, kept, *overrides):
    return tiny_run(tmp_path / "run", *STEPS, f"trainer.replay_rollouts={kept / 'rollouts'}", *overrides)


def no_engine(*args, **kwargs):
    raise AssertionError("an engine was started")


@pytest.mark.parametrize("rewards", ["stored", pytest.param("compute", marks=pytest.mark.slow)])
def test_a_replayed_run_is_the_run_that_it_replays_and_starts_no_engine(tmp_path, kept, monkeypatch, rewards):
    monkeypatch.setattr(NativeRollout, "__init__", no_engine)
    replay(tmp_path, kept, f"trainer.replay_rewards={rewards}", f"trainer.rollout_data_dir={tmp_path / 'again'}")
    assert_same_run(kept / "run", tmp_path / "run")
    (start,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "start"]
    assert start["total_steps"] == 2
    for step in (1, 2):
        assert rollout_store.read_texts(tmp_path / "again", step) == rollout_store.read_texts(kept / "rollouts", step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.top_p=0.9"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1"),
        ("trainer.controller=ray", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2"),
    ],
    ids=["ppo", "remax", "dynamic_sampling", "kl", "two_ranks"],
)
def test_a_replayed_run_of_every_kind_is_the_run_that_it_replays(tmp_path, algorithm):
    folder = tmp_path / "kept"
    tiny_run(folder / "run", *STEPS, *algorithm, f"trainer.rollout_data_dir={folder / 'rollouts'}")
    replay(tmp_path, folder, *algorithm)
    assert_same_run(tmp_path / "kept" / "run", tmp_path / "run")


def with_column(folder, step, name, change):
    """Writes a step's token file anew, with one column changed."""
    path = rollout_store.tokens_path(folder, step)
    table = pq.read_table(path)
    column = pa.array([change(value) for value in table.column(name).to_pylist()], table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


@pytest.mark.slow
@pytest.mark.parametrize(("rewards", "factor"), [("stored", 3.0), ("compute", 1.0)])
def test_scores_are_those_that_were_kept_or_those_of_the_reward_function(tmp_path, kept, rewards, factor):
    folder = copied(kept, tmp_path)
    with_column(folder / "rollouts", 1, "token_level_scores", lambda scores: [3.0 * score for score in scores])
    replay(tmp_path, folder, f"trainer.replay_rewards={rewards}")
    scores = [logged(run / "run")[0]["critic/score/mean"] for run in (tmp_path, kept)]
    assert scores[0] == pytest.approx(factor * scores[1])


@pytest.mark.slow
def test_another_loss_is_tried_on_the_same_responses(tmp_path, kept):
    replay(tmp_path, kept, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "trainer.total_training_steps=1")
    ours, theirs = logged(tmp_path / "run")[0], logged(kept / "run")[0]
    assert ours["critic/score/mean"] == theirs["critic/score/mean"]
    assert ours["actor/pg_loss"] != theirs["actor/pg_loss"]


def copied(kept, tmp_path):
    shutil.copytree(kept / "rollouts", tmp_path / "kept" / "rollouts")
    return tmp_path / "kept"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY / "model"))


def prepared(folder, tokenizer, total_steps=2):
    config = tiny_config(folder / "run", f"trainer.replay_rollouts={folder}")
    return RolloutReplay(config, tokenizer, total_steps)


def prompts_of(folder, **changes):
    """The first prompt of step 1, as the data loader gives it, for each of its samples."""
    first = rollout_store.read_tokens(folder, 1, [0])[0]
    ids = torch.tensor(first["prompt_ids"], dtype=torch.int64).expand(2, -1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": ids >= 0,
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        },
        non_tensors={"uid": object_array([first["uid"]] * 2), "sample_index": object_array([0, 1])} | changes,
    )


def test_prompts_that_do_not_fit_are_a_sentence(tmp_path, kept, tokenizer):
    folder = copied(kept, tmp_path) / "rollouts"
    batch = prepared(folder, tokenizer).respond(prompts_of(folder), 1)
    assert batch.tensors["response_mask"].any(-1).all()
    with pytest.raises(DataError, match=r"The prompts come in another order, or are others: data.train_files"):
        prepared(folder, tokenizer).respond(prompts_of(folder, uid=object_array(["epoch0-x", "epoch0-x"])), 1)
    with pytest.raises(DataError, match=r"has no sample 2 of prompt epoch0-\d+, which step 1 draws"):
        prepared(folder, tokenizer).respond(prompts_of(folder, sample_index=object_array([0, 2])), 1)
    with pytest.raises(DataError, match=r"3\.tokens\.parquet is missing: there are no responses of step 3"):
        prepared(folder, tokenizer).respond(prompts_of(folder), 3)
    batch = prompts_of(folder)
    with_column(folder, 1, "prompt_ids", lambda ids: [*ids[:-1], ids[-1] + 1])
    with pytest.raises(DataError, match=r"of step 1 has (\d+) tokens, and \1 in .*; they differ from token \d+ on"):
        prepared(folder, tokenizer).respond(batch, 1)
    lines = rollout_store.texts_path(folder, 2).read_text().splitlines(keepends=True)
    rollout_store.texts_path(folder, 2).write_text("".join(lines[1:]))
    with pytest.raises(DataError, match="they do not belong together"):
        prepared(folder, tokenizer).respond(prompts_of(folder), 2)


def test_a_run_that_takes_fewer_samples_is_told_of_the_others(tmp_path, kept, tokenizer, caplog):
    replay = prepared(kept / "rollouts", tokenizer)
    replay.respond(prompts_of(kept / "rollouts"), 1)
    with pytest.raises(DataError):
        replay.respond(prompts_of(kept / "rollouts"), 2)
    assert "6 of the 8 responses that are kept of step 1 were not used" in caplog.text


def test_folders_that_cannot_be_replayed_are_refused_before_workers_start(tmp_path, kept, tokenizer):
    folder = copied(kept, tmp_path) / "rollouts"
    assert prepared(folder, tokenizer).takes_scores
    with pytest.raises(ConfigError, match=r"end at step 2, and the run at step 3. Set trainer.total_training_steps=2"):
        prepared(folder, tokenizer, 3)
    with pytest.raises(ConfigError, match="there are no responses in this folder"):
        prepared(tmp_path, tokenizer)
    for path in (rollout_store.tokens_path, rollout_store.texts_path):
        shutil.copy(path(folder, 2), path(folder, 4))
    with pytest.raises(ConfigError, match="there are no responses of step 3"):
        prepared(folder, tokenizer, 4)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<more>"])
    with pytest.raises(ConfigError, match="were sampled with another tokenizer"):
        prepared(folder, tokenizer)


def test_a_few_samples_of_each_step_are_no_run_to_replay(tmp_path, kept, tokenizer):
    folder = copied(kept, tmp_path) / "rollouts"
    path = rollout_store.tokens_path(folder, 1)
    pq.write_table(pq.read_table(path).replace_schema_metadata({"burnish": '{"complete": false}'}), path)
    with pytest.raises(ConfigError, match="these are samples of a run"):
        prepared(folder, tokenizer)


@pytest.mark.slow
def test_a_validation_of_a_replayed_run_is_sampled(tmp_path, kept):
    replay(tmp_path, kept, "trainer.test_freq=2")
    name = "val-core/burnish/arithmetic/acc/mean@1"
    value = logged(tmp_path / "run")[1][name]
    (validation,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "validation"]
    assert (validation["step"], validation["metrics"][name]) == (2, value)


def test_an_engine_that_is_not_there_says_so():
    with pytest.raises(RolloutError, match="in a run without a rollout engine"):
        IdleRollout().generate([], None)
