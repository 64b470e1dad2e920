"""`burnish report` at the command line."""

import pytest

from burnish.cli.report import run_report
from burnish.utils.errors import ConfigError
from tests.report.made_runs import made_run


def report(*paths, **options):
    given = {"out": None, "serve": False, "port": 0, "max_mb": 20.0, "tokenizer": None} | options
    return run_report([str(path) for path in paths], **given)


def test_the_page_goes_to_the_named_file_or_into_the_runs_folder(tmp_path, capsys):
    run = made_run(tmp_path / "run", num_steps=2)
    assert report(run) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert str(run / "report.html") in capsys.readouterr().out
    assert report(run, out=str(tmp_path / "new" / "page.html")) == 0
    assert (tmp_path / "new" / "page.html").stat().st_size > 50_000
    # Its own page is no part of a run.
    assert report(run) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "a.html", "serve": True}, "Choose one of them"),
        ({"out": "."}, "is a folder. Name the file"),
        ({"tokenizer": "nowhere"}, "--tokenizer=nowhere: there is no tokenizer.json"),
        ({"out": "/proc/none/page.html"}, "--out=/proc/none/page.html: the file cannot be written"),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path, options, says):
    run = made_run(tmp_path / "run", num_steps=1, validation=False)
    with pytest.raises(ConfigError, match=says):
        report(run, **options)
