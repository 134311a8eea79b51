"""Reading event logs: whole events in order, and one answer to a line that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog import reader
from launcher.joblog.events import JobEnded, encode
from tests import job_events

FUTURE = b'{"time":1,"generation":0,"origin":"agent","body":{"type":"of_the_future"}}\n'


def log_of(tmp_path: Path, *lines: bytes) -> Path:
    (tmp_path / reader.NAME).write_bytes(b"".join(lines))
    return tmp_path / reader.NAME


def test_every_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = job_events.job()

    assert list(reader.events(log_of(tmp_path, *map(encode, written)))) == written


@pytest.mark.parametrize("n_bytes", [1, 10, -1])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, n_bytes: int) -> None:
    *whole, last = map(encode, job_events.job())
    log = log_of(tmp_path, *whole, last[:n_bytes])

    assert len(list(reader.events(log))) == len(whole)
    assert not reader.has_ended(log)


def test_a_line_of_another_version_is_an_error_with_file_line_and_version(tmp_path: Path) -> None:
    first, *rest = map(encode, job_events.job())
    log = log_of(tmp_path, first, FUTURE, *rest)

    with pytest.raises(reader.UnknownEvent) as caught:
        list(reader.events(log))

    assert caught.value.what.startswith(f"{log}: line 2: ")
    assert "of_the_future" in caught.value.what
    assert caught.value.help == f"Odyssey {job_events.job()[0].body.version} has written it"


def test_before_a_log_tells_its_version_nobody_claims_one(tmp_path: Path) -> None:
    with pytest.raises(reader.UnknownEvent) as caught:
        list(reader.events(log_of(tmp_path, FUTURE)))

    assert caught.value.help == "is it of another version?"


def test_who_can_do_without_a_line_gets_the_error_and_all_others(tmp_path: Path) -> None:
    first, *rest = map(encode, job_events.job())
    log = log_of(tmp_path, first, FUTURE, *rest)

    start, error, *others = reader.entries(log)

    assert [start, *others] == job_events.job()
    assert isinstance(error, reader.UnknownEvent) and error.what.startswith(f"{log}: line 2: ")


def test_a_log_is_read_as_a_stream(tmp_path: Path) -> None:
    """What stands behind the lines that were asked for is not looked at."""
    first, *_ = map(encode, job_events.job())
    stream = reader.events(log_of(tmp_path, first, b"no event\n"))

    assert encode(next(stream)) == first


def test_a_job_has_ended_when_the_tail_of_its_log_says_so(tmp_path: Path) -> None:
    events = job_events.job()
    assert isinstance(events[-1].body, JobEnded)
    log = log_of(tmp_path, *map(encode, events * 20))  # longer than the tail, which begins inside a line

    assert log.stat().st_size > 1 << 16
    assert reader.has_ended(log)
    assert reader.has_ended(tmp_path / "gone")
