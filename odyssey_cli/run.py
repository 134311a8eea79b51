"""`odyssey run`: check what was asked, hand it to the agent, and show what happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from launcher.drill import parse as parse_drill
from launcher.events import Event
from launcher.options import RunOptions
from odyssey.errors import ProfileError, UsageError
from odyssey_cli import arguments as text
from odyssey_cli.board import Board
from odyssey_cli.errors import print_error
from odyssey_cli.plain import PlainLog
from odyssey_cli.summary import summary

Agent = Callable[[RunOptions, Callable[[Event], None], Callable[[int, str, bytes], None]], int]


def options(
    *,
    script: str,
    arguments: tuple[str, ...],
    options_before_script: bool,
    nodes: int,
    nproc_per_node: int,
    max_restarts: int = 0,
    layout: str = "auto",
    strategy: str = "auto",
    mtbf: str | None = None,
    log_dir: Path,
    drills: tuple[str, ...] = (),
    profile: Path | None = None,
    master_addr: str,
    master_port: int,
) -> RunOptions:
    """Check everything that can be checked before a process is started. Raises UsageError."""
    text.script(script)
    if not options_before_script:
        value, rest = text.nodes_behind_script(arguments)
        if value is not None:
            if not value.isdigit():
                raise UsageError(f"--nodes: expected a number, got {value!r}", f"for example: odyssey run --nodes 4 {script}")
            nodes, arguments = int(value), rest
            print(
                f"odyssey: took --nodes {nodes} as the launcher's; to give it to the script, write "
                f"`odyssey run --nodes 1 {script} --nodes {nodes}`",
                file=sys.stderr,
            )
    text.count(nodes, "--nodes", 1)
    text.count(nproc_per_node, "--nproc-per-node", 1)
    text.count(max_restarts, "--max-restarts", 0)
    if not 0 <= master_port <= 65535:
        raise UsageError(f"--master-port: expected 0 to 65535, got {master_port}", "0 takes a free port")
    n_ranks = nodes * nproc_per_node
    if text.layout(layout) != "auto" and text.layout_ranks(layout) > n_ranks:
        raise UsageError(
            f"--layout {layout} takes {text.layout_ranks(layout)} ranks, there are {n_ranks}",
            f"start more ranks, for example --nodes {-(-text.layout_ranks(layout) // nproc_per_node)}",
        )
    for drill in drills:
        parse_drill(drill, n_nodes=nodes, n_ranks_per_node=nproc_per_node)
    if profile is not None:
        from perfmodel.profile import read

        try:
            read(profile)
        except ProfileError as error:
            raise UsageError(f"--profile: {error.what}", error.help) from None
    if log_dir.exists() and not log_dir.is_dir():
        raise UsageError(f"--log-dir: {log_dir} is not a directory", "name a directory, it is created if need be")
    return RunOptions(
        script=script,
        arguments=arguments,
        n_nodes=nodes,
        n_ranks_per_node=nproc_per_node,
        max_restarts=max_restarts,
        layout=layout,
        strategy=text.strategy(strategy),
        mtbf_s=text.duration_s(mtbf, "--mtbf") if mtbf is not None else None,
        log_dir=log_dir,
        drills=drills,
        profile=profile,
        master_addr=master_addr,
        master_port=master_port,
    )


def run(options: RunOptions, *, display: bool, agent: Agent | None = None) -> int:
    """Run the job to its end; returns its exit code. `agent` stands in for the launcher's in tests."""
    if agent is None:
        from launcher.agent import run as launch

        agent = launch
    board = Board()
    if display and sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None):
        from odyssey_cli.screen import Screen

        with Screen(board) as screen:
            code = agent(msgspec.structs.replace(options, capture_output=True), screen.watch, screen.output)
    else:
        log = PlainLog(board)
        code = agent(msgspec.structs.replace(options, capture_output=False), log.watch, _no_output)
    if code != 0:
        end_with_error(board)
    for line in summary(board, _folder(board, options.log_dir)).splitlines():
        print(f"odyssey: {line}", file=sys.stderr)
    return code


def _no_output(rank: int, stream: str, data: bytes) -> None:
    """Ranks write to the launcher's own streams."""


def _folder(board: Board, log_dir: Path) -> Path | None:
    """The job's own folder, which ends in the agent's process number."""
    folders = sorted(log_dir.glob(f"*-{board.job.pid}")) if board.job is not None else []
    return folders[-1] if folders else None


def end_with_error(board: Board) -> None:
    """Say why the job failed, where its log knows. A signal is no error: the user knows."""
    ended = board.ended
    if ended is not None and ended.code > 128:
        print(f"odyssey: {ended.reason}", file=sys.stderr)
    elif ended is not None and ended.code != 0:
        print_error(ended.reason, ended.help)


def newest_job(log_dir: Path) -> Path | None:
    """The folder below `log_dir` whose event log was written last."""
    logs = [(log.stat().st_mtime, log) for log in log_dir.glob("*/events.jsonl")]
    return max(logs)[1].parent if logs else None
