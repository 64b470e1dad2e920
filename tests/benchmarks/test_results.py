"""Results of runs: what is read from a folder, what is kept, what is told."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import recipes, results
from benchmarks.results import figures, pages, plots
from burnish.trainer.statistics import interval

SOURCE = "val-core/toy/acc/mean@1"


def line(step, **metrics):
    return {"step": step, "val-aux/toy/num_prompts": 200.0, **metrics}


def step_line(step, gen, update, **metrics):
    return line(
        step,
        **{
            "timing_s/step": gen + update + 0.5, "timing_s/gen": gen, "timing_s/update_actor": update,
            "perf/rollout/response_tokens": 1000.0, "perf/total_num_tokens": 6000.0, "perf/mfu/actor": 0.25,
            "critic/score/mean": step / 10, "perf/max_memory_allocated_gb": 3.0 + step, "perf/max_memory_reserved_gb": 9.0,
        },
        **metrics,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        line(0, **{SOURCE: 0.1}),
        step_line(1, 50.0, 50.0),  # warms up
        step_line(2, 2.0, 3.0, **{SOURCE: 0.25}),
        step_line(3, 4.0, 5.0),
        step_line(4, 100.0, 100.0, **{"training/failed": 1}),
        step_line(4, 2.0, 3.0, **{SOURCE: 0.4}),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "half')
    events = [{"time": 10.0, "kind": "start"}, {"time": 100.0, "kind": "start"}, {"time": 160.0, "kind": "end"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    origins = {
        "trainer.seed": {"value": 7, "origin": "command line"},
        "trainer.default_local_dir": {"value": str(folder), "origin": "command line"},
        "actor_rollout_ref.model.path": {"value": "/somewhere/else/smollm2", "origin": "command line"},
        "actor_rollout_ref.model.tokenizer_path": {"value": "x", "origin": "follows actor_rollout_ref.model.path"},
        "actor_rollout_ref.rollout.n": {"value": 8, "origin": "recipe grpo"},
        "data.shuffle": {"value": True, "origin": "default"},
    }
    (folder / "config_origin.json").write_text(json.dumps(origins))
    return folder


def made(seed, after, **more):
    return {
        "seed": seed,
        "curve": [[0, 0.1], [5, 0.2 + seed / 100], [10, after]],
        "before": {"accuracy": 0.1, "low": 0.07, "high": 0.15, "num_prompts": 200},
        "after": {"accuracy": after, "low": after - 0.05, "high": after + 0.05, "num_prompts": 200},
        "train_reward": [0.1, 0.2, 0.3],
        "what_ran": {"lr": 1e-5, "trainer.seed": seed},
        "stage_seconds": {"step": 2.0, "gen": 1.0, "update_actor": 0.5, "adv": 0.01, "testing": 9.0},
        **more,
    }


def test_a_runs_figures_come_from_its_finished_steps_without_the_first(run_dir):
    run = results.read_run(run_dir)
    assert (run["seed"], run["steps"], run["side_by_side"]) == (7, 4, 1)
    assert run["curve"] == [[0, 0.1], [2, 0.25], [4, 0.4]]
    assert run["train_reward"] == [0.1, 0.2, 0.3, 0.4]
    assert run["stage_seconds"] == {"gen": 2.0, "step": 5.5, "update_actor": 3.0}
    assert run["response_tokens_per_s"] == 500
    assert run["trained_tokens_per_s"] == 2000
    assert run["mfu"] == {"actor": 0.25}
    assert run["memory_gib"] == {"gpu_allocated": 7.0, "gpu_reserved": 9.0}
    assert run["seconds"] == 60  # since the last start
    assert run["train_seconds"] == 100.5 + 5.5 + 9.5 + 5.5
    assert (run["before"]["accuracy"], run["after"]["accuracy"], run["after"]["num_prompts"]) == (0.1, 0.4, 200)


def test_what_ran_is_what_was_set_without_the_paths_of_one_computer(run_dir):
    assert results.read_run(run_dir)["what_ran"] == {
        "trainer.seed": 7,
        "actor_rollout_ref.model.path": ".../smollm2",
        "actor_rollout_ref.rollout.n": 8,
    }


def test_a_run_that_begins_elsewhere_has_no_accuracy_before(run_dir):
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    run = results.read_run(run_dir)
    assert "before" not in run
    assert run["after"]["accuracy"] == 0.4


def test_a_folder_without_a_finished_step_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no such file; the folder is not that of a run"):
        results.read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="no finished step"):
        results.read_run(tmp_path)


def test_the_accuracys_interval_is_that_of_burnish_eval():
    right = np.array([1.0] * 60 + [0.0] * 140)
    expected = interval(right, num_responses=200)
    found = results.accuracy_interval(0.3, 200)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    # Four responses to a prompt, all alike, are one; those that vary within a prompt are up to four.
    alike = results.accuracy_interval(0.3, 200, stderr=float(right.std(ddof=1) / np.sqrt(200)), samples=4)
    assert alike == pytest.approx(found, abs=1e-9)
    varying = results.accuracy_interval(0.3, 200, stderr=0.01, samples=4)
    assert varying["high"] - varying["low"] < 0.6 * (found["high"] - found["low"])
    assert varying == results.accuracy_interval(0.3, 800)


def test_several_sources_are_one_mean_over_prompts():
    found = figures.held_out(
        {
            "val-core/a/b/acc/mean@1": 1.0, "val-aux/a/b/num_prompts": 30.0, "val-core/c/reward/mean@1": 0.0,
            "val-aux/c/num_prompts": 10.0, "val-core/c/reward/best@4/mean": 1.0,
        }
    )  # fmt: skip
    assert found is not None
    assert (found["accuracy"], found["num_prompts"]) == (0.75, 40)
    assert figures.held_out({"step": 3}) is None


def test_the_summary_has_students_interval_over_seeds_and_speeds_of_runs_that_were_alone():
    runs = [made(1, 0.3), made(2, 0.4, seconds=50.0), made(3, 0.5, seconds=900.0, side_by_side=3)]
    summary = results.summarize(runs)
    assert summary["after"]["mean"] == pytest.approx(0.4)
    # t with two degrees of freedom is 4.303.
    assert summary["after"]["high"] - 0.4 == pytest.approx(4.303 * 0.1 / np.sqrt(3), rel=1e-3)
    assert summary["gain"]["values"] == pytest.approx([0.2, 0.3, 0.4])
    assert summary["seconds"]["values"] == [50.0]
    assert summary["curve"][1] == pytest.approx({"step": 5, "mean": 0.22, "min": 0.21, "max": 0.23})
    shared = results.summarize([made(1, 0.3, seconds=5.0, side_by_side=2)])
    assert shared["after"]["low"] is None
    assert not {"seconds", "stage_seconds"} & set(shared)


def test_a_seed_that_was_read_back_is_the_number_that_a_new_one_has(tmp_path):
    path = results.write_result("toy", [made(1, 1 / 3)], folder=tmp_path)
    found = results.summarize([*results.read_result(path)["runs"], made(2, 1 / 3)])["after"]
    assert found["values"] == [0.33333, 0.33333]
    assert found["low"] is None  # no interval of a mean where nothing differs


def test_a_curve_has_the_steps_that_all_seeds_have():
    curve = results.mean_curve([[[0, 0.0], [5, 0.2], [9, 0.3]], [[0, 0.0], [5, 0.4], [10, 0.6]]])
    assert [point["step"] for point in curve] == [0, 5]
    assert curve[1]["mean"] == pytest.approx(0.3)


def test_a_result_comes_back_as_it_was_written(tmp_path):
    runs = [made(2, 0.4), made(1, 1 / 3)]
    path = results.write_result("toy", runs, extra={"title": "Toy"}, folder=tmp_path)
    text = path.read_text()
    assert text.count("1e-05") == 1  # what all runs have in common stands there once
    result = results.read_result(path)
    assert [run["seed"] for run in result["runs"]] == [1, 2]
    assert result["runs"][0]["after"]["accuracy"] == 0.33333
    assert [run["what_ran"] for run in result["runs"]] == [made(1, 0)["what_ran"], made(2, 0)["what_ran"]]
    assert result["title"] == "Toy"
    assert {"machine", "commit", "versions", "command", "date", "summary"} <= set(result)
    # What was printed on another machine is the same file here.
    (copy,) = results.save_printed("noise\n" + text + "more noise\n", tmp_path / "copy")
    assert copy.read_text() == text


@pytest.mark.parametrize(
    ("runs", "extra", "words"),
    [
        ([], {}, "no run"),
        ([made(1, 0.5)], {"summary": 1}, "keys summary"),
        ([made(1, 0.5, train_reward=list(np.linspace(0, 1, 20_000)))], {}, "bytes are more than"),
    ],
)
def test_what_is_no_result_is_refused(runs, extra, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        results.write_result("toy", runs, extra=extra, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_printed_result_cannot_name_another_folder(tmp_path):
    with pytest.raises(ValueError, match="not the name of a result"):
        results.save_printed('{"name":"../toy"}', tmp_path)
    with pytest.raises(ValueError, match="There is no result in it"):
        results.save_printed("nothing", tmp_path)


def test_the_table_has_means_with_intervals_and_leaves_out_what_is_not_known(tmp_path):
    several = results.write_result("a", [made(1, 0.3), made(2, 0.5)], extra={"title": "A"}, folder=tmp_path)
    started = results.write_result(
        "c", [made(1, 0.3, base={"accuracy": 0.02, "low": 0.0, "high": 0.05})], folder=tmp_path
    )
    single = results.write_result("b", [made(1, 0.3, stage_seconds={})], folder=tmp_path)
    _, _, first, second, third = results.table([several, single, started]).splitlines()
    assert third.startswith("| c | 1 | 2.0 % (0.0, 5.0) base, then 10.0 % (7.0, 15.0) | 30.0 %")
    assert first.startswith(
        "| A | 2 | 10.0 % (7.0, 15.0) | 40.0 % (0.0, 100.0) |  | 2.00: gen 1.00, update_actor 0.50 |"
    )
    assert second.startswith("| b | 1 | 10.0 % (7.0, 15.0) | 30.0 % (25.0, 35.0) |  |  |")


def test_curves_are_drawn_small(tmp_path):
    pytest.importorskip("matplotlib")
    paths = [results.write_result(name, [made(1, 0.3), made(2, 0.5)], folder=tmp_path) for name in "ab"]
    png = results.plot(paths, tmp_path / "curves" / "ab.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert 3_000 < png.stat().st_size < results.MOST_BYTES


@pytest.mark.parametrize("score", [0.2, -0.6])
def test_no_curve_lies_below_its_panel(score, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    bottoms = []

    def save(figure, png):
        bottoms.extend(axis.get_ylim()[0] for axis in figure.axes)
        png.touch()

    monkeypatch.setattr(plots, "_save", save)
    results.plot(
        [results.write_result("a", [made(1, 0.3, train_reward=[score, 0.5])], folder=tmp_path)], tmp_path / "a.png"
    )
    assert bottoms[0] == 0
    assert bottoms[1] == 0 if score > 0 else bottoms[1] <= score


def test_what_is_drawn_of_training_is_a_mean_of_the_steps_up_to_each():
    points = [(1, 1.0, 0.0, 2.0), (2, 3.0, 2.0, 4.0), (3, 8.0, 7.0, 9.0)]
    assert plots.smoothed(points, 2) == [(1, 1.0, 0.0, 2.0), (2, 2.0, 1.0, 3.0), (3, 5.5, 4.5, 6.5)]
    assert plots.smoothed(points, 1) == points


def test_pages_get_their_tables_and_figures_and_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "docs" / "results"
    for name in ("grpo-x", "ppo-x"):
        results.write_result(name, [made(1, 0.3), made(2, 0.5)], folder=folder)
    text = (
        "# Page\n<!-- results: ppo-x grpo-* -->\nold\n<!-- end of results -->\nkept\n"
        "<!-- figure: x.png of *-x -->\n<!-- end of figure -->\n<!-- results: none-* -->\n<!-- end of results -->\n"
    )
    new = pages.fill(text, tmp_path / "README.md", folder)
    assert "old" not in new
    assert new.index("| ppo-x |") < new.index("| grpo-x |") < new.index("\nkept\n")
    assert "![x: accuracy and score over the steps](docs/results/x.png)" in new
    assert (folder / "x.png").exists()
    assert "No results yet." in new
    assert f"{results.place()['machine']}, commit" in new
    assert pages.fill(new, tmp_path / "README.md", folder, draw=False) == new


# ------------------------------------------------------------------------------------------------ benchmarks.recipes


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Scripts in the recipes' place that leave a run's files; dapo.sh fails, ppo.sh never ends."""
    folder = tmp_path / "root" / "examples" / "reasoning"
    folder.mkdir(parents=True)
    row = json.dumps({**step_line(1, 1.0, 1.0), SOURCE: 0.5})
    first = json.dumps(line(0, **{SOURCE: 0.25}))
    (folder / "grpo.sh").write_text(
        f'mkdir -p "$RUN/global_step_1" && echo "$MODEL $*"\n'
        f"cat > \"$RUN/metrics.jsonl\" <<'E'\n{first}\n{row}\nE\n"
        f'echo "{{\\"trainer.seed\\": {{\\"value\\": $SEED, \\"origin\\": \\"command line\\"}}}}" > "$RUN/config_origin.json"\n'
    )
    (folder / "sft.sh").write_text((folder / "grpo.sh").read_text())
    (folder / "dapo.sh").write_text('echo "out of luck"; exit 3\n')
    (folder / "ppo.sh").write_text("exec sleep 600\n")
    (tmp_path / "root" / "models" / "smollm2").mkdir(parents=True)
    monkeypatch.setattr(recipes, "ROOT", tmp_path / "root")
    # The source tree may have the model that these tests want missing.
    monkeypatch.chdir(tmp_path / "root")
    return tmp_path


