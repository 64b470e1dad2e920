"""Runs of supervised fine-tuning: the steps are those of the definition, and what a run leaves is what any run leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import burnish
from burnish.data.sft_dataset import SFTDataset
from burnish.engine.checkpoint import read_optimizer
from burnish.render import load_tokenizer
from burnish.trainer.main_ppo import run_ppo
from burnish.trainer.ppo.checkpoints import best_checkpoint, read_manifest
from burnish.utils.errors import ConfigError, DataError, TrainingError
from tests.conftest import REPO
from tests.e2e.runs import TINY, logged, tiny_config, tiny_run
from tests.e2e.sft import PlainTrainer, rows, sft_config, sft_run

# Of its own: a cluster that runs on this machine is another test's.
TWO_RANKS = ["trainer.controller=ray", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.address=local"]
NO_SHUFFLE = "data.shuffle=false"


def items_of(given, tmp_path):
    """The rows as they are rendered."""
    config = sft_config(tmp_path / "unused")
    dataset = SFTDataset.from_rows(given, load_tokenizer(str(TINY / "model")), config.data)
    return [dataset[index] for index in range(len(dataset))]


def weights(run_dir, step):
    return load_file(run_dir / f"global_step_{step}" / "actor" / "model.safetensors")


def distance(one, other):
    """Of two states, relative to the size of the first."""
    apart = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    return float((apart / sum(value.double().square().sum() for value in one.values())).sqrt())


CUTS = {
    "one row at a time": ["data.micro_batch_size_per_gpu=1"],
    "three rows at a time": ["data.micro_batch_size_per_gpu=3"],
    "by tokens": ["data.max_token_len_per_gpu=128"],
}


OTHER_CUTS = [cut for cut in CUTS if cut != "three rows at a time"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three steps of the definition: losses, norms, the weights after them, and the loss on other rows before and after."""
    folder = tmp_path_factory.mktemp("plain")
    trainer, items = PlainTrainer(TINY / "model", lr=1e-3), items_of(rows(24), folder)
    others = items_of(rows(10, seed=1), folder)
    before = trainer.mean_loss(others)
    steps = [trainer.step(items[start : start + 8]) for start in (0, 8, 16)]
    return steps, dict(trainer.model.state_dict()), (before, trainer.mean_loss(others))


@pytest.mark.parametrize(
    "cut", ["three rows at a time", *(pytest.param(cut, marks=pytest.mark.slow) for cut in OTHER_CUTS)]
)
def test_the_steps_are_those_of_plain_transformers_however_they_are_cut(tmp_path, plain, cut):
    steps, state, validation = plain
    keys = [*CUTS[cut], NO_SHUFFLE, "trainer.total_epochs=1", "trainer.save_freq=3", "trainer.test_freq=3"]
    sft_run(tmp_path / "run", *keys, train=rows(24), val=rows(10, seed=1))
    lines = logged(tmp_path / "run")
    assert [(line["train/loss"], line["train/grad_norm"]) for line in lines[1:]] == [
        pytest.approx(step, rel=1e-4) for step in steps
    ]
    assert (lines[0]["val/loss"], lines[-1]["val/loss"]) == pytest.approx(validation, rel=1e-4)
    got = weights(tmp_path / "run", 3)
    assert distance(got, {name: state[name] for name in got}) < 1e-5
    assert lines[-1]["train/total_tokens"] == sum(line["train/num_tokens"] for line in lines[1:])
    assert lines[-1]["val/perplexity"] == pytest.approx(torch.tensor(lines[-1]["val/loss"]).exp().item(), rel=1e-5)


def test_the_validation_weighs_tokens_and_knows_its_sources(tmp_path):
    sft_run(tmp_path / "run", "trainer.val_only=true", "data.val_batch_size=3", val=rows(10))
    (line,) = logged(tmp_path / "run")
    items = items_of(rows(10), tmp_path)
    learnt = {
        source: sum(sum(item["loss_mask"]) for item in items if item["data_source"] == source)
        for source in ("short", "long")
    }
    assert line["val/num_tokens"] == sum(learnt.values())
    by_source = sum(line[f"val/loss/{source}"] * count for source, count in learnt.items()) / line["val/num_tokens"]
    assert line["val/loss"] == pytest.approx(by_source, rel=1e-9)


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["model.lora_rank=4", "checkpoint.async_save=true"], marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, layout):
    keys = [*layout, "trainer.save_freq=1", "trainer.total_epochs=2", "optim.lr_scheduler_type=cosine"]
    # Two steps an epoch: the third is inside the second one, whose order is another.
    data = {"train": rows(16), "val": rows(4, seed=1)}
    sft_run(tmp_path / "whole", *keys, "trainer.test_freq=2", **data)

    class Broken(Exception):
        pass

    def break_at_three(report):
        if report.step == 3:
            raise Broken

    with pytest.raises(Broken):
        sft_run(tmp_path / "cut", *keys, "trainer.test_freq=2", callbacks=(break_at_three,), **data)
    sft_run(tmp_path / "cut", *keys, "trainer.test_freq=2", "trainer.val_before_train=false", **data)
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    name = "adapter_model.safetensors" if layout else "model.safetensors"
    for step in (3, 4):
        one, other = (tmp_path / run / f"global_step_{step}" / "actor" for run in ("whole", "cut"))
        assert (one / name).read_bytes() == (other / name).read_bytes()
        ours, theirs = read_optimizer(one), read_optimizer(other)
        assert all(torch.equal(ours[key]["exp_avg_sq"], theirs[key]["exp_avg_sq"]) for key in ours)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(tmp_path):
    keys = ["trainer.save_freq=100", "trainer.test_freq=1", "trainer.keep_best=val/loss", "optim.lr=0.05"]
    sft_run(tmp_path / "run", *keys, "trainer.max_actor_ckpt_to_keep=1", val=rows(8, seed=1))
    losses = {line["training/global_step"]: line["val/loss"] for line in logged(tmp_path / "run")[1:]}
    best = best_checkpoint(tmp_path / "run")
    step = min(losses, key=losses.get)
    assert best.name == f"global_step_{int(step)}"
    assert read_manifest(best).metrics == {"val/loss": losses[step]}


