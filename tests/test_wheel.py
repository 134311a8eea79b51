"""The wheel, installed in an environment of its own: it leaves other people's names alone, and finds its own packages.

The project that is run has a folder or file of every name that ours have, each time in another form.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from odyssey import kernel
from tests import ROOT
from tests.launchers import Run, Scene, scene_in
from tests.test_architecture import OURS

pytestmark = pytest.mark.timeout(240)

INSTALLED = {"odyssey", "odyssey_cli"}
COMPILED = "_compiled_"
SHARED = sorted(OURS - INSTALLED)
"""Names that are free for projects to use."""
FORMS = {
    "module": ("{}.py", "{}"),
    "package": ("{}/__init__.py", "{}"),
    "folder": ("{}/own.py", "{}.own"),
}
"""What a project makes of a name: the file, and how it is imported."""

SCRIPT = """
import importlib, json, os, sys
shared = {shared!r}
found = dict(
    loaded=[name for name in sys.modules if name.partition(".")[0] in (*shared, "odyssey_cli")],
    path=[entry for entry in sys.path if "_packages" in entry],
    finders=[str(finder) for finder in sys.meta_path if "odyssey" in str(finder)],
    variables={{name: value for name, value in os.environ.items() if "_packages" in value}},
    python_path=os.environ.get("PYTHONPATH"),
)
{body}
found["whose"] = {{name: importlib.import_module(name).WHOSE for name in {names!r}}}
with open(os.environ["PROBES"] + "/" + os.environ.get("RANK", "alone"), "w") as file:
    json.dump(found, file)
"""
TRAIN = """
import odyssey, os, signal, torch
job = odyssey.Job(
    layers=lambda: [torch.nn.Linear(8, 8) for _ in range(4)],
    loss=lambda output, target: ((output - target) ** 2).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8)),
    global_batch=8, micro_batch=2, seed=0,
)
for step in job.steps(8):
    if step.index == 4 and job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def built(tmp_path_factory: pytest.TempPathFactory, **variables: str) -> Path:
    """From a copy, so that the source tree stays as it is."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in OURS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "_compiled_*"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, env=os.environ | variables)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has the wheel, and by a path torch and the rest of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*install, wheel], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "torch-of-the-tests.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    return folder / "bin" / "python"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with scene_in(tmp_path) as scene:
        yield scene


def make_project(scene: Scene, turn: int, body: str = "") -> None:
    """`turn`: which name has which form. Files that are called as modules inside of ours are there in any case."""
    names = []
    for i, name in enumerate(SHARED):
        file, module = list(FORMS.values())[(i + turn) % len(FORMS)]
        scene.write(file.format(name), "WHOSE = 'the user'")
        names.append(module.format(name))
    for name in ("errors", "own_packages", "spawn"):
        scene.write(f"{name}.py", "WHOSE = 'the user'")
        names.append(name)
    scene.write("train.py", SCRIPT.format(shared=SHARED, names=names, body=body))


def cache_of(scene: Scene) -> dict[str, str]:
    """Torch's own, for a script that has an optimizer."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(scene.folder / "inductor")}


def assert_each_has_its_own(scene: Scene, run: Run, n_ranks: int) -> None:
    run.succeed()
    found = [json.loads((scene.probes_dir / str(rank)).read_text()) for rank in range(n_ranks)]
    for one in found:
        assert set(one.pop("whose").values()) == {"the user"}
        assert one == {
            "loaded": [],
            "path": [],
            "finders": [],
            "variables": {},
            "python_path": run.env.get("PYTHONPATH"),
        }
    scene.assert_nothing_left()


def compiled_in(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if COMPILED in name]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_a_wheel_has_the_kernel_compiled_under_the_name_of_its_source(wheel: Path) -> None:
    (name,) = compiled_in(wheel)
    assert name.startswith(f"odyssey/kernel/{kernel.compiled_name(kernel.SOURCE.read_bytes())}.")


