"""A run of tests that was cut off goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.going_on import Code, GoingOn

CONFTEST = """
from pathlib import Path
from tests.going_on import GoingOn

def pytest_configure(config):
    file, code = Path("passed"), Path("code").read_text()
    config.pluginmanager.register(GoingOn(file, lambda test: code, getattr(config, "workerinput", None)))
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With two files of tests, of which one runs a job by way of a module that both could use."""
    texts = {
        "product.py": "one",
        "docs/status.md": "one",
        "docs/hosts.md": "one",
        "tests/conftest.py": "import common",
        "tests/common.py": "one",
        "tests/room/test_job.py": "from tests.room import runs",
        "tests/room/runs.py": "run('tests/jobs/train.py')",
        "tests/jobs/train.py": "one",
        "tests/jobs/job.yaml": "one",
        "tests/test_other.py": "one",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init"], check=True, capture_output=True)
    subprocess.run([*git, "add", "."], check=True, capture_output=True)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "job", "other"),
    [
        ("docs/status.md", False, False),
        *((name, True, True) for name in ("product.py", "docs/hosts.md", "tests/jobs/job.yaml", "tests/conftest.py")),
        ("tests/common.py", True, True),
        *((name, True, False) for name in ("tests/room/test_job.py", "tests/room/runs.py", "tests/jobs/train.py")),
        ("tests/test_other.py", False, True),
        ("new", True, True),
    ],
)
def test_code_is_another_one_for_those_who_run_what_has_changed(name: str, job: bool, other: bool, repository: Path) -> None:
    """Whether git knows of the change or not; and the same again when it is undone."""

    def keys() -> list[str]:
        code = Code(repository)
        return [code.key_of("tests/room/test_job.py"), code.key_of("tests/test_other.py")]

    before, file = keys(), repository / name
    text = file.read_text() if file.exists() else None
    file.write_text(f"{text} two")
    changed = keys()
    assert [key != its for key, its in zip(changed, before, strict=True)] == [job, other]
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    assert keys() == changed
    file.unlink()
    assert [key != its for key, its in zip(keys(), before, strict=True)] == ([job, other] if text else [False, False])
    if text:
        file.write_text(text)
    assert keys() == before


def test_one_test_counts_for_the_file_that_it_is_in(tmp_path: Path) -> None:
    """What has passed on other code leaves the record, and nothing else does."""
    keys, file = {"a.py": "1", "b.py": "2"}, tmp_path / "passed"
    file.write_text("1 a.py::test[x y]\n2 b.py::test\n")
    assert GoingOn(file, keys.__getitem__, None) and len(file.read_text().splitlines()) == 2
    keys["b.py"] = "3"
    assert GoingOn(file, keys.__getitem__, None) and file.read_text() == "1 a.py::test[x y]\n"