def test_what_cannot_work_is_said_before_anything_is_loaded(tmp_path):
    with pytest.raises(DataError, match=r"data\.train_batch_size"):
        sft_run(tmp_path / "few", train=rows(3))
    with pytest.raises(ConfigError, match=r"nothing to validate on. Set data\.val_files"):
        sft_run(tmp_path / "val", "trainer.val_only=true")
    keys = ["trainer.keep_best=val/loss", "trainer.save_freq=1", "trainer.test_freq=1"]
    with pytest.raises(ConfigError, match="nothing to validate on"):
        sft_run(tmp_path / "best", *keys)
    with pytest.raises(
        ConfigError, match="trainer.keep_best=val/los: the validation has no such metric. It has val/loss"
    ):
        sft_run(tmp_path / "name", *keys, "trainer.keep_best=val/los", val=rows(8))


def test_a_run_that_learns_nothing_any_more_ends_with_a_word_about_rows(tmp_path):
    keys = ["optim.lr=1e30", "trainer.max_skipped_updates=1"]
    with pytest.raises(TrainingError, match=r"no row had a token that is learnt.*lower the learning rate \(optim.lr\)"):
        sft_run(tmp_path / "run", *keys)


@pytest.mark.slow
def test_runs_of_reinforcement_learning_and_of_this_do_not_go_on_from_each_others_checkpoints(tmp_path):
    common = ["trainer.total_training_steps=1", "trainer.save_freq=1"]
    run_ppo(tiny_config(tmp_path / "rl", *common), quiet=True)
    sft_run(tmp_path / "sft", *common)

    def from_run(name):
        return [
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={tmp_path / name / 'global_step_1'}",
        ]

    with pytest.raises(ConfigError, match="of a run of reinforcement learning"):
        sft_run(tmp_path / "sft2", *from_run("rl"))
    with pytest.raises(ConfigError, match="of a run of supervised fine-tuning"):
        run_ppo(tiny_config(tmp_path / "rl2", *from_run("sft")), quiet=True)


def test_the_python_call_returns_the_curve(tmp_path):
    run = burnish.sft(
        TINY / "model",
        rows(16),
        val_dataset=rows(4, seed=1),
        data={"train_batch_size": 8, "max_length": 128},
        trainer={"total_epochs": 1, "default_local_dir": tmp_path / "run", "logger": ["file"], "console": "off"},
        **{"engine.dtype": "float32", "optim.lr": 1e-3},
    )
    assert len(run.curve("train/loss")) == 2
    assert run.curve("val/loss") == [run.history[0]["val/loss"]]
    assert run.run_dir == tmp_path / "run"
    with pytest.raises(DataError, match="not a mapping such as"):
        burnish.sft(TINY / "model", [("a", "b")])


# ------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout", ["engine.fsdp_size=1", "engine.fsdp_size=-1", "engine.ulysses_sequence_parallel_size=2"]
)
def test_two_ranks_take_the_steps_of_one(tmp_path, layout):
    # Six rows of which two are long: the ranks' tokens differ, and a filler row makes their numbers even.
    common = [
        NO_SHUFFLE,
        "trainer.total_epochs=1",
        "trainer.save_freq=3",
        "data.train_batch_size=7",
        "trainer.test_freq=3",
    ]
    data = {"train": rows(21), "val": rows(5, seed=1)}
    sft_run(tmp_path / "one", *common, **data)
    sft_run(tmp_path / "two", *common, *TWO_RANKS, layout, "data.max_token_len_per_gpu=128", **data)
    assert logged(tmp_path / "two") == [pytest.approx(line, rel=1e-3, abs=1e-5) for line in logged(tmp_path / "one")]
    assert distance(weights(tmp_path / "one", 3), weights(tmp_path / "two", 3)) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_two_ranks_goes_on_with_one(tmp_path):
    common = [NO_SHUFFLE, "trainer.save_freq=1", "trainer.total_epochs=1"]
    sft_run(tmp_path / "one", *common, train=rows(24))
    sft_run(tmp_path / "two", *common, *TWO_RANKS, "trainer.total_training_steps=2", train=rows(24))
    sft_run(tmp_path / "two", *common, train=rows(24))
    assert logged(tmp_path / "two") == [pytest.approx(line, rel=1e-3, abs=1e-5) for line in logged(tmp_path / "one")]


