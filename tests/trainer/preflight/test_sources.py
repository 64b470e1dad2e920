"""Every row that the built-in functions cannot score is told: what is wrong with many alike once, with their number."""

from burnish.reward.compute_score import default_compute_score
from burnish.trainer.preflight.data import check_sources
from burnish.trainer.preflight.findings import Findings


def row(truth):
    return {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": truth}}


def test_what_is_wrong_with_several_rows_is_told_once_with_their_number():
    findings = Findings()
    datasets = {"train": [row("72"), row("none"), row("other"), row("none"), row("none")], "val": [row("72")]}
    check_sources(datasets, default_compute_score, findings)
    first, second = findings.items
    assert first.level == "error"
    assert first.message.startswith("row 1 of the dataset: ")
    assert first.message.endswith("2 other rows have the same.")
    assert second.message.startswith("row 2 of the dataset: ")
    assert [problem["rows"] for problem in findings.facts["reward_problems"]["train"]] == [3, 1]


def test_of_many_some_are_shown_and_all_are_counted():
    findings = Findings()
    check_sources({"train": [row("x" * i) for i in range(1, 21)]}, default_compute_score, findings)
    assert len(findings.items) == 11
    assert "20 different problems" in findings.items[-1].message
    assert len(findings.facts["reward_problems"]["train"]) == 20
