"""`odyssey check`: a job of one rank on each host, started as any other, so that what keeps a job from starting is found too.

Every agent hears the same of all hosts, and ends with the same exit code; the leading one shows it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from launcher.failures.history import FailureHistory, after, failure_of
from launcher.host import proc
from launcher.host.fitness.judgement import Finding, Level
from launcher.joblog.events import Event, JobStarted, Note
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey.codec import to_json
from odyssey_cli import files
from odyssey_cli.check import table
from odyssey_cli.check.judgement import judge
from odyssey_cli.check.report import Checked, Seen
from odyssey_cli.display.board import Board
from odyssey_cli.display.failure_block import failure_text, reason_text
from odyssey_cli.display.own_lines import OwnLines
from odyssey_cli.display.page import page
from odyssey_cli.display.plain_log import PlainLog
from odyssey_cli.slurm import recipe
from odyssey_cli.slurm.step import Step

PROBE = Path(__file__).with_name("probe.py")


def check(options: RunOptions, step: Step | None, json_file: Path | None) -> int:
    """Check the hosts of a job with these options; answers the exit code: 1 if one is bad."""
    with tempfile.TemporaryDirectory(prefix="odyssey-check-") as folder:
        answer = Path(folder) / "everything.json"
        with OwnLines(options) as lines:
            watched = _Watched(lines)
            code = _job(options, answer, watched, lines.hurry)
            if code != ExitCode.OK:
                watched.explain()
        if code != ExitCode.OK:
            return code
        if not answer.exists():
            return code  # this agent waited for a place that it did not get
        hosts = msgspec.json.decode(answer.read_bytes(), type=list[Seen])
    found = judge(hosts)
    checked = Checked(all(finding.level is not Level.BAD for finding in found), found, hosts)
    if watched.leads:
        checked = msgspec.structs.replace(checked, findings=[*found, *_of_the_job(options, step)])
        _show(checked)
        if json_file is not None:
            files.write(json_file, to_json(checked) + b"\n")
    return ExitCode.OK if checked.is_good else ExitCode.FAILED


class _Watched:
    """What is seen of the job: only who is waited for is told, and why it failed."""

    def __init__(self, lines: OwnLines) -> None:
        self.leads = False
        self._lines = lines
        self._board = Board()
        self._log = PlainLog(self._board, lines.write)
        self._history = FailureHistory()

    def __call__(self, event: Event) -> None:
        self._history = after(self._history, event)
        if isinstance(event.body, JobStarted):
            self.leads = True
            n = max(1, len(event.body.agents))
            self._lines.write(f"odyssey: checking {n} host{'s' if n > 1 else ''}")
        if isinstance(event.body, Note):
            self._log.watch(event)
        else:
            self._board.apply(event)

    def explain(self) -> None:
        failure = failure_of(self._history)
        has_cause = failure is not None and failure.cause is not None
        if text := failure_text(failure, "") if failure is not None and has_cause else reason_text(self._board):
            self._lines.write(text)


def _job(options: RunOptions, answer: Path, watch: _Watched, hurried: Callable[[], None]) -> int:
    from launcher.agent import start

    arguments = (str(answer), f"--ranks={options.n_ranks_per_node}", f"--log-dir={options.log_dir}")
    asked = msgspec.structs.replace(
        options, script=str(PROBE), arguments=arguments, n_ranks_per_node=1, log_dir=Path(os.devnull)
    )
    return start.run(asked, watch, lambda rank, stream, data: None, hurried)


def _of_the_job(options: RunOptions, step: Step | None) -> Sequence[Finding]:
    """What lies with no host: the endpoint, and SLURM."""
    found = []
    if options.max_agents > 1 and options.master_port in proc.own_ports():
        what = f"the kernel may give the endpoint's port, {options.master_port}, to somebody else"
        found.append(Finding(Level.WARNING, None, what, f"choose one below {proc.own_ports().start}"))
    if step is not None and options.max_agents > 1:
        for flaw in recipe.seen(step, os.environ):
            found.append(Finding(Level.WARNING, None, f"SLURM: {flaw}", "see `odyssey slurm`"))
    return found


def _show(checked: Checked) -> None:
    console = page()
    console.print(table.table(checked.hosts))
    console.print(table.facts(checked.hosts), style="dim")
    if checked.findings:
        console.print()
        console.print(table.findings(checked), end="", soft_wrap=True)
    console.print()
    console.print(table.summary(checked.findings, len(checked.hosts)))
