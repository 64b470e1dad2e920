"""What the repository says of itself is so."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("git") is None or not (REPO / ".git").exists(), reason="not a checkout")
def test_no_source_file_is_ignored_and_so_missing_from_a_commit():
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "burnish", "tests", "docs", "benchmarks"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip(listed.stderr)
    sources = (".py", ".md", ".yaml", ".js", ".css", ".j2")
    assert [name for name in listed.stdout.splitlines() if name.endswith(sources)] == []
