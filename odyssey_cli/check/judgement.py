"""What is wrong with what the hosts have found together. Pure.

All links of a slow host are slow, those to it as well: so links are held against what hosts reach by their best one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from launcher.host.fitness import judgement
from launcher.host.fitness.judgement import Finding, Level
from odyssey_cli.check.report import Link, Seen
from odyssey_cli.display import quantities

NARROW = 0.5
"""The part of what the median host reaches: one connection over a shared switch varies by some tens of per cent."""
NARROW_WITHIN = 0.1
"""The same between agents that share a machine: such a link is as fast as the machine's processors are free."""
FAR, FAR_S = 3.0, 0.0005
"""Times what the median host reaches, and seconds beyond it: another switch adds microseconds, a busy host more."""
NARROWEST = 100e6
"""Bytes a second: gigabit Ethernet has more, and a step of any large model has gigabytes to reduce."""
AHEAD_S = 0.1
"""Logs of several hosts are read by their times; hosts that ask a time server are within some milliseconds."""


def judge(hosts: Sequence[Seen]) -> list[Finding]:
    """The bad first."""
    reports = [seen.host for seen in hosts]
    names = judgement.labels(reports)
    links = [link for seen in hosts for link in seen.links]
    machines = [report.machine for report in reports]
    found = [*judgement.judge(reports), *_links(links, names, machines), *_clocks(hosts), *_groups(hosts)]
    return sorted(found, key=lambda finding: list(Level).index(finding.level), reverse=True)


def _links(links: Sequence[Link], names: Sequence[str], machines: Sequence[str]) -> Iterator[Finding]:
    def narrowest(link: Link) -> float:
        machine = machines[link.source]
        return NARROW_WITHIN if machine and machine == machines[link.target] else NARROW

    for link in links:
        if link.problem:
            help = "let hosts reach each other at all ports, or name the right interface with --local-addr"
            what = f"it does not reach {names[link.target]}: {link.problem}"
            yield Finding(Level.BAD, link.source, what, help)
    measured = [link for link in links if not link.problem and not link.is_local]
    if not measured:
        return
    hosts = {link.source for link in measured}
    widest = statistics.median(max(its.bandwidth for its in measured if host in (its.source, its.target)) for host in hosts)
    nearest_s = statistics.median(
        min(its.round_trip_s for its in measured if host in (its.source, its.target)) for host in hosts
    )
    narrow = [link for link in measured if link.bandwidth < narrowest(link) * widest]
    far = [link for link in measured if link.round_trip_s > max(FAR * nearest_s, nearest_s + FAR_S)]
    help = "look at its cable, its port of the switch, and `ethtool` for its speed and errors"
    for at, its in _blamed(narrow, measured):
        slowest = min(link.bandwidth for link in its)
        what = f"{_of(at, its, names)}: {rate(slowest)}, where hosts reach {rate(widest)}"
        yield Finding(Level.BAD, at, what, help)
    for at, its in _blamed(far, measured):
        longest_s = max(link.round_trip_s for link in its)
        what = f"{_of(at, its, names)}: {time_text(longest_s)} for a round trip, where hosts reach {time_text(nearest_s)}"
        yield Finding(Level.BAD, at, what, help)
    if widest < NARROWEST:
        what = f"hosts reach no more than {rate(widest)} by one connection"
        yield Finding(Level.WARNING, None, what, "name the interface of the faster network with --local-addr, if there is one")


def _blamed(slow: Sequence[Link], measured: Sequence[Link]) -> Iterator[tuple[int, list[Link]]]:
    """A host whose links are all slow, to it or from it, with these; else who sends, with its slow links."""
    left = list(slow)
    ends = {link.source for link in slow} | {link.target for link in slow}
    for host in sorted(ends, key=lambda host: -sum(host in (link.source, link.target) for link in slow)):
        for end in ("source", "target"):
            its = [link for link in measured if getattr(link, end) == host]
            if len(its) > 1 and all(link in left for link in its):
                yield host, its
                left = [link for link in left if link not in its]
    for host in sorted({link.source for link in left}):
        yield host, [link for link in left if link.source == host]


def _of(at: int, links: Sequence[Link], names: Sequence[str]) -> str:
    """Which links of the host they are."""
    if all(link.target == at for link in links):
        return "all links to it"
    targets = [names[link.target] for link in links]
    return f"its link{'s' if len(targets) > 1 else ''} to {', '.join(targets)}"


def _clocks(hosts: Sequence[Seen]) -> Iterator[Finding]:
    for at, seen in enumerate(hosts):
        if seen.clock is not None and abs(seen.clock.ahead_s) - seen.clock.uncertainty_s > AHEAD_S:
            off = "ahead" if seen.clock.ahead_s > 0 else "behind"
            what = f"its clock is {quantities.seconds(abs(seen.clock.ahead_s))} {off}"
            yield Finding(Level.WARNING, at, what, "have all hosts ask one time server: see `chronyc tracking`, `timedatectl`")


def _groups(hosts: Sequence[Seen]) -> Iterator[Finding]:
    for at, seen in enumerate(hosts):
        if seen.group_problem:
            what = f"it could not reduce a number with the others by Gloo: {seen.group_problem}"
            yield Finding(Level.BAD, at, what, "see GLOO_SOCKET_IFNAME, and --local-addr")


def rate(bandwidth: float) -> str:
    """`11.2 Gbit/s`, as networks are sold."""
    bits = bandwidth * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def time_text(seconds: float) -> str:
    """`83 µs`, `1.2 ms`."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else quantities.seconds(seconds)
