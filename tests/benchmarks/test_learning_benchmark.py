"""The comparison of learning: both sides are told the same, measured alike, and judged by a test that can say no."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from benchmarks import models
from benchmarks.grpo_work import GRPOWork, prompt_texts
from benchmarks.learning import __main__ as learning
from benchmarks.learning import sides
from benchmarks.learning.verdict import CONFIDENCE, figures, verdict, welch
from benchmarks.learning.work import (
    ROOT,
    LearningWork,
    map_table,
    merged,
    read_rows,
    reward_function,
    score_of,
    settings,
    words,
    write_rows,
)
from benchmarks.peers import verl_engine, verl_run
from benchmarks.peers.client import PeerError
from benchmarks.results import read_result
from burnish.config import load_config

REWARD = "burnish.reward.functions.arithmetic:compute_score"
TINY = ROOT / "examples" / "tiny_model"


def work(**changes) -> LearningWork:
    """A small run of the tiny model."""
    return LearningWork(
        **{
            "model": str(TINY / "model"), "train_file": "train.jsonl", "val_file": "val.jsonl", "reward": REWARD, "prompts": 4,
            "samples": 2, "prompt_length": 32, "response_length": 8, "steps": 3, "lr": 3e-4, "seed": 7, "save_every": 2,
            "micro_batch_rows": 4, "device": "cpu", "dtype": "float32", **changes,
        }
    )  # fmt: skip


def run(seed: int, *accuracies: float, reward: float = 0.5) -> dict:
    """A run with these accuracies at steps 0, 10, 20, ..."""
    return {
        "seed": seed,
        "curve": [[10 * n, accuracy] for n, accuracy in enumerate(accuracies)],
        "train_reward": [reward, reward],
        "before": {"accuracy": accuracies[0], "low": 0.0, "high": 1.0, "num_prompts": 8, "samples": 1},
        "after": {"accuracy": accuracies[-1], "low": 0.0, "high": 1.0, "num_prompts": 8, "samples": 1},
        "stage_seconds": {"step": 2.0, "gen": 1.0, "update_actor": 0.5},
        "process_gib": 1.5,
        "cpu_seconds": 20.0,
        "prompt_tokens": [12, 13],
    }


# ---------------------------------------------------------------------------------------- the same settings for all


def test_burnish_takes_every_setting_of_the_map_and_means_it():
    config = load_config(
        [
            "data.train_files=null",
            "actor_rollout_ref.model.path=x",
            *words(merged(work(kl=0.01, updates=2), "burnish")),
        ],
        train_rows_given=True,
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (2, 4, 2)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.lr_warmup_steps) == (3e-4, 0.0, 0)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.loss_agg_mode) == (True, 0.01, "token-mean")
    assert config.data.shuffle is False
    assert config.trainer.total_training_steps == 3


def test_a_peers_updates_and_micro_batches_are_those_of_burnish():
    trl = merged(work(prompts=8, samples=4, updates=2, micro_batch_rows=4), "trl")
    # 32 rows a step, 16 an update, in four micro-batches.
    assert (trl["gradient_accumulation_steps"], trl["steps_per_generation"], trl["max_steps"]) == (4, 8, 6)
    verl = merged(work(prompts=8, samples=4, updates=2), "verl")
    assert (verl["actor_rollout_ref.actor.ppo_mini_batch_size"], verl["trainer.total_training_steps"]) == (4, 3)


def test_sizes_that_no_side_can_cut_are_refused_with_the_number():
    with pytest.raises(ValueError, match="4 prompts a step cannot be cut into 3 updates"):
        work(updates=3).check()
    with pytest.raises(ValueError, match="An update of 8 rows cannot be cut into micro-batches of 3 rows"):
        work(micro_batch_rows=3).check()


def test_every_setting_is_in_the_table_of_the_map():
    table = map_table(work())
    assert len(table.splitlines()) == 2 + len(settings(work()))
    assert "`loss_type=dapo`" in table
    assert "epsilon is 1e-6 in burnish and verl, 1e-4 in TRL" in table


def test_the_page_shows_the_map_that_runs():
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    args = learning.parse(["--task", "tiny"])
    task = args.settings
    shown = work(**{name: task[name] for name in learning.SIZES if name in task}, seed=1)
    assert map_table(shown) in page


def test_the_page_shows_the_tables_of_every_result_that_is_kept():
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "results").glob("learning-*.json")):
        name, _, peer = path.stem.removeprefix("learning-").rpartition("-")
        if name.endswith("beside"):
            continue
        args = learning.parse(["--peer", peer, "--name", name, "--out", str(path.parent), "--show"])
        runs = learning.kept(args)
        table = learning.table(runs, verdict(runs["burnish"], runs[peer]))
        assert table in page, (
            f"put into docs/comparison.md what --peer {peer} --name {name} --out docs/results --show prints"
        )


def test_rows_are_in_an_order_of_the_seed_and_each_comes_before_any_comes_twice(tmp_path):
    source, target = tmp_path / "rows.jsonl", tmp_path / "target.jsonl"
    source.write_text("\n".join(json.dumps({"n": n}) for n in range(5)) + "\n")

    def order(count: int, seed: int) -> list[int]:
        write_rows(source, target, count, seed)
        return [row["n"] for row in read_rows(str(target))]

    assert order(12, 1) == order(12, 1) != order(12, 2)
    assert sorted(order(12, 1)[:5]) == sorted(order(12, 1)[5:10]) == [0, 1, 2, 3, 4]


def test_one_reward_function_scores_for_every_side():
    row = read_rows(str(TINY / "data" / "test.jsonl"))[0]
    reward = reward_function(REWARD)
    assert score_of(reward, row, row["reward_model"]["ground_truth"]) == 1.0
    assert score_of(reward, row, "1") == 0.0


# ---------------------------------------------------------------------------------------- the verdict


def test_welchs_test_on_numbers_computed_by_hand():
    # Means 2 and 5, variances 1 and 4, three of each: standard error sqrt(1/3 + 4/3), 25/9 / (1/18 + 16/18) = 2.94 degrees.
    found = welch([1.0, 2.0, 3.0], [3.0, 5.0, 7.0], 0.95)
    assert found["difference"] == 3.0
    assert found["stderr"] == pytest.approx((5 / 3) ** 0.5)
    assert found["degrees"] == 2
    assert found["within"] == pytest.approx(4.302653 * (5 / 3) ** 0.5, rel=1e-5)


def test_a_side_that_learns_less_is_told_and_noise_is_not():
    ours = [run(1, 0.1, 0.5, 0.90), run(2, 0.1, 0.52, 0.91), run(3, 0.1, 0.51, 0.905)]
    assert verdict(ours, ours)["says"] == "alike"
    better = [run(seed, 0.1, 0.7, 0.98 + seed / 1000) for seed in (1, 2, 3)]
    said = verdict(ours, better)
    assert said["says"] == "worse"
    assert said["figures"]["after"]["says"] == "worse"
    assert said["figures"]["after"]["difference"] == pytest.approx(0.905 - 0.982)
    assert verdict(better, ours)["says"] == "better"


def test_a_figure_in_which_burnish_is_worse_is_not_outweighed_by_others():
    ours = [run(seed, 0.1, 0.5 + seed / 1000, 0.9 + seed / 1000, reward=0.3 + seed / 1000) for seed in (1, 2, 3)]
    theirs = [run(seed, 0.1, 0.3 + seed / 1000, 0.7 + seed / 1000, reward=0.6 + seed / 1000) for seed in (1, 2, 3)]
    said = verdict(ours, theirs)
    assert (said["figures"]["after"]["says"], said["figures"]["train_reward_mean"]["says"]) == ("better", "worse")
    assert said["says"] == "worse"


def test_one_seed_decides_nothing():
    assert verdict([run(1, 0.1, 0.9)], [run(1, 0.1, 0.2)])["says"] == "untested"


def test_seeds_that_would_not_show_a_large_difference_decide_nothing():
    few = [run(seed, 0.1, 0.4, 0.4 + seed / 50) for seed in (1, 2)]
    said = verdict(few, few)
    assert said["figures"]["after"]["within"] > 0.1
    assert (said["figures"]["after"]["says"], said["says"]) == ("undecided", "undecided")
    # What they do show counts.
    assert verdict(few, [run(seed, 0.1, 0.4, 0.99, reward=0.9) for seed in (1, 2)])["says"] == "worse"
    many = [run(seed, 0.1, 0.4, 0.4 + seed % 2 / 50) for seed in range(8)]
    assert verdict(many, many)["says"] == "alike"


@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_sides_that_differ_by_noise_alone_are_told_apart_no_more_often_than_is_promised(spread):
    draw = random.Random(0)

    def side() -> list[dict]:
        return [run(s, 0.1, *(draw.gauss(0.5, spread) for _ in "12"), reward=draw.gauss(0.5, spread)) for s in range(3)]

    said = [verdict(side(), side())["says"] for _ in range(400)]
    assert sum(word in ("better", "worse") for word in said) / 400 <= 1 - CONFIDENCE + 0.02
    assert said.count("alike") > 300 if spread == 0.01 else said.count("undecided") > 300


def test_step_0_is_no_part_of_what_was_learnt():
    assert figures(run(1, 0.0, 0.4, 0.6))["held_out_mean"] == pytest.approx(0.5)


# ---------------------------------------------------------------------------------------- runs and files


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The comparison with sides that are made up; gives what was run and the printed lines."""
    accuracies = {"burnish": (0.1, 0.5, 0.9), "trl": (0.1, 0.52, 0.91)}
    ran: list[tuple[str, int]] = []

    def learn(side: str, given: LearningWork, folder: Path) -> dict:
        ran.append((side, given.seed))
        assert len(read_rows(given.train_file)) == given.prompts * given.steps
        versions = {} if side == "burnish" else {"peer_versions": {"trl": "0"}}
        return {**run(given.seed, *accuracies[side], reward=0.5 + given.seed / 100), **versions}

    monkeypatch.setattr(learning, "learn", learn)

    def call(*arguments: str) -> list[tuple[str, int]]:
        fixed = ["--task", "tiny", "--device", "cpu", "--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["learning", *fixed, *arguments])
        ran.clear()
        learning.main()
        return list(ran)

    return call


def test_each_seed_runs_on_both_sides_and_both_results_are_kept(compare, capsys, tmp_path):
    assert compare("--seeds", "1", "2", "--json") == [("burnish", 1), ("trl", 1), ("burnish", 2), ("trl", 2)]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["says"] == "alike" or told["verdict"]["figures"]["after"]["difference"] == pytest.approx(-0.01)
    assert told["sides"]["trl"]["seeds"] == [1, 2]
    theirs = read_result(tmp_path / "out" / "learning-tiny-trl.json")
    ours = read_result(tmp_path / "out" / "learning-tiny-burnish-beside-trl.json")
    assert (theirs["title"], ours["title"]) == ("TRL 0", "burnish")
    assert theirs["verdict"]["figures"]["after"]["peer"] == pytest.approx(0.91)
    assert [each["seed"] for each in ours["runs"]] == [1, 2]


def test_what_is_kept_is_drawn_without_a_run(compare, tmp_path):
    compare("--seeds", "1", "2")
    figure = tmp_path / "out" / "learning-tiny-trl.png"
    assert not figure.exists()
    assert compare("--show", "--plot") == []
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_what_a_side_cannot_measure_is_left_out_and_no_table_is_without_rows(compare, monkeypatch, capsys, tmp_path):
    learn = learning.learn

    def uncounted(side: str, given: LearningWork, folder: Path) -> dict:
        found = learn(side, given, folder)
        return {key: value for key, value in found.items() if key not in ("cpu_seconds", "process_gib", "gpu_gib")}

    monkeypatch.setattr(learning, "learn", uncounted)
    compare("--seeds", "1", "--side-by-side", "2", "--json")
    told = capsys.readouterr().out
    assert "mean over seeds" not in told
    assert json.loads(told.splitlines()[-1])["sides"]["trl"]["cpu_seconds"] == [None]


@pytest.mark.parametrize("side", ["burnish", "trl", "verl"])
def test_seconds_of_cpu_are_told_where_the_program_itself_does_the_work(side, monkeypatch, tmp_path):
    given = work(steps=1, save_every=1)
    monkeypatch.setattr(sides, "execute", lambda *_: {"cpu_seconds": 5.0})
    for name in ("burnish_run", "peer_run"):
        monkeypatch.setattr(sides, name, lambda *_: {"steps": 1})
    monkeypatch.setattr(sides, "accuracy", lambda *_: {"accuracy": 0.5})
    monkeypatch.setattr(sides, "interpreter", lambda _: sys.executable)
    monkeypatch.setattr(sides.shutil, "rmtree", lambda *_, **__: None)
    # Ray's processes are nobody's children that are waited for.
    assert sides.learn(side, given, tmp_path / side).get("cpu_seconds") == (None if side == "verl" else 5.0)


def test_seeds_add_up_over_calls_and_other_work_is_not_mixed_in(compare, tmp_path):
    compare("--seeds", "1")
    assert compare("--seeds", "1", "2", "--add") == [("burnish", 2), ("trl", 2)]
    theirs = read_result(tmp_path / "out" / "learning-tiny-trl.json")
    assert [each["seed"] for each in theirs["runs"]] == [1, 2]
    with pytest.raises(SystemExit, match="of other work"):
        compare("--seeds", "3", "--add", "--lr", "1e-3")
    with pytest.raises(SystemExit, match="of other work"):
        compare("--seeds", "3", "--add", "--train", str(TINY / "data" / "test.jsonl"))
    path = tmp_path / "out" / "learning-tiny-trl.json"
    path.write_text(path.read_text().replace('"machine":"', '"machine":"another '))
    with pytest.raises(SystemExit, match="of another machine"):
        compare("--seeds", "3", "--add")


def test_seeds_that_another_call_added_meanwhile_are_kept(compare, monkeypatch, tmp_path):
    learn = learning.learn

    def slow(side: str, given: LearningWork, folder: Path) -> dict:
        if (side, given.seed) == ("trl", 1):
            monkeypatch.setattr(learning, "learn", learn)
            compare("--seeds", "2", "--add")
        return learn(side, given, folder)

    monkeypatch.setattr(learning, "learn", slow)
    compare("--seeds", "1", "--add")
    for side in ("trl", "burnish-beside-trl"):
        found = read_result(tmp_path / "out" / f"learning-tiny-{side}.json")
        assert [each["seed"] for each in found["runs"]] == [1, 2]


def test_several_runs_at_once_are_told_as_such_and_one_that_fails_leaves_the_others(compare, monkeypatch, tmp_path):
    learn, all_are_there = learning.learn, threading.Barrier(4)

    def together(side: str, given: LearningWork, folder: Path) -> dict:
        all_are_there.wait(20)
        if (side, given.seed) == ("trl", 1):
            raise PeerError("of seed 1")
        return {**learn(side, given, folder), "gpu_gib": 9.0}

    monkeypatch.setattr(learning, "learn", together)
    with pytest.raises(PeerError, match="of seed 1"):
        compare("--seeds", "1", "2", "--at-once", "4")
    for side in ("trl", "burnish-beside-trl"):
        (found,) = read_result(tmp_path / "out" / f"learning-tiny-{side}.json")["runs"]
        assert (found["seed"], found["side_by_side"]) == (2, 4)
        # Of all programs on the device.
        assert "gpu_gib" not in found


def test_after_a_failure_no_further_seed_is_begun(compare, monkeypatch):
    ran = []

    def fails(side: str, given: LearningWork, folder: Path) -> dict:
        ran.append(given.seed)
        # That of the first one is noticed while the next one runs.
        time.sleep(0.3 if len(ran) > 1 else 0.0)
        raise PeerError("of a seed")

    monkeypatch.setattr(learning, "learn", fails)
    with pytest.raises(PeerError, match="of a seed"):
        compare("--seeds", *map(str, range(1, 11)))
    assert len(ran) < 20


def test_more_of_a_peers_configuration_reaches_it_alone_and_is_told(compare, tmp_path):
    given = work(peer_settings={"vllm_mode": "colocate"})
    assert merged(given, "trl")["vllm_mode"] == "colocate"
    assert "vllm_mode" not in merged(given, "burnish")
    with pytest.raises(ValueError, match="beta is"):
        merged(work(peer_settings={"beta": 0.5}), "trl")
    compare("--seeds", "1", "--peer-set", "dataloader_num_workers=0")
    assert read_result(tmp_path / "out" / "learning-tiny-trl.json")["work"]["peer_settings"] == {
        "dataloader_num_workers": 0
    }
    with pytest.raises(SystemExit, match="of other work"):
        compare("--seeds", "2", "--add")


def test_tables_of_what_is_kept_are_those_of_the_run_and_cost_none(compare, capsys):
    compare("--seeds", "1", "2")
    told = capsys.readouterr().out.splitlines()
    assert compare("--show") == []
    shown = capsys.readouterr().out.splitlines()
    assert shown == told[-len(shown) :]
    with pytest.raises(SystemExit, match=r"has no learning-other-trl\.json"):
        compare("--show", "--name", "other")


def test_seconds_of_the_clock_are_told_only_of_runs_that_were_alone(compare, capsys):
    compare("--seeds", "1", "2")
    assert "| seconds a step, median | 2 | 2 | 1.00 |" in capsys.readouterr().out
    compare("--seeds", "1", "2", "--side-by-side", "2")
    told = capsys.readouterr().out
    assert "seconds a step" not in told
    assert "| seconds of CPU of the whole program | 20 | 20 | 1.00 |" in told


def test_a_variant_is_burnish_with_what_was_given_for_the_peer_and_nothing_else(tmp_path):
    given = work(peer_settings={"data.shuffle": True, "actor_rollout_ref.rollout.top_k": 5})
    plain, variant = (sides.burnish_command(side, given, tmp_path) for side in sides.OURS)
    assert set(variant) - set(plain) == {"data.shuffle=true", "actor_rollout_ref.rollout.top_k=5"}
    assert set(plain) - set(variant) == {"data.shuffle=false", "actor_rollout_ref.rollout.top_k=-1"}


def test_a_variant_needs_something_in_which_it_differs(capsys):
    with pytest.raises(SystemExit):
        learning.parse(["--peer", "variant", "--device", "cpu"])
    assert "none are given: add --peer-set" in capsys.readouterr().err


def test_verl_is_refused_on_a_cpu_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        learning.parse(["--peer", "verl", "--device", "cpu"])
    assert "no training engine and no rollout for a CPU" in capsys.readouterr().err


def test_sides_that_got_other_prompts_are_no_comparison():
    runs = {"burnish": run(1, 0.1, 0.2), "trl": {**run(1, 0.1, 0.2), "prompt_tokens": [12, 14]}}
    with pytest.raises(RuntimeError, match="step 2 has 13 tokens of prompts in one and 14 in the other"):
        sides.check_alike(runs)
    sides.check_alike({**runs, "trl": run(1, 0.1, 0.2)})


def test_a_program_that_fails_is_told_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "log.txt"
    with pytest.raises(PeerError, match=r"(?s)ended with code 3.*what went wrong"):
        sides.execute([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], log, "cpu")


def test_memory_of_a_program_is_its_own_and_not_that_of_who_started_it(tmp_path):
    held = bytearray(600 << 20)
    memory = sides.execute([sys.executable, "-c", "data = bytearray(200 << 20)"], tmp_path / "log.txt", "cpu")
    assert len(held) == 600 << 20
    assert 0.19 < memory["process_gib"] < 0.5
    assert 0 < memory["cpu_seconds"] < 60


def test_memory_of_a_gpu_is_what_comes_on_top_of_what_was_in_use(monkeypatch):
    used, seen = iter([2.0, 9.0, 5.0]), threading.Event()

    def look() -> float:
        value = next(used, None)
        if value is None:
            seen.set()
        return 4.0 if value is None else value

    monkeypatch.setattr(sides, "gpu_memory_used", look)
    watch = sides.GPUMemory()
    assert seen.wait(60)
    assert watch.stop() == 7.0


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("1", "1"), ("GPU-ab, 0", "GPU-ab")])
def test_the_driver_is_asked_for_the_gpu_that_programs_take(visible, asked, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --id={asked} ] && echo 2048 || echo unknown\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sides.gpu_memory_used() == 2.0


