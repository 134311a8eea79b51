"""What the hosts have found together, in the order of their ranks."""

from __future__ import annotations

import msgspec

from launcher.host.fitness.findings import HostReport
from launcher.host.fitness.judgement import Finding


class Link(msgspec.Struct, frozen=True):
    """From the host `source` to `target`, by their places. `bandwidth`: bytes a second of one TCP connection; `round_trip_s`:
    the shortest. `is_local`: it stays within one host. `problem`: why there is none; empty if there is."""

    source: int
    target: int
    round_trip_s: float = 0.0
    bandwidth: float = 0.0
    is_local: bool = False
    problem: str = ""


class Clock(msgspec.Struct, frozen=True):
    """How far a host's clock is ahead of the first host's, and how far off that may be."""

    ahead_s: float
    uncertainty_s: float


class Seen(msgspec.Struct, frozen=True):
    """What one host has found.
    `clock`: None for the first host, and where that could not be asked. `group_problem`: why the hosts could not reduce a
    number together by Gloo; empty if they could, or some do not reach each other anyway."""

    host: HostReport
    links: tuple[Link, ...] = ()
    clock: Clock | None = None
    group_problem: str = ""


class Checked(msgspec.Struct, frozen=True):
    """The answer, for programs."""

    is_good: bool
    findings: list[Finding]
    hosts: list[Seen]
