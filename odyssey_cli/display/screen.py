"""The live area of a terminal, drawn by a thread of its own.

The agent's loop must not wait for a picture: `watch` and `output` only append to a queue. The thread takes everything
out of it, folds the board, prints the ranks' lines above the live area, and draws at most `REFRESHES_PER_S` times a
second, only if something changed. While a recovery is under way it holds back for a moment: a recovery is
shorter than a frame, and the agent needs the interpreter more. The thread has normal priority on purpose: a low one
would keep the interpreter's lock while it waits for a processor, and the agent with it. That thread alone writes to the
terminal, the last lines as well: a terminal may be stopped, and the launcher must end all the same.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.joblog.events import Event
from odyssey.plan.worker import Rank
from odyssey_cli.display.board import Board
from odyssey_cli.display.output_lines import LineCutter
from odyssey_cli.display.render import render
from odyssey_cli.display.repeated import Repeated
from odyssey_cli.errors import let_go

REFRESHES_PER_S = 8
_HOLD_BACK_S = 0.4
BACKLOG_BYTES = 1 << 22
"""The most of what ranks have written and nobody has seen yet."""
_RANK_STYLES = ("cyan", "magenta", "blue", "green", "yellow", "bright_cyan", "bright_magenta", "bright_blue")


class Screen:
    """A context: the live area is up inside it. `watch` and `output` may be called from any thread."""

    def __init__(self, board: Board, console: Console, wait_for: Callable[[threading.Thread], None]) -> None:
        """`board` belongs to the drawing thread until that ends; `wait_for` waits for this at the end of the context."""
        self._board = board
        self._console = console
        self._wait_for = wait_for
        self._ascii = not self._console.encoding.lower().startswith("utf")
        self._queue: deque[Event | tuple[Rank, str, bytes]] = deque()
        self._n_come = self._n_shown = 0
        """Bytes that ranks have written: each is counted by one thread."""
        self._cutter = LineCutter()
        self._repeated = Repeated()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_stopped, name="odyssey-display", daemon=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._failed = False
        self._switch_interval = sys.getswitchinterval()

    def watch(self, event: Event) -> None:
        self._queue.append(event)

    def output(self, rank: Rank, stream: str, data: bytes) -> bool:
        """Show what a rank has written. Answers whether that is more than can be shown now: it waits, as for a terminal."""
        if data:
            self._n_come += len(data)
            self._queue.append((rank, stream, data))
        return self._n_come - self._n_shown > BACKLOG_BYTES

    def __enter__(self) -> Screen:
        sys.setswitchinterval(0.001)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._wait_for(self._thread)
        sys.setswitchinterval(self._switch_interval)

    def _draw_until_stopped(self) -> None:
        second = -1
        self._write(self._live.start)
        while not self._stop.wait(1 / REFRESHES_PER_S):
            changed = self._take_in()
            recovery = self._board.recovery
            if self._board.recovering and recovery is not None and time.time() - recovery.began < _HOLD_BACK_S:
                continue
            if not self._failed and (changed or int(time.time()) != second):
                second = int(time.time())
                self._draw()
        self._take_in()
        self._print([*self._repeated.release(all_of_them=True), *self._cutter.flush()])
        self._write(self._live.stop)

    def _take_in(self) -> bool:
        """Fold what has come since the last time, print the ranks' lines; whether there was anything."""
        lines: list[tuple[Rank, str]] = []
        changed = False
        for _ in range(len(self._queue)):
            entry = self._queue.popleft()
            changed = True
            try:
                if not isinstance(entry, Event):
                    self._n_shown += len(entry[2])
                    cut = self._cutter.feed(*entry)
                    lines += self._repeated.take(cut) if entry[1] == "stderr" else cut
                elif not self._failed:
                    self._board.apply(entry)
            except Exception as error:
                self._give_up(error)
        self._print([*lines, *self._repeated.release()])
        return changed

    def _print(self, lines: list[tuple[Rank, str]]) -> None:
        if not lines:
            return
        text = Text()
        digits = len(str(max(self._board.ranks, default=0)))
        try:
            for i, (rank, line) in enumerate(lines):
                text.append(f"[rank {rank}]".ljust(8 + digits), style=_RANK_STYLES[rank % len(_RANK_STYLES)])
                text.append_text(_coloured(line))
                if i < len(lines) - 1:
                    text.append("\n")
            self._write(lambda: self._console.print(text, soft_wrap=True))
        except Exception as error:
            self._give_up(error)

    def _draw(self) -> None:
        width, height = self._console.size
        try:
            self._live.update(render(self._board, time.time(), width, height - 1, ascii_only=self._ascii), refresh=True)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A picture that cannot be drawn must not end a job: the ranks' lines go on, the live area does not. Nor do ranks wait
        for lines that cannot be shown. The first of such errors is told."""
        if self._failed:
            return
        self._failed = True
        self._write(self._live.stop)
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        self._write(lambda: self._console.print(f"odyssey: the display failed, the job goes on: {what}", markup=False))

    def _write(self, write: Callable[[], None]) -> None:
        """A terminal that is gone must not end a job either: what is meant for it goes nowhere from then on."""
        try:
            write()
        except OSError:
            self._failed = True
            let_go(self._console.file)


def _coloured(line: str) -> Text:
    if "\x1b" not in line:
        return Text(line)
    try:
        return Text.from_ansi(line)
    except ValueError:  # what stands for a colour is no number that Python reads
        return Text(line.replace("\x1b", ""))