@pytest.mark.parametrize("missing", [pytest.param("compiler", marks=pytest.mark.soak), "mypyc"])
def test_a_wheel_is_built_without_the_kernel_where_that_cannot_be_compiled(
    missing: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    variables = {"CC": "false"}
    if missing == "mypyc":
        folder = tmp_path_factory.mktemp("mypyc")
        (folder / "mypyc.py").write_text("raise ImportError('there is none')")
        variables = {"PYTHONPATH": str(folder)}
    wheel = built(tmp_path_factory, **variables)
    assert compiled_in(wheel) == []
    assert "odyssey/kernel/plain.py" in zipfile.ZipFile(wheel).namelist()


def test_a_wheel_has_all_files_of_ours_and_two_names(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if COMPILED not in name}

    ours = {
        file.relative_to(ROOT).as_posix()
        for name in OURS
        for file in (ROOT / name).rglob("*")
        if file.is_file() and file.suffix != ".pyc" and COMPILED not in file.name
    }
    expected = {name if name.startswith("odyssey") else f"odyssey_cli/_packages/{name}" for name in ours}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == INSTALLED


@pytest.mark.parametrize("turn", range(len(FORMS)))
def test_a_project_finds_its_own_under_plain_python(python: Path, scene: Scene, turn: int) -> None:
    make_project(scene, turn)
    scene.start_command([str(python), "train.py"]).succeed()
    assert set(json.loads((scene.probes_dir / "alone").read_text())["whose"].values()) == {"the user"}


@pytest.mark.soak
def test_a_project_finds_its_own_under_torchrun(python: Path, scene: Scene) -> None:
    make_project(scene, 0)
    scene.start_command([str(python), "-m", "torch.distributed.run", "--standalone", "train.py"]).succeed()
    assert set(json.loads((scene.probes_dir / "0").read_text())["whose"].values()) == {"the user"}


@pytest.mark.parametrize(
    ("command", "turn", "variables"),
    [
        (("bin/odyssey", "run", "--nproc-per-node=2", "train.py"), 0, {"PYTHONPATH": "."}),
        (("-m", "odyssey_cli.launch", "--use-env", "--nproc-per-node=2", "train.py"), 1, {"ODYSSEY_ZYGOTE": "0"}),
        (("-m", "odyssey_cli", "run", "--nproc-per-node=2", "train.py"), 2, {"ODYSSEY_ZYGOTE": "0", "PYTHONPATH": "."}),
        *(
            pytest.param(command, turn, variables, marks=pytest.mark.soak)
            for command, turn, variables in [
                (("bin/odyssey-torchrun", "--nproc-per-node=2", "train.py"), 1, {"ODYSSEY_ZYGOTE": "0"}),
                (("-m", "odyssey_cli.torchrun", "--nproc-per-node=2", "-m", "train"), 2, {"PYTHONPATH": "."}),
            ]
        ),
    ],
    ids=["odyssey", "module-launch", "module-odyssey", "odyssey-torchrun", "module-torchrun"],
)
def test_launcher_and_project_find_each_its_own(
    python: Path, scene: Scene, command: tuple[str, ...], turn: int, variables: dict[str, str]
) -> None:
    make_project(scene, turn)
    first, *rest = command
    begin = first if first == "-m" else str(python.parents[1] / first)
    run = scene.start_command([str(python), begin, *rest], env=variables | cache_of(scene))
    assert_each_has_its_own(scene, run, 2)


def test_a_job_is_planned_recovered_and_seen_from_inside_such_a_project(python: Path, scene: Scene) -> None:
    make_project(scene, 1, body=TRAIN)
    here = {"PYTHONPATH": ".", **cache_of(scene)}
    odyssey = [str(python), "-m", "odyssey_cli"]
    run = scene.start_command([*odyssey, "run", "--nodes=3", "train.py"], env=here)
    assert_each_has_its_own(scene, run, 2)
    assert "rank 2 lost" in run.stderr and "Traceback" not in run.stderr  # also the process that plans ahead has no complaint

    seen = scene.start_command([*odyssey, "ps", "--all"], env=here).succeed()
    assert "train.py" in seen.stdout
    planned = scene.start_command([*odyssey, "plan", "gpt-tiny-two-cores", "--fail-ranks=3"], env=here).succeed()
    assert planned.stdout.startswith("now  layout")


@pytest.mark.soak
def test_a_cluster_is_rehearsed_and_its_log_replayed_from_inside_such_a_project(python: Path, scene: Scene) -> None:
    make_project(scene, 2)
    here = {"PYTHONPATH": ".", **cache_of(scene)}
    odyssey = [str(python), "-m", "odyssey_cli"]
    small = ["--nodes=1", "--nproc-per-node=2", "--layout=2x1", "--speed=50", "--steps=4", "--drill=step=2 lose=1"]
    run = scene.start_command([*odyssey, "rehearse", "gpt3-medium-a100-32", "--no-display", *small], env=here).succeed()
    assert "(rehearsed)" in run.stderr and "rank 1 is lost: stage 0 of pipeline 1" in run.stdout
    scene.assert_nothing_left()

    (job,) = (path for path in (scene.cwd / "odyssey-logs").iterdir() if path.is_dir())
    again = scene.start_command([*odyssey, "replay", str(job)], env=here).succeed()
    assert "decisions came out the same" in again.stdout
    drawn = ["exponential", "gpt-tiny-two-cores", "--mtbf=6h", "--days=1", "--policy=shrink"]
    replayed = scene.start_command([*odyssey, "replay", *drawn], env=here).succeed()
    assert replayed.stdout.startswith("trace  exponential: ")


@pytest.mark.soak
def test_hosts_are_checked_before_a_job_from_inside_such_a_project(python: Path, scene: Scene) -> None:
    make_project(scene, 1)
    command = [str(python), "-m", "odyssey_cli", "run", "--check", "train.py"]
    run = scene.start_command(command, env={"PYTHONPATH": ".", **cache_of(scene)})
    assert_each_has_its_own(scene, run, 1)
    assert "check: 1 host: all good" in run.stderr


@pytest.mark.soak
def test_hosts_are_checked_by_themselves_from_inside_such_a_project(python: Path, scene: Scene) -> None:
    """By the same process for each host, and that of an agent."""
    make_project(scene, 1)
    command = [str(python), "-m", "odyssey_cli", "check"]
    checked = scene.start_command(command, env={"PYTHONPATH": ".", **cache_of(scene)}).succeed()
    assert "1 host: all good" in checked.stdout
