"""`odyssey plan`: what would be done if ranks were lost or came, and what to start with, without starting any."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import to_json
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey_cli import files
from odyssey_cli.command_line import values
from odyssey_cli.command_line.typed_requests import PlanRequest
from odyssey_cli.planning import source, start_tables
from odyssey_cli.planning.answer import show
from odyssey_cli.planning.ask import HORIZON_S, Answer, Units, ask
from odyssey_cli.planning.predicted import stands, timeline
from odyssey_cli.planning.starts import ask_layouts, ask_spares
from odyssey_cli.timeline import save, terminal
from perfmodel.goodput.horizon import MOST_LOSSES


def plan(request: PlanRequest) -> int:
    """Answer on stdout; returns the exit code: FAILED if training survives none of the losses."""
    _check_together(request)
    lost = _losses(request)
    joining = _units("--join", request.join, request.join_nodes)
    spares = _units("--spares", request.spares, request.spare_nodes)
    values.layout(request.layout)
    values.strategy(request.strategy)
    mtbf_s = values.duration_s_if_given(request.mtbf, "--mtbf")
    given_s = values.duration_s_if_given(request.horizon, "--horizon")
    values.counts(1, {"--nodes": request.nodes, "--nproc-per-node": request.nproc_per_node})
    for file, option in ((request.svg, "--svg"), (request.trace, "--trace"), (request.change, "--change")):
        files.check_if_given(file, option)
    found = source.find(request.source).resized(request.nodes, request.nproc_per_node)
    if joining is not None:
        size, option = (found.ranks_per_node, "--join-nodes") if joining.nodes else (1, "--join")
        values.check_n_ranks(joining.n * size, f"{option} {joining.n}")
    rate = None if request.failure_rate is None else values.failure_rate(request.failure_rate)
    approximate = values.low_rank(request.allow_approximate)
    aim = values.aim(found.aim, request.objective, request.protect, approximate, request.survive, request.survive_nodes)
    expected = found.expected_change(mtbf_s, rate)
    # With spares beside there are up to twice as many ranks, of which twice as many are lost.
    horizon_s = given_s or min(HORIZON_S, MOST_LOSSES / 2 * expected.seconds)
    if request.layouts:
        start_tables.show(ask_layouts(found, request.layout, expected, aim, horizon_s), as_json=request.json)
    elif spares is not None:
        n_ranks = found.ranks_per_node if spares.nodes else 1
        start_tables.show(ask_spares(found, spares.n, n_ranks, expected, aim, horizon_s), as_json=request.json)
    else:
        only = None if request.strategy == "auto" else request.strategy
        return _answer(request, found, ask(found, lost, request.layout, expected, only, aim, horizon_s, joining))
    return ExitCode.OK


def _answer(request: PlanRequest, found: source.Source, answer: Answer) -> int:
    """Show what is done after losses, and draw its pictures."""
    if request.json:
        sys.stdout.buffer.write(to_json(answer) + b"\n")
    else:
        show(answer)
    svg_file, trace_file = (None if file is None else Path(file) for file in (request.svg, request.trace))
    if request.timeline or svg_file is not None or trace_file is not None:
        with_change = any(option is not None for option in (*_fails(request), *_comings(request)))
        drawn = timeline(answer, found.profile, with_change=with_change)
        if request.timeline:
            print()
            terminal.show(drawn)
        save.save(drawn, svg_file, trace_file)
    if request.change is not None:
        save.save_change(f"{answer.source}: the layout before and after the change", stands(answer), Path(request.change))
    return ExitCode.OK if answer.goes_on else ExitCode.FAILED


def _check_together(request: PlanRequest) -> None:
    """Options that ask another question than `--layouts` or `--spares`, and what they have no meaning for. Ranks may come
    after what is lost."""
    if request.json and request.timeline:
        raise UsageError("--json and --timeline exclude each other", "--trace FILE writes the timeline as JSON")
    others = (("--layouts", request.layouts or None), ("--spares", request.spares), ("--spare-nodes", request.spare_nodes))
    fails = tuple(zip(("--fail", "--fail-ranks", "--fail-nodes"), _fails(request), strict=True))
    joins = tuple(zip(("--join", "--join-nodes"), _comings(request), strict=True))
    questions = _given(*others, *fails)
    _exclude(questions)
    _exclude([*_given(*others), *_given(*joins)])
    if not _given(*others):
        only = ("--strategy", None if request.strategy == "auto" else request.strategy)
        _exclude([] if questions else [*_given(*joins), *_given(only)])  # it is asked for what is done after a loss
        return
    meaningless = _given(
        ("--strategy", None if request.strategy == "auto" else request.strategy),
        ("--timeline", request.timeline or None),
        ("--svg", request.svg),
        ("--trace", request.trace),
        ("--change", request.change),
        ("--layout", None if questions[0] == "--layouts" or request.layout == "auto" else request.layout),
    )
    _exclude([questions[0], *meaningless])


def _given(*options: tuple[str, object]) -> list[str]:
    return [option for option, value in options if value is not None]


def _exclude(given: Sequence[str]) -> None:
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} exclude each other", "give one of them")


def _fails(request: PlanRequest) -> tuple[int | None, str | None, int | None]:
    return request.fail, request.fail_ranks, request.fail_nodes


def _comings(request: PlanRequest) -> tuple[int | None, int | None]:
    return request.join, request.join_nodes


def _losses(request: PlanRequest) -> Units | tuple[Rank, ...] | None:
    """Ask for one rank where nothing is asked for, and of none where only the coming of ranks is."""
    if request.fail_ranks is not None:
        return values.ranks(request.fail_ranks, "--fail-ranks")
    only_come = _comings(request) != (None, None)
    return _units("--fail", request.fail, request.fail_nodes) or (None if only_come else Units(1))


def _units(option: str, n_ranks: int | None, n_nodes: int | None) -> Units | None:
    """Nodes where both are given."""
    if n_nodes is not None:
        return Units(values.count(n_nodes, f"{option.removesuffix('s')}-nodes", 1), nodes=True)
    return Units(values.count(n_ranks, option, 1)) if n_ranks is not None else None
