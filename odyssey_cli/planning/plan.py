"""`odyssey plan`: what would be done if ranks were lost, without starting any."""

from __future__ import annotations

import sys

from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import to_json
from odyssey.errors import UsageError
from odyssey_cli.command_line import values
from odyssey_cli.planning import source
from odyssey_cli.planning.answer import show
from odyssey_cli.planning.ask import ask


def plan(
    source_text: str | None,
    *,
    fail: int | None,
    fail_ranks: str | None,
    layout: str,
    nodes: int | None,
    nproc_per_node: int | None,
    mtbf: str | None,
    as_json: bool,
) -> int:
    """Answer on stdout; returns the exit code: FAILED if training survives none of the losses."""
    if fail is not None and fail_ranks is not None:
        raise UsageError("--fail and --fail-ranks exclude each other", "give one of them")
    lost: int | tuple[int, ...] = values.count(fail, "--fail", 1) if fail is not None else 1
    if fail_ranks is not None:
        lost = values.ranks(fail_ranks, "--fail-ranks")
    values.layout(layout)
    mtbf_s = values.duration_s(mtbf, "--mtbf") if mtbf is not None else None
    for value, option in ((nodes, "--nodes"), (nproc_per_node, "--nproc-per-node")):
        if value is not None:
            values.count(value, option, 1)
    found = source.find(source_text).resized(nodes, nproc_per_node)
    answer = ask(found, lost, layout, mtbf_s)
    if as_json:
        sys.stdout.buffer.write(to_json(answer) + b"\n")
    else:
        show(answer)
    return ExitCode.OK if answer.chosen is not None else ExitCode.FAILED
