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
    config.pluginmanager.register(GoingOn(file, code, getattr(config, "workerinput", None)))
"""
TESTS = """
import os
from pathlib import Path
import pytest

@pytest.fixture
def left():
    yield
    assert not Path("left").exists()

@pytest.mark.parametrize("name", ["a", "b", "left", "dies", "z"])
def test_each(name, left):
    with Path("ran").open("a") as file:
        file.write(name + " ")
    if name == "dies" and Path(name).exists():
        os._exit(1)
    assert not Path(name).exists() or name == "left"
"""
EACH = ["a", "b", "dies", "left", "z"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With such tests."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "code").write_text("one")
    return tmp_path


def run(folder: Path, *arguments: str) -> list[str]:
    """Which of them ran."""
    (folder / "ran").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_some.py"]
    subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=100)
    return sorted((folder / "ran").read_text().split())


@pytest.mark.soak
def test_what_has_passed_on_the_same_code_is_left_out(folder: Path) -> None:
    """What has failed, in its teardown too, is run again; with other code all are."""
    (folder / "b").touch()
    assert run(folder, "-n", "2") == EACH
    (folder / "b").unlink()
    (folder / "left").touch()
    assert run(folder, "-k", "b or each[left]") == ["b"]  # `left` has passed before; `b` fails at its teardown
    (folder / "left").unlink()
    assert run(folder) == ["b"]
    assert run(folder, "-n", "2") == []
    (folder / "code").write_text("another")
    assert run(folder) == EACH


@pytest.mark.soak
def test_a_process_that_takes_the_place_of_another_one_leaves_out_the_same(folder: Path) -> None:
    (folder / "dies").touch()
    assert run(folder, "-n", "1") == EACH
    (folder / "dies").unlink()
    assert run(folder) == ["dies"]


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
