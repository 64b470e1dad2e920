"""The report of a run that was really trained: its files are those that the report expects."""

import json

from burnish.report import RunFolder
from burnish.report.choose import choose
from burnish.report.payload import describe, load_pieces
from burnish.report.tokens import SCALE
from burnish.trainer.rollout_store import read_tokens
from tests.e2e.runs import tiny_run


def test_what_a_run_writes_is_what_the_report_shows(tmp_path):
    run_dir = tmp_path / "run"
    validation = (
        "trainer.test_freq=1",
        f"trainer.validation_data_dir={run_dir / 'validation'}",
        "data.val_max_samples=4",
    )
    tiny_run(run_dir, "trainer.total_training_steps=1", "trainer.sample_rollouts=8", *validation)
    run = RunFolder(run_dir)
    assert run.status()["state"] == "ended"
    chosen = {kind: choose(dumps, load_pieces(run, None), 10**8) for kind, dumps in run.dumps.items()}
    page = describe(run, chosen)

    assert page["config"]["actor_rollout_ref.rollout.n"] == [4, "command line"]
    assert page["config"]["trainer.device"][1] in ("resolved", "recipe demo")
    assert page["config"]["data.train_files"][1] == "command line"
    assert {"gen", "update_actor"} <= set(page["stages"]["seconds"])
    assert page["bottleneck"]
    assert [event["kind"] for event in page["events"]].count("end") == 1
    assert any("trainer.sample_rollouts" in note for note in page["notes"])
    assert [entry["step"] for entry in page["rollouts"]["validation"]["steps"]] == [1]

    rows = run.dumps["train"].index[1]
    assert len(rows) == 8
    whole = run.dumps["train"].whole(1, rows, load_pieces(run, None))
    lines = [json.loads(line) for line in (run_dir / "rollouts" / "1.jsonl").read_text().splitlines()]
    for shown, line, tokens in zip(whole["rows"], lines, read_tokens(run_dir / "rollouts", 1), strict=True):
        assert "".join(shown["tokens"]["text"]) == line["response"]
        assert shown["extras"]["acc"] == line["acc"]
        log_probs = shown["tokens"]["rollout_log_probs"]
        log_probs = log_probs if isinstance(log_probs, list) else [log_probs] * line["num_tokens"]
        assert max(abs(tokens["rollout_log_probs"] * SCALE - log_probs)) <= 0.5
