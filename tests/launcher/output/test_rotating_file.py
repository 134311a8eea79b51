"""The end of a stream in files of a limited size, held against the whole stream."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.host.loop import Loop
from launcher.output import log_reader, rotating_file
from launcher.output.log_reader import KeptFile
from launcher.output.rotating_file import WINDOW_S, RotatingFile

LIMIT = 40
FILE = KeptFile(0, 0, "stdout")


class Stream:
    """One of a rank, on a loop whose clock the test turns. `kept()`: from which byte on it is kept, and that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.said = folder, 0.0, ""
        self.loop = Loop(lambda: self.now)
        self.complaints: list[str] = []
        self.open()

    def open(self) -> None:
        path = self.folder / "kept/attempt_0/0/stdout.log"
        self.file = RotatingFile(path, LIMIT, self.loop, self.complaints.append)

    def write(self, text: str) -> None:
        self.said += text
        self.file.write(text.encode())

    def wait(self) -> None:
        self.now += WINDOW_S
        self.loop.later(0.0, lambda: None)
        self.loop.turn()

    def kept(self) -> tuple[int, str]:
        first, stop = log_reader.files(self.folder).get(FILE, (0, 0))
        text = b""
        while first + len(text) < stop:
            text += log_reader.piece(self.folder, FILE, first + len(text))
        return first, text.decode()

    def close(self) -> None:
        self.file.close()
        self.loop.close()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(tmp_path)


def test_a_short_stream_is_kept_whole(stream: Stream) -> None:
    for word in ("one ", "two ", "three"):
        stream.write(word)
    assert stream.kept() == (0, "one two three")
    stream.close()


def test_of_a_long_one_the_end_is_kept_with_its_place(stream: Stream) -> None:
    for i in range(100):
        stream.write(f"{i:9}\n")
        stream.wait()
        first, text = stream.kept()
        assert stream.said[first:] == text
        assert len(text) <= LIMIT
    assert len(text) >= LIMIT // 2
    stream.close()


def test_of_a_flood_the_end_is_written_when_the_time_is_over(stream: Stream) -> None:
    for i in range(1000):
        stream.write(f"{i:9}\n")
    n_files = sum(path.is_file() for path in stream.folder.rglob("stdout.log*"))
    assert stream.kept() == (0, stream.said[: LIMIT // 2]) and n_files == 1
    stream.wait()
    assert stream.kept() == (len(stream.said) - LIMIT // 2, stream.said[-LIMIT // 2 :])
    stream.close()


def test_the_end_of_a_flood_is_there_when_the_rank_has_ended(stream: Stream) -> None:
    for i in range(1000):
        stream.write(f"{i:9}\n")
    stream.close()
    first, text = stream.kept()
    assert text and stream.said[first:] == text


@example([20, 1, 20, 1])  # what is left out ends where a full file begins
@given(st.lists(st.one_of(st.none(), st.booleans(), st.integers(1, 60))))
def test_whatever_is_written_when_what_is_kept_is_the_end(
    tmp_path_factory: pytest.TempPathFactory, steps: list[object]
) -> None:
    """None: time passes; a truth value: another process of the rank goes on; a number: so many bytes."""
    stream = Stream(tmp_path_factory.mktemp("job"))
    for step in steps:
        if step is None:
            stream.wait()
        elif isinstance(step, bool):
            stream.file.close()
            stream.open()
        else:
            assert isinstance(step, int)
            stream.write("".join(chr(97 + (len(stream.said) + i) % 26) for i in range(step)))
    stream.file.close()
    first, text = stream.kept()
    assert stream.said[first:] == text
    assert len(text) <= LIMIT + 2 * 60
    stream.loop.close()


def _full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rotating_file.os, "write", write)  # type: ignore[attr-defined]


def _in_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "kept").touch()


@pytest.mark.parametrize(("happens", "why"), [(_full, "no space left on device"), (_in_the_way, "not a directory")])
def test_where_nothing_can_be_written_that_is_told_once_and_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path, pytest.MonkeyPatch], None], why: str
) -> None:
    happens(tmp_path, monkeypatch)
    stream = Stream(tmp_path)
    for _ in range(100):
        stream.write("some line\n")
    stream.wait()
    monkeypatch.undo()
    stream.close()
    assert len(stream.complaints) == 1
    assert stream.complaints[0].endswith(f"kept/attempt_0/0/stdout.log: {why}")


def test_what_was_asked_for_comes_before_what_is_kept(tmp_path: Path) -> None:
    for folder in (tmp_path / "attempt_0/0", tmp_path / "kept/attempt_0/0"):
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(folder.parent.parent.name)
    assert os.fsencode(tmp_path.name) == log_reader.piece(tmp_path, FILE, 0)


def test_folders_that_go_while_they_are_read_are_none(tmp_path: Path) -> None:
    """Those of old attempts go as a job starts again."""
    for attempt in range(40):
        streams = [tmp_path / "kept" / f"attempt_{attempt}" / str(rank) / "stdout.log" for rank in range(20)]
        for stream in streams:
            stream.parent.mkdir(parents=True)
            stream.touch()
        goes = threading.Thread(target=shutil.rmtree, args=(tmp_path / "kept" / f"attempt_{attempt}",))
        goes.start()
        while goes.is_alive():
            log_reader.files(tmp_path)
            log_reader.piece(tmp_path, KeptFile(attempt, 0, "stdout"), 0)
        goes.join()
    assert log_reader.files(tmp_path) == {}
