"""A project's file with the name of a module that torch has imported means the same under us as under `python train.py`."""

from __future__ import annotations

import zipfile

import pytest

from tests.launchers import OURS, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(120)

OWN = "WHOSE = 'the user'\ndef monthrange(*_): return (0, 30)\n"
SCRIPT = "import os, calendar; os.write(1, getattr(calendar, 'WHOSE', 'Python').encode())"


@pytest.mark.parametrize("kind", ["script", "module", "path", "directory", "zip"])
def test_what_hides_a_module_of_the_standard_library_wins(scene: Scene, kind: str) -> None:
    folder = "" if kind in ("module", "path") else "below/"
    scene.write(f"{folder}calendar.py", OWN)
    scene.write(f"{folder}__main__.py", SCRIPT)
    scene.write(f"{folder}train.py", SCRIPT)
    if kind == "zip":
        with zipfile.ZipFile(scene.cwd / "app.zip", "w") as file:
            file.write(scene.cwd / "below/calendar.py", "calendar.py")
            file.write(scene.cwd / "below/__main__.py", "__main__.py")
    arguments = {
        "script": ["below/train.py"],
        "module": ["-m", "train"],
        "path": ["--run-path", "train.py"],
        "directory": ["below"],
        "zip": ["app.zip"],
    }[kind]

    run = scene.start(OURS, *arguments).succeed()

    assert run.stdout == "the user"
    assert "calendar.py has the name of a module that torch imports" in run.stderr


@pytest.mark.parametrize(
    "path",
    [
        "calendar/data.txt",  # a folder that is no package hides nothing
        "site.py",  # every interpreter has this one before it looks
        "zipimport.py",  # and this one is in it
    ],
)
def test_what_hides_nothing_costs_no_fork(scene: Scene, path: str) -> None:
    scene.write(path, "raise AssertionError")
    scene.write("train.py", SCRIPT)

    run = scene.start(OURS, "train.py").succeed()

    assert run.stdout == "Python"
    assert "not forked" not in run.stderr


def test_a_project_called_as_we_are_is_run(scene: Scene) -> None:
    scene.write("odyssey/__init__.py", "WHOSE = 'the user'")
    scene.write("train.py", "import os, odyssey; os.write(1, odyssey.WHOSE.encode())")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(scene.folder / "inductor")}  # torch's own, for who imports its compiler
    for env in (cache, {"PYTHONPATH": str(scene.cwd), **cache}):
        assert scene.start(OURS, "train.py", env=env).succeed().stdout == "the user"