def test_a_peers_run_is_read_from_its_steps(tmp_path):
    lines = [
        {
            "step": n,
            "mean_score": n / 10,
            "tokens": 20,
            "prompt_tokens": 6,
            "seconds": {"step": n + 1.0, "gen": float(n)},
        }
        for n in (1, 2, 3)
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "facts.json").write_text('{"trl": "1"}')
    found = sides.peer_run(work(), tmp_path)
    assert found["train_reward"] == [0.1, 0.2, 0.3]
    # The first step warms up.
    assert found["stage_seconds"] == {"step": 3.5, "gen": 2.5}
    with pytest.raises(PeerError, match="3 steps where 5 were asked for"):
        sides.peer_run(work(steps=5), tmp_path)


# ---------------------------------------------------------------------------------------- verl


def test_a_trl_that_verl_cannot_use_is_named_before_verl_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.16.0"))
    with pytest.raises(RuntimeError, match="TRL 1.16.0 is installed beside verl"):
        verl_run.start({}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_for_verl_has_its_line_break_and_end_of_turn_and_the_same_words(tmp_path):
    shutil.copytree(models.word_tokenizer_path(50), tmp_path, dirs_exist_ok=True)
    verl_engine.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") >= 50
    prompt = [{"role": "user", "content": "17 18 19"}]
    assert tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) == [17, 18, 19]


