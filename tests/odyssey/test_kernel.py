"""The kernel: list scheduling as a dumb simulation has it, and which of both kernels a process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from odyssey import kernel
from tests import ROOT


@dataclass(frozen=True)
class Case:
    """Micro-batches through stages: by task the row, by stage the costs and the way to it, by row the cap."""

    n_stages: int
    rows: list[int]
    costs: list[tuple[bool, tuple[int, int, int, int], int, int]]
    ways: list[int]
    caps: list[int]
    forwards_first: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_stages, n_rows, n = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    few = st.integers(1, 9)
    return Case(
        n_stages,
        draw(st.lists(st.integers(0, n_rows - 1), min_size=n * n_stages, max_size=n * n_stages)),
        [(draw(st.booleans()), draw(st.tuples(few, few, few, few)), draw(few), draw(few)) for _ in range(n_stages)],
        [draw(st.integers(0, 5)) for _ in range(n_stages)],
        [draw(st.integers(5, 60)) for _ in range(n_rows)],
        draw(st.booleans()),
    )


def scheduled(case: Case) -> tuple[list[int], int]:
    """Ops as the kernel starts them, and the makespan."""
    n = len(case.rows) // case.n_stages
    tasks = kernel.Tasks(
        case.rows, [s == 0 for s in range(case.n_stages)] * n, [s == case.n_stages - 1 for s in range(case.n_stages)] * n
    )
    run = kernel.Scheduler(
        tasks, [kernel.Part(*cost) for cost in case.costs] * n, case.ways * n, case.caps, case.forwards_first
    )
    run.play()
    return run.started, run.now


class Dumb:
    """The same, tick by tick: nothing is remembered but what is done, what is on its way and who is busy until when."""

    def __init__(self, case: Case) -> None:
        self.case, self.n = case, case.n_stages
        self.input_at = dict.fromkeys(range(0, len(case.rows), self.n), 0)
        self.gradient_at: dict[int, int] = {}
        self.forward: set[int] = set()
        self.back: set[int] = set()
        self.halves: set[int] = set()
        self.live = [0] * len(case.caps)
        self.busy: dict[int, tuple[int, int]] = {}
        self.started: list[int] = []
        self.now = 0

    def play(self) -> tuple[list[int], int]:
        while True:
            self._end_what_ends()
            for row in range(len(self.case.caps)):
                if row not in self.busy and (op := self._choice(row)) is not None:
                    self._start(row, op)
            later = [at for at, _ in self.busy.values()]
            later += [at for at in (*self.input_at.values(), *self.gradient_at.values()) if at > self.now]
            if later:
                self.now = min(later)
            elif not self._overdraw():
                return self.started, self.now

    def _ready(self, row: int, at: dict[int, int], done: set[int]) -> list[int]:
        return sorted(t for t, when in at.items() if self.case.rows[t] == row and when <= self.now and t not in done)

    def _choice(self, row: int) -> int | None:
        forwards = self._ready(row, self.input_at, self.forward)
        backwards = self._ready(row, self.gradient_at, self.back)
        urgent = [t for t in backwards if t % self.n]
        deferred = sorted([t for t in backwards if t % self.n == 0] + [t for t in self.halves if self.case.rows[t] == row])
        room = self.case.caps[row] - self.live[row]
        has_room = bool(forwards) and self.case.costs[forwards[0] % self.n][2] <= room
        wait = 4 * deferred[0] + (3 if deferred[0] % self.n else 1) if deferred else None
        if urgent and not (self.case.forwards_first and has_room):
            splits, _, _, defers = self.case.costs[urgent[0] % self.n]
            if splits and defers <= room:
                return 4 * urgent[0] + 2
            return wait if splits and wait is not None else 4 * urgent[0] + 1
        return 4 * forwards[0] if has_room else wait

    def _start(self, row: int, op: int) -> None:
        task, kind = op >> 2, op & 3
        _, times, keeps, defers = self.case.costs[task % self.n]
        self.live[row] += (keeps, 0, defers, 0)[kind]
        {0: self.forward, 1: self.back, 2: self.back, 3: set()}[kind].add(task)
        self.halves.discard(task)
        self.busy[row] = self.now + times[kind], op
        self.started.append(op)

    def _end_what_ends(self) -> None:
        for row, (at, op) in list(self.busy.items()):
            if at > self.now:
                continue
            del self.busy[row]
            task, kind = op >> 2, op & 3
            _, _, keeps, defers = self.case.costs[task % self.n]
            self.live[row] -= (0, keeps, 0, keeps + defers)[kind]
            if kind == 0 and (task + 1) % self.n:
                self.input_at[task + 1] = self.now + self.case.ways[(task + 1) % self.n]
            elif kind == 0:
                self.gradient_at[task] = self.now
            elif kind != 3 and task % self.n:
                self.gradient_at[task - 1] = self.now + self.case.ways[task % self.n]
            if kind == 2:
                self.halves.add(task)

    def _overdraw(self) -> bool:
        waiting = [(row, self._ready(row, self.input_at, self.forward)) for row in range(len(self.case.caps))]
        short = [
            (self.live[row] + self.case.costs[its[0] % self.n][2] - self.case.caps[row], row, its[0])
            for row, its in waiting
            if its
        ]
        if short:
            _, row, task = min(short)
            self._start(row, 4 * task)
        return bool(short)


@given(cases())
def test_list_scheduling_is_what_a_simulation_without_a_queue_of_events_makes_of_its_rules(case: Case) -> None:
    started, ends = scheduled(case)
    expected, expected_end = Dumb(case).play()
    assert ends == expected_end
    for row in range(len(case.caps)):
        assert [op for op in started if case.rows[op >> 2] == row] == [op for op in expected if case.rows[op >> 2] == row]


def is_compiled(root: Path, **variables: str) -> bool:
    """Whether a process that has its `odyssey` from there runs the compiled kernel."""
    command = [sys.executable, "-c", "from odyssey import kernel; print(kernel.__file__, kernel.IS_COMPILED)"]
    said = subprocess.run(
        command, cwd=root, env=os.environ | variables, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[0] == str(root / "odyssey/kernel/__init__.py")
    return said[1] == "True"


def test_the_source_runs_where_that_is_asked_for() -> None:
    assert not is_compiled(ROOT, ODYSSEY_KERNEL="plain")
    assert is_compiled(ROOT, ODYSSEY_KERNEL="") == any((ROOT / "odyssey/kernel").glob(f"{name()}.*"))


def name() -> str:
    return kernel.compiled_name(kernel.SOURCE.read_bytes())


def test_a_compiled_kernel_of_another_source_is_not_used(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "odyssey", tmp_path / "odyssey", ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "kernel/plain.py"
    source.write_bytes(source.read_bytes() + b"# edited\n")
    assert not is_compiled(tmp_path, ODYSSEY_KERNEL="")