def run_recipes(scripts, monkeypatch, capsys, *words):
    places = ["--runs", str(scripts / "runs"), "--results", str(scripts / "results"), "--label=-toy"]
    monkeypatch.setattr("sys.argv", ["recipes", *words, *places])
    with pytest.raises(SystemExit) as ended:
        recipes.main()
    return ended.value.code, capsys.readouterr().out


def test_recipes_are_run_and_their_results_kept_seed_by_seed(scripts, monkeypatch, capsys):
    status, _ = run_recipes(scripts, monkeypatch, capsys, "--recipe", "grpo", "--seeds", "2", "--set", "a.b=1")
    assert status == 0
    assert "a.b=1" in (scripts / "runs" / "grpo-chain_sum-toy-2" / "run.log").read_text()
    assert not list((scripts / "runs").rglob("global_step_*"))
    words = ("--recipe", "grpo", "--seeds", "2", "1", "--skip-done", "--json")
    status, printed = run_recipes(scripts, monkeypatch, capsys, *words)
    assert status == 0
    assert "grpo:chain_sum:1:" in printed
    assert "grpo:chain_sum:2:" not in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["summary"]["seeds"] == [1, 2]
    assert result["summary"]["gain"]["mean"] == 0.25
    assert result == json.loads((scripts / "results" / "grpo-chain_sum-toy.json").read_text())