def verl_line(step: int, **metrics: float) -> str:
    data = {
        "timing_s/step": 4.0, "timing_s/save_checkpoint": 1.0, "timing_s/gen": 2.0, "critic/score/mean": 0.25,
        "response_length/mean": 3.0, "prompt_length/mean": 5.0, "actor/grad_norm": 0.5, **metrics,
    }  # fmt: skip
    return json.dumps({"step": step, "data": data})


def test_verls_steps_are_read_as_they_come_without_its_saves(tmp_path):
    assert verl_run.read_steps(tmp_path) == []
    half = verl_line(2)[:40]
    (tmp_path / "metrics.jsonl").write_text(f'{{"step":0,"data":{{"val":1}}}}\n{verl_line(1)}\n{half}')
    (step,) = verl_run.read_steps(tmp_path)
    figures_of_it = verl_run.step_figures(step, num_rows=8)
    assert figures_of_it["seconds"] == {"step": 3.0, "gen": 2.0}
    assert (figures_of_it["tokens"], figures_of_it["prompt_tokens"], figures_of_it["mean_score"]) == (24, 40, 0.25)


def test_a_step_of_verl_without_a_gradient_is_no_result():
    small = GRPOWork(prompts=4, samples=2, prompt_length=5, response_length=3)
    metrics = {"step": 1, **json.loads(verl_line(1))["data"]}
    found = verl_engine.answer(metrics, small)
    assert (found["seconds"], found["tokens"], found["stages"]) == (3.0, 24, {"gen": 2.0})
    with pytest.raises(RuntimeError, match="gradient of norm 0"):
        verl_engine.answer({**metrics, "actor/grad_norm": 0.0}, small)


