"""The events of a run: whole lines, whoever writes them, and never an error of their own."""

import errno
import fcntl
import json
import multiprocessing
import os

import pytest

from burnish.utils.errors import ConfigError
from burnish.utils.events import EventLog, read_events
from burnish.utils.json_lines import encode_line, read_lines, replacing, write_atomically


def test_an_event_is_a_line_with_time_step_kind_and_whatever_is_known(tmp_path):
    EventLog(tmp_path / "run").write("checkpoint", "Saved global_step_3.", step=3, path="x", bytes=7)
    (event,) = read_events(tmp_path / "run")
    assert event.pop("time") > 1.7e9
    assert event == {"step": 3, "kind": "checkpoint", "message": "Saved global_step_3.", "path": "x", "bytes": 7}


def test_there_are_no_events_where_there_is_no_file(tmp_path):
    assert list(read_events(tmp_path)) == []


def _write_many(folder, name):
    log = EventLog(folder)
    for number in range(100):
        log.write("warning", name * 20_000, number=number)


def test_lines_of_several_processes_stay_whole_and_none_is_empty(tmp_path):
    # Lines of several pages: the kernel lets a reader see the file's size grow page by page.
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert sorted((event["message"][0], event["number"]) for event in events) == [
        (name, number) for name in "abc" for number in range(100)
    ]


def test_half_a_line_of_a_killed_process_takes_no_other_event_with_it(tmp_path):
    EventLog(tmp_path).write("start", "one")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "kind": "ha')
    EventLog(tmp_path).write("end", "two")
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "end"]


def test_who_holds_the_file_locked_and_never_lets_go_stops_nobody_from_writing(tmp_path):
    EventLog(tmp_path).write("start", "one")
    with (tmp_path / "events.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        EventLog(tmp_path).write("end", "two")
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "end"]


def test_a_line_of_which_a_full_disk_takes_a_part_is_told_and_takes_no_other_with_it(tmp_path, caplog, monkeypatch):
    log, write, room = EventLog(tmp_path), os.write, 10

    def write_to_a_full_disk(handle, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written, room = write(handle, data[:room]), 0
        return written

    log.write("start", "one")
    with monkeypatch.context() as full:
        full.setattr(os, "write", write_to_a_full_disk)
        log.write("warning", "two")
    assert "cannot be written" in caplog.text
    assert os.strerror(errno.ENOSPC) in caplog.text
    log.write("end", "three")
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "end"]


def test_secrets_are_hidden_and_odd_values_written_as_text(tmp_path):
    EventLog(tmp_path).write(
        "warning", "it said api_key=abcdefgh12345", api_key="abcdefgh12345", where=tmp_path, what={1, 2}
    )
    text = (tmp_path / "events.jsonl").read_text()
    assert "abcdefgh12345" not in text
    (event,) = read_events(tmp_path)
    assert event["where"] == str(tmp_path)
    assert event["what"] == [1, 2]


def test_a_folder_that_takes_no_file_is_told_once_and_never_an_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file")
    log.write("start", "one")
    log.write("end", "two")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_who_listens_hears_every_event_and_cannot_end_the_run(tmp_path, caplog):
    log, heard = EventLog(tmp_path), []
    log.listeners += [lambda event: 1 / 0, heard.append]
    log.write("hang", "Nothing moves.", step=2)
    assert heard[0]["message"] == "Nothing moves."
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("text", ["中文 é 🙂", "lone \ud83d surrogate", 'quotes " and \\ and \u2028', "\x00\n\t"])
def test_texts_come_back_as_they_were_and_are_readable_in_the_file(tmp_path, text):
    line = encode_line({"text": text})
    (tmp_path / "x.jsonl").write_bytes(line)
    assert next(read_lines(tmp_path / "x.jsonl")) == {"text": text}
    assert line.count(b"\n") == 1
    if text.startswith("中文"):
        assert "中文".encode() in line


def test_what_json_cannot_hold_is_no_error():
    loop: dict = {}
    loop["self"] = loop
    for row in ({("a", 1): 2}, loop, {"x": object()}, {"nan": float("nan")}):
        assert encode_line(row).endswith(b"}\n")


def _write_half(path):
    path.write_text("tw")
    raise OSError("the disk is full")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with replacing(path) as temporary:
        temporary.write_text("one")
    with pytest.raises(OSError, match="full"), replacing(path) as temporary:
        _write_half(temporary)
    assert path.read_text() == "one"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_two_that_write_a_file_at_once_do_not_write_into_each_others(tmp_path):
    path = tmp_path / "file.jsonl"

    def rows():
        yield {"of": "first"}
        with pytest.raises(ConfigError, match=r"file\.jsonl: another process is writing this file"):
            write_atomically(path, [{"of": "second"}] * 2)
        yield {"of": "first"}

    write_atomically(path, rows())
    assert [row["of"] for row in read_lines(path)] == ["first", "first"]
    write_atomically(path, [{"of": "third"}])
    assert [row["of"] for row in read_lines(path)] == ["third"]


def test_what_a_killed_process_left_is_written_over(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_text("old")
        name = temporary
    name.write_text("a longer text than the next one")
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_takes_the_place_of_no_link_and_of_nothing_that_is_no_file(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to(target)
    for text in ("one", "two"):
        with replacing(link) as temporary:
            temporary.write_text(text)
        assert link.is_symlink()
        assert target.read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as temporary:
        temporary.write_text("three")
    assert os.read(reader, 100) == b"three"
    os.close(reader)
