"""`odyssey profile`: start the ranks, measure, write the profile, and show it as a table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from odyssey.errors import UsageError
from odyssey.plan.worker import Rank
from odyssey_cli import files
from odyssey_cli.display import quantities
from odyssey_cli.display.board import Board
from odyssey_cli.display.failure_block import reason_text
from odyssey_cli.display.fitted_table import FittedTable
from odyssey_cli.display.own_lines import OwnLines
from odyssey_cli.display.page import page
from odyssey_cli.display.plain_log import PlainLog
from perfmodel.profile.profile import Link, Profile, read

_MOST_ROWS = 40


def profile(options: RunOptions, output: Path) -> int:
    """Measure and write `output`; returns the exit code."""
    from launcher.agent import start

    files.check(output, "--output")
    before = output.stat().st_mtime_ns if output.exists() else None
    board = Board()
    began = time.time()
    with OwnLines(options) as lines:
        log = PlainLog(board, lines.write)
        code = start.run(msgspec.structs.replace(options, write_profile=output), log.watch, _no_output, lines.hurry)
        if why := reason_text(board):
            lines.write(why)
    if code != ExitCode.OK:
        return code
    if not output.exists() or output.stat().st_mtime_ns == before:
        raise UsageError(
            f"{options.script} ended without a profile", "only a script that hands its layers to odyssey.Job can be measured"
        )
    console = page()
    console.print(table(read(output)))
    print(f"odyssey: measured in {quantities.seconds(time.time() - began)}, written to {output}", file=sys.stderr)
    return ExitCode.OK


def _no_output(rank: Rank, stream: str, data: bytes) -> None:
    """Ranks write to the launcher's own streams."""


def table(profile: Profile) -> RenderableType:
    """The profile for people: a row a layer, then links and runtime. `kept`: activations from forward to backward."""
    rows = FittedTable(least=("optimizer", "kept", "params"))
    rows.add_column("layer", no_wrap=True)
    for name in ("forward", "input-grad", "weight-grad", "optimizer", "params", "kept"):
        rows.add_column(name, justify="right", no_wrap=True)
    for layer in profile.layers[:_MOST_ROWS]:
        times = (layer.forward_s, layer.input_gradient_s, layer.weight_gradient_s, layer.optimizer_s)
        sizes = (layer.parameter_bytes, layer.activation_bytes)
        cells = [*(quantities.seconds(t) for t in times), *(quantities.size(b) for b in sizes)]
        rows.add_row(Text(layer.name[:20]), *cells)
    if len(profile.layers) > _MOST_ROWS:
        rows.add_row(f"and {len(profile.layers) - _MOST_ROWS} more")
    rows.add_section()
    totals = [sum(getattr(layer, name) for layer in profile.layers) for name in ("forward_s", "input_gradient_s")]
    totals += [sum(getattr(layer, name) for layer in profile.layers) for name in ("weight_gradient_s", "optimizer_s")]
    sizes = (
        sum(layer.parameter_bytes for layer in profile.layers),
        sum(layer.activation_bytes for layer in profile.layers),
    )
    rows.add_row("all", *(quantities.seconds(t) for t in totals), *(quantities.size(b) for b in sizes), style="bold")
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    cluster, recovery = profile.cluster, profile.recovery
    cores = f"{cluster.cores} shared" if cluster.cores is not None else "a device for each rank"
    facts.add_row("micro-batch", f"{profile.micro_batch} of {profile.global_batch} samples a step")
    facts.add_row("kept", "bytes of activations between forward and backward of a micro-batch")
    facts.add_row("link", f"{_link(cluster.intra_host)} within a host")
    facts.add_row("", f"{_link(cluster.inter_host)} between hosts")
    facts.add_row(
        "groups",
        f"{quantities.seconds(recovery.groups_base_s)} and {quantities.seconds(recovery.groups_member_s)} a member to build",
    )
    facts.add_row("commit", quantities.seconds(profile.commit_s))
    facts.add_row("processors", cores)
    memory = f"{quantities.size(profile.runtime_bytes)} for the runtime of {quantities.size(cluster.memory_bytes)} a rank"
    facts.add_row("memory", memory)
    return Group(rows, "", facts)


def _link(link: Link) -> str:
    return f"{quantities.seconds(link.latency_s)} + {quantities.size(link.bandwidth)}/s"