def test_verl_reads_the_same_prompts_as_the_others_through_a_template_that_adds_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path / "models"))
    given = GRPOWork(prompts=2, samples=2, prompt_length=5, response_length=3)
    settings_of_it = {"vocab_size": 1000, "tokenizer": models.word_tokenizer_path(1000)}
    (tmp_path / "run").mkdir()
    verl_engine.write_data(settings_of_it, given, tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "train.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    texts = prompt_texts(given, 1000, 2)
    assert len(rows) == verl_engine.MOST_STEPS * given.prompts
    for row, text in zip(rows, texts, strict=False):
        found = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        assert found == text == row["prompt"][0]["content"]


COMPOSE = """
import json, os, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import verl
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
with initialize_config_dir(os.path.join(os.path.dirname(verl.__file__), "trainer", "config"), version_base=None):
    config = compose("ppo_trainer", overrides=json.loads(sys.argv[1]))
validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
fused = [actor.use_fused_kernels, config.actor_rollout_ref.model.fused_kernel_options.impl_backend]
told = [actor.loss_agg_mode, actor.optim.lr, actor.clip_ratio_c, need_critic(config), config.trainer.use_v1]
print(json.dumps(told + fused))
"""


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".peers" / "verl" / ".done").exists(), reason="verl is not installed: make bench-peers")
@pytest.mark.parametrize("what", ["learning", "step"])
def test_verls_own_configuration_takes_what_it_is_told(tmp_path, what):
    if what == "learning":
        told = verl_run.run_settings(tmp_path, model="x", tokenizer=None, micro_batch_rows=4, engine_memory=0.3)
        told |= merged(work(device="cuda", dtype="bfloat16"), "verl")
        expected = ["token-mean", 3e-4, 1e9, False, True]
    else:
        given = GRPOWork(prompts=4, samples=2, prompt_length=5, response_length=3)
        told = verl_engine.overrides(
            {
                "model": "x", "micro_batch_size": 4, "vllm_memory": 0.3, "lr": 1e-5, "gradient_checkpointing": False,
                "trainer": "v0",
            },
            given, tmp_path,
        )  # fmt: skip
        expected = ["token-mean", 1e-5, 3.0, False, False]
    python = ROOT / ".peers" / "verl" / "bin" / "python"
    done = subprocess.run([python, "-c", COMPOSE, json.dumps(words(told))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [*expected, True, "torch"]


# ---------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_burnish_learns_and_is_measured(tmp_path):
    write_rows(TINY / "data" / "train.jsonl", tmp_path / "train.jsonl", 12, 1)
    write_rows(TINY / "data" / "test.jsonl", tmp_path / "val.jsonl", 16, 1)
    given = work(train_file=str(tmp_path / "train.jsonl"), val_file=str(tmp_path / "val.jsonl"))
    found = sides.learn("burnish", given, tmp_path / "burnish")
    assert [step for step, _ in found["curve"]] == [0, 2, 3]
    assert (found["seed"], found["steps"], len(found["train_reward"]), len(found["prompt_tokens"])) == (7, 3, 3, 3)
    assert found["process_gib"] > 0.1
    assert not list((tmp_path / "burnish").rglob("*.safetensors"))
    # The same seed, and a setting that changes nothing; then one that does.
    same, other = (
        sides.learn("variant", replace(given, peer_settings=settings), tmp_path / "variant")
        for settings in ({"trainer.logger": ["file"]}, {"actor_rollout_ref.actor.optim.lr": 0.0})
    )
    assert same["train_reward"] == found["train_reward"]
    assert (same["before"], same["after"]) == (found["before"], found["after"])
    assert other["train_reward"][0] == found["train_reward"][0]
    assert other["after"] == other["before"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".peers" / "trl" / ".done").exists(), reason="TRL is not installed: make bench-peers")
def test_trl_is_given_the_same_prompts(tmp_path):
    write_rows(TINY / "data" / "train.jsonl", tmp_path / "train.jsonl", 12, 1)
    write_rows(TINY / "data" / "test.jsonl", tmp_path / "val.jsonl", 16, 1)
    given = work(train_file=str(tmp_path / "train.jsonl"), val_file=str(tmp_path / "val.jsonl"))
    pair = {side: sides.learn(side, given, tmp_path / side) for side in ("burnish", "trl")}
    sides.check_alike(pair)
    assert pair["burnish"]["before"] == pair["trl"]["before"]
    assert pair["trl"]["stage_seconds"]["step"] > 0
