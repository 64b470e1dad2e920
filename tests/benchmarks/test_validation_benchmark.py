"""The benchmark of validation metrics measures what it says."""

import json
import sys

import pytest

from benchmarks import validation_metrics


def test_the_batch_has_all_statistics_of_all_its_variables():
    figures = validation_metrics.measure(prompts=6, samples=4, variables=1, repeats=2)
    assert 0 < figures["seconds_min"] <= figures["seconds"] <= figures["seconds_max"]
    assert (figures["variables"], figures["naive_ratio"] > 1) == (3, True)
    # Two sources: mean, std and for 2 and 4 best, worst and maj of three variables; what each has once; lengths.
    assert figures["metrics"] == 2 * (3 * (2 + 2 * 6) + 2 * 2 + 1 + 2 + 4) + 4


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_it_prints_a_line_or_json(flags, monkeypatch, capsys):
    arguments = ["--prompts", "6", "--samples", "2", "--variables", "0", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["validation_metrics", *arguments, *flags])
    validation_metrics.main()
    printed = capsys.readouterr().out
    assert json.loads(printed)["prompts"] == 6 if flags else "6 prompts x 2 samples" in printed