def test_a_supervised_start_is_measured_taught_and_gone_on_with(scripts, monkeypatch, capsys):
    status, printed = run_recipes(scripts, monkeypatch, capsys, "--jobs", "sft-grpo:countdown:1", "--json")
    assert status == 0, printed
    folder = scripts / "runs" / "sft-grpo-countdown-toy-1"
    assert "trainer.val_only=true" in (folder / "base.log").read_text()
    assert (folder / "run.log").read_text().startswith(str(folder / "sft" / "model"))
    (run,) = json.loads(printed.splitlines()[-1])["runs"]
    assert run["base"]["accuracy"] == 0.25


def test_a_recipe_that_fails_says_why_and_the_others_go_on(scripts, monkeypatch, capsys):
    words = ("--jobs", "dapo:chain_sum:1", "grpo:chain_sum:1", "--parallel", "2")
    status, printed = run_recipes(scripts, monkeypatch, capsys, *words)
    assert status == 1
    assert "dapo:chain_sum:1: 3 after" in printed
    assert "out of luck" in printed
    assert (scripts / "results" / "grpo-chain_sum-toy.json").exists()
    memory = "actor_rollout_ref.rollout.gpu_memory_utilization=0.30"
    assert memory in (scripts / "runs" / "grpo-chain_sum-toy-1" / "run.log").read_text()


