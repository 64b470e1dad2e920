"""The benchmark of packing measures what it says."""

import json
import sys

import pytest

from benchmarks import packing


def test_the_figures_are_those_of_the_plans():
    work = packing.draw(rows=256, n=8, deviation=0.9)
    figure = packing.measure_one(work, bound=16384, ranks=4, repeats=1)
    tokens = sum(work.lengths)
    assert figure["efficiency"] == pytest.approx(tokens / (figure["micro_batches"] * 16384))
    assert figure["fewest_micro_batches"] <= figure["micro_batches"]
    once = packing.shared_tokens(work, list(range(256)))
    assert 0 < figure["saved_by_sharing"] <= 1 - once / tokens
    assert 1 <= figure["imbalance"] < figure["imbalance_in_order"]


def test_the_draw_repeats_itself():
    assert packing.draw(64, 8, 0.6) == packing.draw(64, 8, 0.6)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_it_prints_a_table_or_json(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["packing", "--rows", "128", "--ranks", "2", "--repeats", "1", *flags])
    packing.main()
    printed = capsys.readouterr().out
    if flags:
        figures = json.loads(printed.splitlines()[-1])["figures"]
        assert list(figures) == [str(spread) for spread in packing.SPREADS]
    else:
        assert all(f"\n{spread:>6} " in printed for spread in packing.SPREADS)
