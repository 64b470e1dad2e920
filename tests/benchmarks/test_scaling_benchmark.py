"""The scaling benchmark compares like with like, and its cases are what they are called."""

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.results import read_result
from benchmarks.scaling import CASES, case_settings, compared, parse, table

ROOT = Path(__file__).resolve().parents[2]


def result(case: str, gpus: int, seconds: float, tokens: int) -> dict:
    return {
        "case": case,
        "gpus": gpus,
        "seconds": seconds,
        "seconds_min": seconds,
        "seconds_max": seconds,
        "response_tokens_per_s": tokens / seconds,
        "stages": {"gen": 1.0},
        "memory_gib": None,
    }


def test_rates_are_compared_with_the_case_that_does_the_same():
    results = {
        "one": result("one", 1, 4.0, 1000),
        "sharded": result("sharded", 2, 2.5, 1000),
        "twice_sharded": result("twice_sharded", 2, 4.4, 2000),
        "critic_apart": result("critic_apart", 2, 3.0, 1000),
    }
    found = compared(results)
    assert found["sharded"]["speedup"] == pytest.approx(1.6)
    assert found["sharded"]["efficiency"] == pytest.approx(0.8)
    assert found["twice_sharded"]["efficiency"] == pytest.approx(1000 / 1100)
    assert "speedup" not in found["one"]
    # What it would be compared with was not measured.
    assert "speedup" not in found["critic_apart"]
    assert "1.60" in table(results)


def test_the_page_shows_every_figure_of_two_gpus_that_is_kept():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    kept = sorted((ROOT / "docs" / "results").glob("scaling-*.json"))
    assert kept
    for path in kept:
        for figures in read_result(path)["cases"].values():
            seconds = f"{figures['seconds']:.3f} ({figures['seconds_min']:.3f}, {figures['seconds_max']:.3f})"
            over = f" | {figures['speedup']:.2f} |" if "speedup" in figures else ""
            assert f"| {seconds}{over}" in page, (path.name, figures["case"])


def test_the_page_shows_the_steps_beside_verl_that_are_kept():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "results").glob("grpo_step-*.json")):
        for found in read_result(path)["results"]:
            assert f"{found['seconds']:.3f} ({found['seconds_min']:.3f}, {found['seconds_max']:.3f})" in page
            peer = (found["peer_seconds"], found["peer_seconds_min"], found["peer_seconds_max"])
            assert "{:.2f} ({:.2f}, {:.2f})".format(*peer) in page


def test_figures_are_kept_with_where_they_are_from(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scaling, "measure", lambda case, args: result(case, 1, 2.0, 1000))
    out = tmp_path / "kept" / "scaling-here.json"
    with pytest.raises(SystemExit):
        scaling.main(["--device", "cpu", "--case", "one", "--out", str(out), "--set", "trainer.seed=2"])
    kept = read_result(out)
    assert (kept["name"], kept["set"], kept["cases"]["one"]["seconds"]) == ("scaling-here", {"trainer.seed": 2}, 2.0)
    assert {"machine", "commit", "versions", "command", "date"} <= kept.keys()


def test_every_case_is_a_configuration_that_loads():
    from burnish.config import load_config
    from burnish.trainer.cluster import pool_spec

    args = parse(["--device", "cpu", "--gpus", "2", "--prompts", "6"])
    args.model = "examples/tiny_model/model"
    spec = {}
    for case in CASES:
        work, gpus, settings = case_settings(case, args)
        assert work.prompts == (12 if case.startswith("twice") else 6)
        base = {"actor_rollout_ref.model.path": args.model, "trainer.n_gpus_per_node": gpus, "data.train_files": None}
        base |= {"data.train_batch_size": 12, "actor_rollout_ref.actor.ppo_mini_batch_size": 12, "data.val_files": None}
        config = load_config([base | {"actor_rollout_ref.rollout.n": 8} | settings], train_rows_given=True)
        spec[case] = pool_spec(config)
        assert (CASES[case][3] or "one") in CASES
    assert spec["one"] == {"global_pool": [1]}
    assert spec["sharded"] == {"global_pool": [2]}
    assert spec["critic_apart"] == {"global_pool": [1], "critic_pool": [1]}
    assert spec["critic_beside"] == {"global_pool": [1]}
    assert spec["reward_apart"] == spec["rlhf_apart"] == {"global_pool": [1], "reward_pool": [1]}
    assert spec["rlhf_beside"] == spec["rlhf_ray"] == {"global_pool": [1]}


@pytest.fixture(autouse=True)
def models_of_the_test(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_BENCHMARK_MODELS", str(tmp_path / "models"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cases_run_on_two_workers_of_a_cpu(capsys):
    small = ["--prompts", "2", "--samples", "2", "--prompt-length", "4", "--response-length", "4", "--repeats", "1"]
    cases = ["one", "sharded", "critic_apart", "reward_apart", "rlhf_apart"]
    with pytest.raises(SystemExit) as ended:
        scaling.main(["--device", "cpu", "--json", *small, "--case", *cases])
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (ended.value.code, last["not_measured"]) == (0, {})
    assert set(last["cases"]) == set(cases)
    assert "update_critic" in last["cases"]["critic_apart"]["stages"]
    assert "reward_model" in last["cases"]["reward_apart"]["stages"]
    assert {"reward_model", "ref", "values", "update_critic"} <= last["cases"]["rlhf_apart"]["stages"].keys()
    assert last["cases"]["sharded"]["speedup"] > 0