def test_a_model_that_is_missing_is_fetched_once_for_all_jobs(scripts, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(recipes, "fetch_model", lambda: fetched.append(list((scripts / "runs").glob("*"))))
    words = ("--recipe", "grpo", "--seeds", "1", "2", "--parallel", "2")
    run_recipes(scripts, monkeypatch, capsys, *words)
    assert fetched == []
    (scripts / "root" / "models" / "smollm2").rmdir()
    run_recipes(scripts, monkeypatch, capsys, *words, "--model", "models/smollm2", "--skip-done")
    assert fetched == []
    run_recipes(scripts, monkeypatch, capsys, "--jobs", "grpo:countdown:1", "grpo:countdown:2", "--parallel", "2")
    assert len(fetched) == 1


def test_a_run_that_validated_nothing_has_no_accuracy_to_tell_and_is_kept(scripts, monkeypatch, capsys):
    script = scripts / "root" / "examples" / "reasoning" / "grpo.sh"
    script.write_text(script.read_text().replace(SOURCE, "other"))
    status, printed = run_recipes(scripts, monkeypatch, capsys, "--recipe", "grpo")
    assert status == 0
    assert "held-out accuracy None to None" in printed


def test_a_run_without_a_step_is_a_failure(scripts, monkeypatch, capsys):
    (scripts / "root" / "examples" / "reasoning" / "dapo.sh").write_text('echo "nothing to do"\n')
    status, printed = run_recipes(scripts, monkeypatch, capsys, "--recipe", "dapo")
    assert status == 1
    assert "there is no such file" in printed
    assert "nothing to do" in printed
    assert not (scripts / "results").exists()


def test_what_would_not_end_in_time_is_not_begun_and_what_does_not_is_ended(scripts, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "clock", itertools.count().__next__)  # a second each time that it is looked at
    words = ("--jobs", "ppo:chain_sum:1", "ppo:chain_sum:2", "--seconds", "5", "--job-seconds", "3")
    status, printed = run_recipes(scripts, monkeypatch, capsys, *words)
    assert status == 1
    assert "ppo:chain_sum:1: no time left" in printed
    assert "No time left for ppo:chain_sum:2" in printed


def test_seeds_of_two_machines_make_no_mean(scripts, monkeypatch, capsys):
    run_recipes(scripts, monkeypatch, capsys, "--recipe", "grpo")
    path = scripts / "results" / "grpo-chain_sum-toy.json"
    path.write_text(path.read_text().replace('"machine":"', '"machine":"another '))
    places = ["--runs", str(scripts / "runs"), "--results", str(scripts / "results"), "--label=-toy"]
    monkeypatch.setattr("sys.argv", ["recipes", "--recipe", "grpo", "--seeds", "2", *places])
    with pytest.raises(ValueError, match="seeds of two machines make no mean"):
        recipes.main()
    assert not (scripts / "runs" / "grpo-chain_sum-toy-2").exists()


def test_seeds_on_the_same_gpu_of_two_hosts_make_a_mean_and_each_is_named(scripts, monkeypatch, capsys):
    small, large = (f"Some CPU, {cores} cores, NVIDIA H200, torch 2.11.0+cu130" for cores in (16, 32))
    monkeypatch.setattr("benchmarks.demo.machine", lambda: large)
    run_recipes(scripts, monkeypatch, capsys, "--recipe", "grpo")
    monkeypatch.setattr("benchmarks.demo.machine", lambda: small)
    run_recipes(scripts, monkeypatch, capsys, "--recipe", "grpo", "--seeds", "2")
    path = scripts / "results" / "grpo-chain_sum-toy.json"
    assert [run["machine"] for run in results.read_result(path)["runs"]] == [large, small]
    assert pages.ran_on([path]).count("NVIDIA H200") == 2
    assert results.device(small) != results.device(small.replace("H200", "H100"))
    assert results.device(small) != results.device(small.replace("2.11", "2.12"))


@pytest.mark.parametrize("job", ["grpo", "grpo:sums:1", "magic:chain_sum:1", "grpo:chain_sum:x"])
def test_a_job_that_is_none_is_refused(job, capsys):
    with pytest.raises(SystemExit):
        recipes.parse(["--jobs", job])
    assert "a job is RECIPE:TASK:SEED" in capsys.readouterr().err


def test_the_jobs_of_the_page_are_jobs():
    assert len(recipes.parse(["--all", "--label="]).jobs) == len(set(recipes.ALL)) == 21


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "dapo", "ppo", "lora", "sft-grpo"])
def test_a_recipe_runs_from_its_script_to_its_result(recipe, tmp_path, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    small = (
        "data.train_batch_size=16",
        "data.val_max_samples=16",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
    )
    words = (
        "--recipe", recipe, "--task", "chain_sum", "--model", "examples/tiny_model/model", "--json",
        "--set", *small, "actor_rollout_ref.actor.ppo_mini_batch_size=8", "algorithm.filter_groups.enable=false",
        "trainer.critic_warmup=0",
        "--sft-set", "data.train_batch_size=16", "trainer.total_training_steps=2",
    )  # fmt: skip
    status, printed = run_recipes(tmp_path, monkeypatch, capsys, *words)
    assert status == 0, printed
    (run,) = json.loads(printed.splitlines()[-1])["runs"]
    assert [step for step, _ in run["curve"]] == [0, 1, 2]
    assert len(run["train_reward"]) == 2
    assert run["after"]["num_prompts"] == 16
    assert {"step", "gen", "update_actor"} <= set(run["stage_seconds"])
    assert ("update_critic" in run["stage_seconds"]) == (recipe == "ppo")
    assert {"base", "sft"} <= set(run) if recipe == "sft-grpo" else not {"base", "sft"} & set(run)
