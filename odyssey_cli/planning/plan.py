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
from odyssey_cli.planning.ask import Losses, ask
from odyssey_cli.planning.predicted import stands, timeline
from odyssey_cli.timeline import save, terminal


def plan(
    source_text: str | None,
    *,
    fail: int | None,
    fail_ranks: str | None,
    fail_nodes: int | None,
    layout: str,
    nodes: int | None,
    nproc_per_node: int | None,
    mtbf: str | None,
    failure_rate: float | None,
    objective: str | None,
    survive: int | None,
    survive_nodes: int | None,
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
    lost = _losses(fail, fail_ranks, fail_nodes)
    values.layout(layout)
    mtbf_s = values.duration_s(mtbf, "--mtbf") if mtbf is not None else None
    for value, option in ((nodes, "--nodes"), (nproc_per_node, "--nproc-per-node")):
        if value is not None:
            values.count(value, option, 1)
    only = None if values.strategy(strategy) == "auto" else strategy
    svg_file, trace_file = files.check_if_given(svg, "--svg"), files.check_if_given(trace, "--trace")
    change_file = files.check_if_given(change, "--change")
    found = source.find(source_text).resized(nodes, nproc_per_node)
    rate = None if failure_rate is None else values.failure_rate(failure_rate)
    aim = values.aim(found.aim, objective, survive, survive_nodes)
    answer = ask(found, lost, layout, found.expected_change(mtbf_s, rate), only, aim)
    if as_json:
        sys.stdout.buffer.write(to_json(answer) + b"\n")
    else:
        show(answer)
    if with_timeline or svg_file is not None or trace_file is not None:
        drawn = timeline(answer, found.profile, with_loss=(fail, fail_ranks, fail_nodes) != (None, None, None))
        if with_timeline:
            print()
            terminal.show(drawn)
        save.save(drawn, svg_file, trace_file)
    if change_file is not None:
        save.save_change(f"{answer.source}: the layout before and after the loss", stands(answer), change_file)
    return ExitCode.OK if answer.chosen is not None else ExitCode.FAILED


def _losses(fail: int | None, fail_ranks: str | None, fail_nodes: int | None) -> Losses | tuple[int, ...]:
    given = [
        option
        for option, value in (("--fail", fail), ("--fail-ranks", fail_ranks), ("--fail-nodes", fail_nodes))
        if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} exclude each other", "give one of them")
    if fail_ranks is not None:
        return values.ranks(fail_ranks, "--fail-ranks")
    if fail_nodes is not None:
        return Losses(values.count(fail_nodes, "--fail-nodes", 1), nodes=True)
    return Losses(values.count(fail, "--fail", 1) if fail is not None else 1)
