"""The record of what torchrun answered: what is not the same is told, and no record is of a case that is gone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.launchers import OURS, PROBE, TORCHRUN, Launcher, Scene, scene_in
from tests.torchrun import record


def of_a_rank(folder: Path, launcher: Launcher, says: str, code: int = 0, **given: str) -> Scene:
    """As if this launcher had started one rank, that says this; then it ends so."""
    rank = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **given}
    variables = " ".join(f"{name}={value}" for name, value in rank.items())
    with scene_in(folder) as scene:
        command = f"env {variables} {sys.executable} {PROBE}; echo {says}; exit {code}"
        run = scene.start_command(["sh", "-c", command])
        assert run.end() == code
        scene.probe()
        record.hold("test_this.py::case", scene, launcher)
    return scene


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "FILE", tmp_path / "records" / "0.0.json")
    with monkeypatch.context() as patch:
        patch.setenv("ODYSSEY_REWRITE", "1")
        of_a_rank(tmp_path / "theirs", TORCHRUN, f"here {tmp_path}/theirs 12345", 1)
    monkeypatch.delenv("ODYSSEY_REWRITE", raising=False)
    return tmp_path


@pytest.mark.parametrize("launcher", [TORCHRUN, OURS], ids=str)
def test_what_is_the_same_elsewhere_is_the_same(file: Path, launcher: Launcher) -> None:
    of_a_rank(file / "again", launcher, f"here {file}/again 54321", 1)


def test_ours_may_say_more_by_its_exit_code_and_give_variables_of_its_own(file: Path) -> None:
    of_a_rank(file / "ours", OURS, f"here {file}/ours 1234", 143, ODYSSEY_X="1", GLOO_SOCKET_IFNAME="lo")


@pytest.mark.parametrize(
    ("launcher", "says", "code", "given", "told"),
    [
        (OURS, "there", 1, {}, "/runs/0/stdout: "),
        (OURS, "here", 0, {}, "/runs/0/code: 0, recorded 1"),
        (TORCHRUN, "here", 2, {}, "/runs/0/code: 2, recorded 1"),
        (OURS, "here", 1, {"NEW": "1"}, "/ranks/0.0/is given/NEW: '1', recorded None"),
    ],
)
def test_what_is_not_the_same_is_told(
    file: Path, launcher: Launcher, says: str, code: int, given: dict[str, str], told: str
) -> None:
    with pytest.raises(AssertionError, match="not as recorded") as error:
        of_a_rank(file / "other", launcher, f"{says} {file}/other 12345", code, **given)
    assert told in str(error.value)


def test_a_case_that_is_not_recorded_is_told(file: Path) -> None:
    record.FILE.write_text("{}")
    with pytest.raises(AssertionError, match="make it with ODYSSEY_REWRITE=1"):
        of_a_rank(file / "other", OURS, "here")


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "records").glob("*.json")), ids=lambda path: path.stem)
def test_every_record_is_of_a_case_that_there_is(path: Path) -> None:
    for case in json.loads(path.read_text()):
        file, _, test = case.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), case
