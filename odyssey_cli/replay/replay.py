"""`odyssey replay`: a trace of lost and returned nodes against a job, by simulation; or a recorded job once more."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import to_json
from odyssey.errors import UsageError
from odyssey_cli import files
from odyssey_cli.command_line import values
from odyssey_cli.command_line.typed_requests import ReplayRequest
from odyssey_cli.planning import source
from odyssey_cli.replay import recorded, traces
from odyssey_cli.replay.answer import show
from odyssey_cli.replay.ask import Answer, ask, report
from odyssey_cli.replay.drawing import drawn
from odyssey_cli.replay.generators import GENERATORS, Failures
from odyssey_cli.replay.policies import Policy, named
from odyssey_cli.replay.restart_costs import SAVE_S, RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import DAY_S, MOST_S, Trace

_REPAIR_S = DAY_S
"""The median of InfiniteHBD's repairs is 0.85 days."""
_DAYS = 30.0


def replay(request: ReplayRequest) -> int:
    """Answer on stdout, and into files; returns the exit code."""
    folder = recorded.folder_of(request.trace)
    if folder is not None:
        return recorded.check(folder)
    values.layout(request.layout)
    nodes, per_node, traced = request.nodes, request.nproc_per_node, request.trace_nodes
    values.counts(1, {"--nodes": nodes, "--nproc-per-node": per_node, "--trace-nodes": traced})
    policies = named(request.policy or ())
    restart_costs = RestartCosts(
        save_s=values.duration_s_if_given(request.save, "--save") or SAVE_S,
        restart_s=values.duration_s_if_given(request.restart, "--restart"),
        every_s=values.duration_s_if_given(request.checkpoint_every, "--checkpoint-every"),
    )
    json_file, svg_file = files.check_if_given(request.json, "--json"), files.check_if_given(request.svg, "--svg")
    found = source.find(request.source).resized(nodes, per_node)
    layout = request.layout if request.layout != "auto" else found.layout
    mtbf_s = values.duration_s_if_given(request.mtbf, "--mtbf")
    aim = values.aim(found.aim, request.objective, request.protect, values.low_rank(request.allow_approximate))
    setup = Setup(found.profile, found.ranks_per_node, layout, "auto", mtbf_s, aim)
    trace = _trace(request, found.n_nodes, mtbf_s)
    answer = _ask(found.title, trace, setup, restart_costs, policies)
    show(answer)
    if json_file is not None:
        files.write(json_file, msgspec.json.format(to_json(report(answer)), indent=1) + b"\n")
    if svg_file is not None:
        files.write(svg_file, drawn(answer).encode())
    return ExitCode.OK


def _trace(request: ReplayRequest, n_nodes: int, mtbf_s: float | None) -> Trace:
    """The file, or what is drawn in its place."""
    if request.days is not None and not 0 < request.days * DAY_S <= MOST_S:
        most = f"{MOST_S // DAY_S:g}"
        raise UsageError(f"--days: expected more than 0 and at most {most}, got {request.days:g}", "for example --days 30")
    if not 0 <= request.transient <= 1:
        raise UsageError(f"--transient: expected a share from 0 to 1, got {request.transient:g}", "for example 0.73")
    if request.trace not in GENERATORS:
        for given, option in ((request.repair, "--repair"), (request.transient or None, "--transient")):
            if given is not None:
                raise UsageError(f"{option} is for failures that are drawn", f"with {', '.join(GENERATORS)}")
        trace = traces.read(request.trace, request.seed, request.trace_nodes)
        return trace.cut(n_nodes, request.days * DAY_S if request.days is not None else None)
    if mtbf_s is None:
        raise UsageError(f"{request.trace}: how often? --mtbf is missing", "the mean time between losses of the whole job: 6h")
    length_s = (request.days if request.days is not None else _DAYS) * DAY_S
    repair_s = values.duration_s_if_given(request.repair, "--repair") or _REPAIR_S
    return GENERATORS[request.trace](Failures(n_nodes, length_s, mtbf_s, repair_s, request.transient, request.seed))


def _ask(name: str, trace: Trace, setup: Setup, restart_costs: RestartCosts, policies: tuple[Policy, ...]) -> Answer:
    """With a bar on stderr while it lasts, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(policies) * trace.length_s)
        number = {policy.name: i for i, policy in enumerate(policies)}

        def passed(policy: Policy, at_s: float) -> None:
            bar.update(task, completed=number[policy.name] * trace.length_s + at_s, description=policy.name)

        return ask(name, trace, setup, restart_costs, policies, passed)
