"""Where ranks are in their Python code: read from outside, folded to what a person needs, grouped by what is the same.

`py-spy` reads a process without its help, where it is installed and allowed to. Else the rank's own faulthandler writes,
which only ranks that the zygote has forked are prepared for (odyssey/zygote/entry.py). Both work on a rank that hangs in C,
and neither is waited for long.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec.structs import replace

import odyssey
from launcher.host import proc
from launcher.host.handle import Handle
from odyssey.codec import Json, Malformed, for_people
from odyssey.plan.worker import Rank
from odyssey.zygote.protocol import STACKS_FILE, STACKS_SIGNAL

LIMIT_S = 5.0
"""For all ranks together, and for each of the two ways."""
MAX_TEXT = 300
"""Characters of what another agent has read."""
_LOOK_S = 0.01
_NO_SPY = "py-spy is not installed (pip install py-spy), and only ranks that were forked by the launcher can tell it themselves"


class Frame(msgspec.Struct, frozen=True):
    """A call. `function`: `load`, or `Dataset.load` where whoever read it could tell."""

    file: str
    line: int
    function: str


class Stack(msgspec.Struct, frozen=True):
    """The calls of a rank's main thread, innermost call first. `problem`: why there are no frames."""

    frames: tuple[Frame, ...] = ()
    problem: str = ""


class Group(msgspec.Struct, frozen=True):
    """Ranks that are at the same place. `waits`: in a call of torch, for a device or for other ranks; `place`: for people."""

    ranks: tuple[Rank, ...]
    place: str
    waits: bool
    readable: bool = True


# -- folding and grouping ----------------------------------------------------------------------------------------------


def group(stacks: Mapping[Rank, Stack]) -> list[Group]:
    """The largest group first; those that could not be read at the end.

    Ranks are together if their user's frames are, and what these called in a library; where exactly the library is does
    not matter.
    """
    together: dict[tuple[object, ...], list[Rank]] = {}
    for rank, stack in sorted(stacks.items()):
        users = tuple(frame for frame in stack.frames if not _is_of_a_library(frame))
        together.setdefault((users, place(stack), waits(stack), bool(stack.frames)), []).append(rank)
    groups = []
    for ranks in together.values():
        first = stacks[ranks[0]]
        groups.append(Group(tuple(ranks), place(first), waits(first), bool(first.frames)))
    return sorted(groups, key=lambda group: (not group.readable, -len(group.ranks), group.ranks))


def place(stack: Stack) -> str:
    """`all_reduce (train.py:88 step)`: what the user's code called in a library, and from where; or `load (data.py:17)`."""
    if not stack.frames:
        return stack.problem
    if not _is_of_a_library(stack.frames[0]):
        return f"{stack.frames[0].function} ({_at(stack.frames[0])})"
    called = stack.frames[0]
    for frame in stack.frames:
        if not _is_of_a_library(frame):
            return f"{called.function} ({_at(frame)} {frame.function})"
        if frame.function.rpartition(".")[2] not in _WRAPPERS:
            called = frame
    inner = stack.frames[0]
    return f"{inner.function} ({_at(inner)})"


def waits(stack: Stack) -> bool:
    """Whether it is inside torch: of a rank that uses no processor, that is a wait for a device or for the other ranks."""
    if not stack.frames or not _is_of_a_library(stack.frames[0]):
        return False
    file = stack.frames[0].file
    return "/torch/" in file and "/torch/utils/" not in file


def outliers(groups: Sequence[Group]) -> frozenset[Rank]:
    """The ranks that do not wait with the others; none where nobody stands out."""
    known = [group for group in groups if group.readable]
    apart = [group for group in known if not group.waits]
    if len(apart) < len(known) and apart:
        return frozenset(rank for group in apart for rank in group.ranks)
    n_ranks = sum(len(group.ranks) for group in known)
    if known and n_ranks > len(known[0].ranks) > n_ranks / 2:
        return frozenset(rank for group in known[1:] for rank in group.ranks)
    return frozenset()


def lines(groups: Sequence[Group]) -> list[str]:
    """`ranks 0-2,4-7: 7 ranks wait in all_reduce (train.py:88 step)`."""
    texts = []
    for group in groups:
        n = len(group.ranks)
        name = f"{'rank' if n == 1 else 'ranks'} {ranges(group.ranks)}:"
        if not group.readable:
            texts.append(f"{name} {'its stack' if n == 1 else 'their stacks'} could not be read: {group.place}")
        elif group.waits:
            texts.append(f"{name} {'waits' if n == 1 else f'{n} ranks wait'} in {group.place}")
        else:
            texts.append(f"{name} in {group.place}")
    return texts


def frames_for_people(stack: Stack) -> list[Frame]:
    """All but what started the script; innermost first."""
    frames = list(stack.frames)
    while len(frames) > 1 and frames[-1].file.startswith((_OURS, "<frozen runpy")):
        frames.pop()
    return frames


def cleaned(stack: Stack) -> Stack:
    """As another agent has read it: without what a terminal would obey."""
    frames = [
        replace(frame, file=for_people(frame.file, MAX_TEXT), function=for_people(frame.function, MAX_TEXT))
        for frame in stack.frames
    ]
    return Stack(tuple(frames), for_people(stack.problem, MAX_TEXT))


def ranges(ranks: Sequence[Rank]) -> str:
    """`0-2,5`: of ranks in ascending order."""
    runs: list[list[Rank]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_WRAPPERS = {"wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl", "__call__"}
"""Names of library functions that only call what the user meant."""
_OURS = str(Path(odyssey.__file__).parent) + os.sep
_TORCH = find_spec("torch")
_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")),
    *(root + os.sep for root in (_TORCH.submodule_search_locations or () if _TORCH is not None else ())),  # wherever it is
    _OURS,
    "<frozen ",
)


