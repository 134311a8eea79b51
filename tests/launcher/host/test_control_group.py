"""What control groups leave a process, by trees as containers, SLURM and systemd make them, and by a real group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.host.fitness import measure_host
from launcher.host.fitness.judgement import judge
from odyssey import control_group
from odyssey.control_group import Allowance
from tests import ROOT

GIB = 1 << 30
V2 = "25 1 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
NONE = str(0x7FFFFFFFFFFFF000)
"""What version 1 says for no limit."""


def tree(root: Path, groups: str, mounts: str, **files: str) -> Path:
    """`files`: what they hold, by their paths below /sys/fs/cgroup, `__` for `/` and `_` for `.` before the last word."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{groups}\n")
    (root / "proc/self/mountinfo").write_text(f"{mounts}\n")
    for name, text in files.items():
        *folders, file = name.split("__")
        path = root.joinpath("sys/fs/cgroup", *folders, file.replace("_", ".", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_the_least_of_all_groups_that_a_process_is_in_counts(tmp_path: Path) -> None:
    files = {
        "slurm__job__step__memory_max": "max",
        "slurm__job__step__memory_current": "7",
        "slurm__job__memory_max": str(3 * GIB),
        "slurm__job__memory_current": str(GIB),
        "slurm__job__memory_stat": f"anon 5\ninactive_file {GIB // 2}",
        "slurm__memory_max": str(64 * GIB),
        "slurm__memory_current": str(63 * GIB),
        "slurm__job__step__cpu_max": "max 100000",
        "slurm__job__cpu_max": "30000 100000",
        "slurm__cpu_max": "800000 100000",
    }
    root = tree(tmp_path, "0::/slurm/job/step", V2, **files)
    assert control_group.allowance(root) == Allowance(3 * GIB, GIB, 0.3)
    assert control_group.memory_bytes(root) <= 3 * GIB and control_group.n_processors(root) == 1


def test_memory_from_which_on_a_group_is_slowed_down_is_its_limit(tmp_path: Path) -> None:
    files = {"memory_max": str(4 * GIB), "memory_high": str(2 * GIB), "memory_current": str(3 * GIB)}
    assert control_group.allowance(tree(tmp_path, "0::/", V2, **files)) == Allowance(2 * GIB, 0, None)


def test_a_host_without_limits_is_left_whole(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    root = tree(tmp_path, "0::/user.slice", V2, user__memory_current="5")
    assert control_group.allowance(root) == Allowance()
    assert control_group.allowance(tmp_path / "nothing") == Allowance()
    assert control_group.memory_bytes(root) == physical and control_group.n_processors(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("mounted", ["/", "/docker/7"], ids=["of the host", "of a container"])
def test_version_1_has_a_tree_for_each_controller(tmp_path: Path, mounted: str) -> None:
    """A container sees its own group as the tree's root, and is told its path on the host."""
    inside = "" if mounted != "/" else "docker__7__"
    mounts = "\n".join(
        f"3{at} 25 0:3{at} {mounted} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
        for at, name in enumerate(("memory", "cpu,cpuacct"))
    )
    files = {
        f"memory__{inside}memory_limit.in.bytes": "",
        f"cpu,cpuacct__{inside}cpu_cfs.quota.us": "",
    }
    root = tree(tmp_path, "4:memory:/docker/7\n2:cpu,cpuacct:/docker/7\n0::/", mounts, **files)
    memory = root.joinpath("sys/fs/cgroup/memory", *inside.split("__"))
    processors = root.joinpath("sys/fs/cgroup/cpu,cpuacct", *inside.split("__"))
    (memory / "memory.limit_in_bytes").write_text(f"{3 * GIB // 2}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (memory / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB // 4}\n")
    (processors / "cpu.cfs_quota_us").write_text("250000\n")
    (processors / "cpu.cfs_period_us").write_text("100000\n")
    assert control_group.allowance(root) == Allowance(3 * GIB // 2, 3 * GIB // 4, 2.5)


def test_version_1_says_no_limit_by_a_number(tmp_path: Path) -> None:
    mounts = "\n".join(f"3 2 0:3 / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}" for name in ("memory", "cpu"))
    root = tree(tmp_path, "4:memory:/\n1:cpu:/", mounts)
    for name, text in {
        "memory/memory.limit_in_bytes": NONE,
        "memory/memory.usage_in_bytes": "1",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert control_group.memory_bytes(root) == physical and control_group.allowance(root).processors is None


def test_a_host_whose_group_leaves_less_than_a_processor_for_each_rank_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_host, "_flops", lambda *given: 10.0)
    monkeypatch.setattr(control_group, "allowance", lambda root=None: Allowance(3 * GIB // 2, GIB, 0.3))
    report = measure_host.measure_host(1, tmp_path)
    assert (report.n_processors, report.memory_bytes) == (0.3, 3 * GIB // 2) and report.available_bytes <= GIB
    assert report.devices[0].memory_bytes == 3 * GIB // 2
    (complaint,) = report.complaints
    assert complaint.startswith("its control group leaves it 0.3 processors")
    assert complaint in [finding.what for finding in judge([report])]
    monkeypatch.setattr(control_group, "allowance", lambda root=None: Allowance())
    whole = measure_host.measure_host(1, tmp_path)
    assert whole.complaints == () and whole.n_processors == len(os.sched_getaffinity(0))
    assert whole.devices[0].flops == 10.0 and report.devices[0].flops == 10.0 * 0.3 / whole.devices[0].n_threads


REPORTS = """
import json, os, sys
for group in sys.argv[1:]:
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from odyssey import control_group
print(json.dumps([*control_group.allowance(), control_group.memory_bytes(), control_group.n_processors()]))
"""


def test_a_real_group_is_seen(tmp_path: Path) -> None:
    """With 1.5 GiB and 30 % of a processor."""
    v2 = Path("/sys/fs/cgroup")
    groups: list[Path] = []
    is_v2 = (v2 / "cgroup.controllers").exists()
    trees = [v2] if is_v2 else [v2 / "memory", v2 / "cpu"]
    limits = (
        {"memory.max": str(3 * GIB // 2), "cpu.max": "30000 100000"}
        if is_v2
        else {"memory.limit_in_bytes": str(3 * GIB // 2), "cpu.cfs_quota_us": "30000"}
    )
    try:
        for at in trees:
            group = at / f"odyssey-test-{os.getpid()}"
            try:
                group.mkdir()
                groups.append(group)
                for name, text in limits.items():
                    if (group / name).exists():
                        (group / name).write_text(text)
                if not any((group / name).exists() for name in limits):
                    pytest.skip(f"no controllers for a new group of {at}")
            except OSError as error:
                pytest.skip(f"no group can be made here: {error}")
        command = [sys.executable, "-c", REPORTS, *map(str, groups)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        memory, free, processors, usable, n = json.loads(done.stdout)
        assert memory == usable == 3 * GIB // 2 and 0 < free <= memory
        assert (processors, n) == (0.3, 1)
    finally:
        for group in groups:
            group.rmdir()
