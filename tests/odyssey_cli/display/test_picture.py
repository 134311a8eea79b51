"""The picture of a job, from its log."""

from __future__ import annotations

from pathlib import Path

from launcher.joblog.events import encode
from odyssey_cli.jobs.picture import draw, telling_moment
from tests import job_events


def test_the_telling_moment_is_shortly_after_the_last_recovery() -> None:
    events = job_events.job()

    taken = events[: telling_moment(events)]

    assert type(taken[-1].body).__name__ == "Committed"
    assert sum(event.generation == 2 and type(event.body).__name__ == "Committed" for event in taken) == 8


def test_a_job_without_a_recovery_is_drawn_whole() -> None:
    events = job_events.job()[:30]

    assert telling_moment(events) == 30


def test_a_log_that_was_cut_short_can_be_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "job"
    folder.mkdir(parents=True)
    lines = b"".join(encode(event) for event in job_events.job())
    (folder / "events.jsonl").write_bytes(lines[:-20])

    draw(tmp_path / "logs", tmp_path / "picture.svg")

    assert "recovered" in (tmp_path / "picture.svg").read_text()