def _is_of_a_library(frame: Frame) -> bool:
    file = frame.file
    return file.startswith(_LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file or "/lib/python3." in file


def _at(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line}"


# -- reading -----------------------------------------------------------------------------------------------------------


class Reading:
    """Reads the stacks of several processes at once. Called from one thread, `cancel` from another."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """Make `read` return soon."""
        self._is_cancelled.set()

    def read(self, pids: Mapping[Rank, int], limit_s: float = LIMIT_S) -> dict[Rank, Stack]:
        """By rank, from the processes that its agent started for it."""
        pids = {rank: python_of(pid) for rank, pid in pids.items()}
        spy = find_spy()
        spied = self._spy(spy, pids, limit_s) if spy is not None else {}
        stacks = {rank: stack for rank, stack in spied.items() if stack.frames}
        own = self._ask({rank: pid for rank, pid in pids.items() if rank not in stacks}, limit_s)
        for rank in pids:
            if rank not in stacks:
                stacks[rank] = own.get(rank) or spied.get(rank) or Stack(problem=_NO_SPY)
        return stacks

    def _spy(self, spy: str, pids: Mapping[Rank, int], limit_s: float) -> dict[Rank, Stack]:
        """All at once; it holds each process for some milliseconds. A stopped one cannot be held and need not be."""
        running = {}
        for rank, pid in pids.items():
            command = [spy, "dump", "--json", "--pid", str(pid)]
            if (found := proc.stat(pid)) is not None and found.is_stopped:
                command.append("--nonblocking")
            running[rank] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        deadline = time.monotonic() + limit_s
        return {rank: self._spied(process, pids[rank], deadline) for rank, process in running.items()}

    def _spied(self, process: subprocess.Popen[str], pid: int, deadline: float) -> Stack:
        while True:
            try:
                out, err = process.communicate(timeout=0.1)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline and not self._is_cancelled.is_set():
                    continue
                process.kill()
                process.communicate()
                return Stack(problem="py-spy did not answer in time")
            break
        try:
            return parse_spy(out, pid)
        except Malformed:
            words = [line.strip() for line in err.splitlines() if line.strip()]
            return Stack(problem=f"py-spy: {words[0] if words else 'no answer'}")

    def _ask(self, pids: Mapping[Rank, int], limit_s: float) -> dict[Rank, Stack]:
        """Have the ranks write it themselves; those that are not prepared for it are not asked, it would end them."""
        handles = {rank: Handle.of(pid) for rank, pid in pids.items()}  # before its file is seen, which proves whose it is
        files = {rank: file for rank, pid in pids.items() if (file := _own_file(pid)) is not None}
        written: dict[Rank, str] = {}
        before = {rank: _size(file) for rank, file in files.items()}
        stacks: dict[Rank, Stack] = {}
        for rank in files:
            handles[rank].kill(STACKS_SIGNAL)
        deadline = time.monotonic() + limit_s
        while files and not self._is_cancelled.wait(_LOOK_S):
            for rank, file in list(files.items()):
                text = _text_since(file, before[rank])
                if text == written.get(rank) and text.endswith("\n"):  # nothing came since the last look: it is whole
                    stacks[rank] = parse_faulthandler(text)
                    del files[rank]
                written[rank] = text
            if time.monotonic() > deadline or not any(proc.stat(pids[rank]) for rank in files):
                break
        for rank in files:
            if (found := proc.stat(pids[rank])) is None:
                stacks[rank] = Stack(problem="it has ended")
            else:
                stacks[rank] = Stack(problem="it is stopped" if found.is_stopped else "it did not answer in time")
        return stacks


def find_spy() -> str | None:
    """py-spy of this environment, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def python_of(pid: int) -> int:
    """The Python process of a rank: its own, or below it where a program such as bash was started (`--no-python`)."""
    current = pid
    while True:
        try:
            if "python" in os.path.basename(proc.program(current)):
                return current
        except OSError:
            return pid
        below = proc.children(current)
        if not below:
            return pid
        current = below[0]


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct):
    os_thread_id: int | None
    frames: list[_SpyFrame]


def parse_spy(text: str, pid: int) -> Stack:
    """The main thread's stack from `py-spy dump --json`. Raises Malformed for anything else."""
    for thread in Json(list[_SpyThread]).decode(text):
        if thread.os_thread_id == pid:
            return Stack(
                tuple(Frame(frame.filename, frame.line, frame.name.rpartition("<locals>.")[2]) for frame in thread.frames)
            )
    return Stack(problem="its main thread runs no Python code")


def parse_faulthandler(text: str) -> Stack:
    """The main thread's stack, which faulthandler writes last."""
    main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, flags=re.MULTILINE)
    if not found:
        return Stack(problem="its main thread runs no Python code")
    return Stack(tuple(Frame(file, int(line), function) for file, line, function in found))


def _own_file(pid: int) -> Path | None:
    """Where the rank would write its stack; None if it is not prepared for the signal (any more)."""
    try:
        if not proc.catches(pid, STACKS_SIGNAL):
            return None
        for path, name in proc.descriptors(pid):
            if name.startswith(f"/memfd:{STACKS_FILE}"):
                return path
    except OSError:
        pass
    return None


def _size(file: Path) -> int:
    """0 where the rank has ended, and its file with it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _text_since(file: Path, position: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(position)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
