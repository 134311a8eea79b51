"""A run of tests that was cut off goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.going_on import code_of

CONFTEST = """
from pathlib import Path
from tests.going_on import GoingOn

def pytest_configure(config):
    file, code = Path("passed"), Path("code").read_text()
    config.pluginmanager.register(GoingOn(file, code, writes=not hasattr(config, "workerinput")))
"""
TESTS = """
from pathlib import Path
import pytest

@pytest.fixture
def left():
    yield
    assert not Path("left").exists()

@pytest.mark.parametrize("name", ["a", "b", "left"])
def test_each(name, left):
    with Path("ran").open("a") as file:
        file.write(name + " ")
    assert not Path(name).exists() or name == "left"
"""


@pytest.mark.soak
def test_what_has_passed_on_the_same_code_is_left_out(tmp_path: Path) -> None:
    """What has failed, in its teardown too, is run again; with other code all are."""

    def run(*arguments: str) -> list[str]:
        (tmp_path / "ran").write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_some.py"]
        subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=100)
        return sorted((tmp_path / "ran").read_text().split())

    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "code").write_text("one")
    (tmp_path / "b").touch()
    assert run("-n", "2") == ["a", "b", "left"]
    (tmp_path / "b").unlink()
    (tmp_path / "left").touch()
    assert run("-k", "b or each[left]") == ["b"]  # `left` has passed before; `b` fails at its teardown
    (tmp_path / "left").unlink()
    assert run() == ["b"]
    assert run("-n", "2") == []
    (tmp_path / "code").write_text("another")
    assert run() == ["a", "b", "left"]


def test_code_is_another_one_with_any_change_but_of_a_page(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        given = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", "-C", str(tmp_path), *given, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "status.md").write_text("one")
    (tmp_path / "file").write_text("one")
    git("add", ".")
    git("commit", "-m", "one")
    first = code_of(tmp_path)
    (tmp_path / "docs" / "status.md").write_text("two")
    assert code_of(tmp_path) == first
    git("commit", "-am", "two")
    assert code_of(tmp_path) == first
    (tmp_path / "file").write_text("two")
    changed = code_of(tmp_path)
    (tmp_path / "new").write_text("three")
    new = code_of(tmp_path)
    (tmp_path / "new").write_text("four")
    assert len({first, changed, new, code_of(tmp_path)}) == 4
    (tmp_path / "new").unlink()
    (tmp_path / "file").write_text("one")
    assert code_of(tmp_path) == first
