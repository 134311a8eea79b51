"""The hosts of a check as a table, and what is wrong with them in a line each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from launcher.host.fitness.findings import Device, Versions
from launcher.host.fitness.judgement import Finding, Level, gib, labels
from odyssey_cli.check.judgement import rate, time_text
from odyssey_cli.check.report import Checked, Seen
from odyssey_cli.display.fitted_table import FittedTable

WIDEST = 32
"""So much of a model's name is shown."""
_PADDING = re.compile(r"\((R|TM)\)|\b(Processor|CPU)\b ?", re.IGNORECASE)
_STYLES = {Level.BAD: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}


def table(hosts: Sequence[Seen]) -> Table:
    """A row for each device of each host; its slowest link and its clock beside the first."""
    rows = FittedTable(least=("product", "clock ahead", "away"))
    rows.add_column("host", no_wrap=True)
    rows.add_column("device", no_wrap=True)
    for column in ("memory free", "speed", "product"):
        rows.add_column(column, justify="right", no_wrap=True)
    if len(hosts) > 1:
        for column in ("links", "away", "clock ahead"):
            rows.add_column(column, justify="right", no_wrap=True)
    for label, seen in zip(labels([seen.host for seen in hosts]), hosts, strict=True):
        devices = [_device(seen, device) for device in seen.host.devices]
        together = [*_links(seen), _clock(seen)] if len(hosts) > 1 else []
        for i, cells in enumerate(devices):
            rows.add_row(Text(label if i == 0 else ""), *cells, *(together if i == 0 else []))
    return rows


def _device(seen: Seen, device: Device) -> tuple[Text, ...]:
    n = f"{seen.host.n_processors:g} x " if device.name == "cpu" else f"{device.name} "
    model = _PADDING.sub("", device.model)[:WIDEST]
    memory = f"{gib(device.free_bytes).removesuffix(' GiB')} of {gib(device.memory_bytes)}"
    speed = f"{device.flops / 1e12:.3g} Tflop/s" if device.flops >= 1e12 else f"{device.flops / 1e9:.0f} Gflop/s"
    return Text(f"{n}{model}"), Text(memory), Text(speed if not device.problem else "-"), Text(device.digest[:8] or "-")


def _links(seen: Seen) -> tuple[str, str]:
    measured = [link for link in seen.links if not link.problem]
    if not measured:
        return "-", "-"
    return rate(min(link.bandwidth for link in measured)), time_text(max(link.round_trip_s for link in measured))


def _clock(seen: Seen) -> str:
    if seen.clock is None:
        return "-"
    return f"{seen.clock.ahead_s * 1e3:+.2f} ±{seen.clock.uncertainty_s * 1e3:.2f} ms"


def facts(hosts: Sequence[Seen]) -> str:
    """What is the same everywhere, or in how many ways it differs."""
    parts = []
    for program in Versions.__struct_fields__:
        found = dict.fromkeys(getattr(seen.host.versions, program) for seen in hosts)
        if any(found):
            parts.append(f"{program} {' and '.join(version or 'none' for version in found)}")
    disks = [seen.host.disk_bytes for seen in hosts if seen.host.disk_bytes is not None]
    if disks:
        parts.append(f"disk for logs {gib(min(disks))}")
    parts.append(f"/dev/shm {gib(min(seen.host.shared_bytes for seen in hosts))}")
    parts.append(f"open files {min(seen.host.open_files for seen in hosts)}")
    return "; ".join(parts)


def findings(checked: Checked) -> Text:
    """The bad first, a line each."""
    names = labels([seen.host for seen in checked.hosts])
    text = Text()
    for finding in checked.findings:
        where = f"{names[finding.at]}: " if finding.at is not None else ""
        help = f" - {finding.help}" if finding.help else ""
        text.append(finding.level.ljust(9), style=_STYLES[finding.level])
        text.append(f"{where}{finding.what}{help}\n")
    return text


def summary(found: Sequence[Finding], n_hosts: int) -> str:
    """`3 hosts: 1 bad, 2 warnings`."""
    n_bad = sum(finding.level is Level.BAD for finding in found)
    n_warnings = sum(finding.level is Level.WARNING for finding in found)
    parts = [f"{n_bad} bad" if n_bad else "all good"]
    if n_warnings:
        parts.append(f"{n_warnings} warning{'s' if n_warnings > 1 else ''}")
    return f"{n_hosts} host{'s' if n_hosts > 1 else ''}: {', '.join(parts)}"
