"""The benchmark of the report measures what it says."""

import json
import sys

from benchmarks import report


def test_it_tells_the_size_and_the_seconds_of_the_page(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "BINARY", None)
    words = ["report", "--steps", "3", "--rollouts", "16", "--tokens", "20", "--out", str(tmp_path / "page.html")]
    monkeypatch.setattr(sys, "argv", words)
    report.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["page_mb"] == round((tmp_path / "page.html").stat().st_size / 1e6, 2)
    assert 0 < result["read_s"] <= result["seconds"]
    assert "opened_s" not in result
