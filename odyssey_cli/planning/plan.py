"""`odyssey plan`: what would be done if ranks were lost, without starting any."""

from __future__ import annotations

import sys

from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import to_json
from odyssey.errors import UsageError
from odyssey_cli import files
from odyssey_cli.command_line import values
from odyssey_cli.planning import source
from odyssey_cli.planning.answer import show
from odyssey_cli.planning.ask import ask
from odyssey_cli.planning.predicted import stands, timeline
from odyssey_cli.timeline import save, terminal


def plan(
    source_text: str | None,
    *,
    fail: int | None,
    fail_ranks: str | None,
    layout: str,
    nodes: int | None,
    nproc_per_node: int | None,
    mtbf: str | None,
    strategy: str,
    as_json: bool,
    with_timeline: bool,
    svg: str | None,
    trace: str | None,
    change: str | None,
) -> int:
    """Answer on stdout; returns the exit code: FAILED if training survives none of the losses."""
    if as_json and with_timeline:
        raise UsageError("--json and --timeline exclude each other", "--trace FILE writes the timeline as JSON")
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
    only = None if values.strategy(strategy) == "auto" else strategy
    svg_file, trace_file = files.check_if_given(svg, "--svg"), files.check_if_given(trace, "--trace")
    change_file = files.check_if_given(change, "--change")
    found = source.find(source_text).resized(nodes, nproc_per_node)
    answer = ask(found, lost, layout, mtbf_s, only)
    if as_json:
        sys.stdout.buffer.write(to_json(answer) + b"\n")
    else:
        show(answer)
    if with_timeline or svg_file is not None or trace_file is not None:
        drawn = timeline(answer, found.profile, with_loss=fail is not None or fail_ranks is not None)
        if with_timeline:
            print()
            terminal.show(drawn)
        save.save(drawn, svg_file, trace_file)
    if change_file is not None:
        save.save_change(f"{answer.source}: the layout before and after the loss", stands(answer), change_file)
    return ExitCode.OK if answer.chosen is not None else ExitCode.FAILED