def write(file: Path, given) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    return file


def command(*arguments):
    """What a command prints, on either stream."""
    words = [sys.executable, "-m", "burnish", *arguments]
    return subprocess.run(
        words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout


def words_of(folder: Path) -> list[str]:
    """Arguments of a run of 16 steps in ``folder / "run"``."""
    train = write(folder / "train.jsonl", rows(64))
    return [
        f"model.path={TINY / 'model'}",
        f"data.train_files={train}",
        f"data.val_files={train}",
        "data.train_batch_size=8",
        "data.max_length=128",
        "engine.dtype=float32",
        "trainer.total_epochs=2",
        "trainer.save_freq=100",
        "trainer.console=plain",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_checks_trains_stops_and_goes_on(tmp_path):
    words, run_dir = words_of(tmp_path), tmp_path / "run"
    assert "Ready to train" in command("check", "--sft", *words)
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish.trainer.sft", *words, "trainer.total_training_steps=100000"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2"):
            process.send_signal(signal.SIGTERM)
            break
    ending = process.stdout.read()
    assert process.wait() == 143
    assert "is saved" in ending
    (saved,) = run_dir.glob("global_step_*")
    # In a process of its own, which another one would start again.
    told = command("sft", *words, "optim.num_cycles=2", "trainer.max_restarts=1")
    assert "Finished after step 16" in told
    assert "optim.num_cycles=2" in told
    assert "resume" in {json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()}
    assert saved.is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_reads_what_a_run_left(tmp_path):
    run_dir = tmp_path / "run"
    sft_run(run_dir, "trainer.save_freq=2", "trainer.total_training_steps=2")
    command("report", str(run_dir), "--out", str(tmp_path / "report.html"))
    assert "train/loss" in (tmp_path / "report.html").read_text()
    command("export", str(run_dir), "--out", str(tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert "1+1=" in command("generate", str(run_dir), "--prompt", "1+1=", "--max-tokens", "4")
    data = TINY / "data" / "test.jsonl"
    assert command("eval", str(run_dir), "--data", str(data), "--limit", "4", "--max-tokens", "4")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fresh_model_learns_by_supervised_fine_tuning_and_reinforcement_learning_goes_on(tmp_path):
    from transformers import AutoConfig

    fresh = tmp_path / "fresh"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY / "model")).save_pretrained(fresh)
    load_tokenizer(str(TINY / "model")).save_pretrained(fresh)
    taught = [
        {
            "messages": [
                {"role": "user", "content": f"{one}+{other}="},
                {"role": "assistant", "content": str(one + other)},
            ]
        }
        for one in range(10)
        for other in range(10)
    ]
    # Far enough to be right now and then, as a warm start is.
    steps = 60
    sft_run(
        tmp_path / "sft",
        f"model.path={fresh}",
        "data.train_batch_size=50",
        f"trainer.total_training_steps={steps}",
        "optim.lr=0.003",
        "optim.lr_scheduler_type=linear",
        f"trainer.save_freq={steps}",
        f"trainer.test_freq={steps}",
        train=taught,
        val=taught,
    )
    losses = [line["val/loss"] for line in logged(tmp_path / "sft") if "val/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    learnt = tmp_path / "sft" / f"global_step_{steps}" / "actor"
    asked = [
        {
            "prompt": row["messages"][:1],
            "data_source": "burnish/arithmetic",
            "reward_model": {"style": "rule", "ground_truth": row["messages"][1]["content"]},
        }
        for row in taught
    ]
    problems = write(tmp_path / "problems.jsonl", asked)
    keys = [
        f"data.train_files={problems}",
        "data.val_files=null",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=0.00003",
        "trainer.total_training_steps=4",
    ]
    tiny_run(tmp_path / "rl", *keys, f"actor_rollout_ref.model.path={learnt}")
    more = [f"actor_rollout_ref.model.path={fresh}", "trainer.total_training_steps=1"]
    tiny_run(tmp_path / "from_fresh", *keys, *more)
    scores = [line["critic/score/mean"] for line in logged(tmp_path / "rl")]
    # A fresh model has next to no right answer to learn from.
    assert logged(tmp_path / "from_fresh")[0]["critic/score/mean"] < 0.05
    assert min(scores) > 0.3
    assert all(line["actor/grad_norm"] > 0 and line["actor/skipped_updates"] == 0 for line in logged(tmp_path / "rl"))
