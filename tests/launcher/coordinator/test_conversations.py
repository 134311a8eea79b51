"""Whole conversations with the coordinator as text. Rewrite them with ODYSSEY_REWRITE=1, and read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from odyssey_cli.replay.recorded import compare
from tests.launcher.coordinator.talk import Talk

CONVERSATIONS = sorted((Path(__file__).parent / "conversations").glob("*.txt"))


@pytest.mark.parametrize("path", CONVERSATIONS, ids=lambda path: path.stem)
def test_conversation(path: Path, tmp_path: Path) -> None:
    expected = path.read_text()
    talk = Talk()
    lines: list[str] = []
    for line in expected.splitlines():
        if line.startswith("> "):
            lines += [line, talk.say(line[2:])]
        elif not line.startswith("  "):
            lines.append(line)
    got = "\n".join(lines) + "\n"
    if os.environ.get("ODYSSEY_REWRITE"):
        path.write_text(got)
    else:
        assert got == expected
    talk.write_log(tmp_path / "job")
    n_decisions, difference = compare(tmp_path / "job")
    assert difference is None and n_decisions == sum(line.startswith("  decide: ") for line in got.splitlines())
