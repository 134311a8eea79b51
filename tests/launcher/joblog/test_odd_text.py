"""Bytes that are no Unicode, in names of files, arguments and variables: scripts get them, logs and messages bear them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.joblog import events
from launcher.joblog.events import Cause, CauseKind, Diagnostics, Event, JobStarted, Note, RankLost
from odyssey.protocol.frames import Deframer, frame
from odyssey.protocol.reports import Failed, Report
from odyssey.text import as_unicode
from tests.launchers import OURS, PROBE, TORCHRUN, Launcher, Scene, scene
from tests.torchrun.test_environment import free_port

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

ODYSSEY = [sys.executable, "-m", "odyssey_cli"]
ODD = os.fsdecode(b"odd \xff\xe4")

FAILING = Path(PROBE).read_text() + "\nraise FileNotFoundError(2, 'none', sys.argv[1])\n"


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        pytest.param(TORCHRUN, {}, marks=pytest.mark.soak, id="torchrun"),
        pytest.param(OURS, {}, id="forks"),
        pytest.param(OURS, {"ODYSSEY_ZYGOTE": "0"}, id="spawns"),
    ],
)
def test_a_script_gets_every_byte(scene: Scene, launcher: Launcher, variables: dict[str, str]) -> None:
    script = scene.write(f"{ODD}.py", Path(PROBE).read_text())
    scene.start(launcher, "--role", ODD, "--log-dir", ODD, script, ODD, env={"ODD": ODD, ODD: "1", **variables}).succeed()

    probe = scene.probe()
    assert probe.facts["argv"] == [script, ODD]
    assert probe.env["ODD"] == ODD and probe.env[ODD] == "1" and probe.env["ROLE_NAME"] == ODD
    assert (scene.cwd / ODD).is_dir()


def test_a_failed_job_of_such_names_is_logged_reported_and_found(scene: Scene) -> None:
    script = scene.write(f"{ODD}.py", FAILING)
    arguments = ["--log-dir", ODD, "--json-report", f"{ODD}.json", script, ODD]
    scene.start_command([*ODYSSEY, "run", *arguments]).fail()

    (log,) = (scene.cwd / ODD).glob("*/events.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    assert [events.encode(events.decode(line)) for line in lines] == lines
    job = next(body for line in lines if isinstance(body := events.decode(line).body, JobStarted))
    assert (job.script, job.arguments) == (as_unicode(script), (as_unicode(ODD),))
    report = json.loads((scene.cwd / f"{ODD}.json").read_bytes())
    assert as_unicode(ODD) in report["cause"]["exception"]
    for command in ("ps --all", "status last", "ps --all --json", "status last --json"):
        seen = scene.start_command([*ODYSSEY, *command.split()]).succeed()
        assert r"odd \udcff" in seen.stdout.replace(r"\\", "\\")


def test_agents_of_such_a_role_meet(scene: Scene) -> None:
    where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--role", ODD]
    runs = [scene.start(OURS, *where, PROBE) for _ in range(2)]
    for run in runs:
        run.succeed()
    assert [scene.probe(rank).env["ROLE_NAME"] for rank in (0, 1)] == [ODD, ODD]
    assert [scene.probe(rank).env["ROLE_RANK"] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.parametrize("name", ["--master-addr", "--rdzv-endpoint", "--rdzv-id"])
def test_what_agents_could_not_tell_each_other_is_one_error(scene: Scene, name: str) -> None:
    run = scene.start(OURS, "--nnodes=2", name, ODD, PROBE)
    assert run.end() == 2
    assert run.stderr.startswith(f"error: {name}: ") and "Traceback" not in run.stderr


ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT, ANY_TEXT)
def test_every_text_can_be_logged_and_sent(first: str, second: str) -> None:
    for body in (Note(first), RankLost(1, Cause(CauseKind.EXIT, first), False, Diagnostics(second))):
        line = events.encode(Event(1.0, 2, "agent", body))
        read = events.decode(line)
        assert events.encode(read) == line and line.count(b"\n") == 1
        if isinstance(read.body, Note):
            assert read.body.text == as_unicode(first)
    (failed,) = Deframer(Report).feed(frame(Failed(0, first, second, "")))
    assert failed == Failed(0, as_unicode(first), as_unicode(second), "")
