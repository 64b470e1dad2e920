"""The benchmark of the demo measures what it says."""

import json
import sys

import pytest

from benchmarks import demo


@pytest.mark.slow
def test_every_stage_is_measured_and_they_make_up_the_step(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--repeats", "2", "--steps", "1", "--json"])
    demo.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = result["figures"]
    assert "torch" in result["machine"]
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in figures.values())
    stages = sum(figures[f"{stage}_s"]["min"] for stage in demo.STAGES if stage != "step")
    assert stages == pytest.approx(figures["step_s"]["min"], rel=0.2)
