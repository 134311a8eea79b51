"""What is wrong with hosts, from what all of them have reported. Pure.

Whom to believe is decided among equals: devices of one model under the same versions have to compute the same bits, and about
as fast as the median of them.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from launcher.host.fitness.findings import Device, HostReport, Versions

SLOW = 0.7
"""The part of the median speed of equal devices. Clocks and temperatures make up to a tenth; a device at less than this holds
up all."""
LESS_MEMORY = 0.9
"""The part of the median of hosts with the same processors: firmware keeps a few per cent, a lost module takes more."""
RANK_BYTES = 1 << 30
"""Free memory for each rank: what torch takes with CUDA before a model is there."""
DISK_BYTES = 1 << 30
"""Free disk for logs, which hold the output of ranks too."""
SHARED_BYTES = 1 << 30
"""The least of /dev/shm: workers of a DataLoader and NCCL fill the 64 MiB of a container, and die of it."""
OPEN_FILES = 1024
"""What systems commonly allow; DataLoaders and connections of many ranks need some hundreds."""
OTHERS_SHARE, OTHERS_BYTES = 0.1, 2 << 30
"""Others use too much of a GPU's memory if it is more than both: a context of CUDA alone takes half a GiB."""


class Level(enum.StrEnum):
    """How bad it is: NOTE is only to be known, a WARNING may harm, with a BAD one a job fails, is slow or computes nonsense."""

    NOTE = "note"
    WARNING = "warning"
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True):
    """`at`: which report it is about, None for several. `help`: what to do; empty where there is nothing."""

    level: Level
    at: int | None
    what: str
    help: str


T = TypeVar("T")


def judge(reports: Sequence[HostReport]) -> list[Finding]:
    """Say what each host lacks, and where there are several how it differs from the others."""
    found = [finding for at, report in enumerate(reports) for finding in _of_host(at, report, _are_several(reports))]
    return [*found, *_digests(reports), *_speeds(reports), *_memories(reports), *_versions(reports)]


def bad_hosts(findings: Iterable[Finding]) -> dict[int, str]:
    """Those that a job should do without, and why."""
    bad: dict[int, str] = {}
    for finding in findings:
        if finding.level is Level.BAD and finding.at is not None:
            bad.setdefault(finding.at, finding.what)
    return bad


def labels(reports: Sequence[HostReport]) -> list[str]:
    """Their names; agents of one host apart."""
    n_of = Counter(report.host for report in reports)
    return [report.host if n_of[report.host] == 1 else f"{report.host} ({at})" for at, report in enumerate(reports)]


def _are_several(reports: Sequence[HostReport]) -> bool:
    return len({report.host for report in reports}) > 1


# -- a host by itself --------------------------------------------------------------------------------------------------


def _of_host(at: int, report: HostReport, others: bool) -> Iterator[Finding]:
    def bad(what: str, help: str) -> Finding:
        return Finding(Level.BAD, at, what, help)

    def warning(what: str, help: str) -> Finding:
        return Finding(Level.WARNING, at, what, help)

    if report.problem:
        yield bad(f"it could not be measured: {report.problem}", "run `odyssey check` on it alone, and see its output")
        return
    yield from (finding for device in report.devices for finding in _of_device(at, device))
    n_gpus = sum(device.name != "cpu" for device in report.devices)
    if 0 < n_gpus < report.n_ranks:
        yield bad(f"{report.n_ranks} ranks, and {n_gpus} GPUs", "look at CUDA_VISIBLE_DEVICES, and at `nvidia-smi`")
    if report.available_bytes < report.n_ranks * RANK_BYTES:
        free, needed = gib(report.available_bytes), gib(report.n_ranks * RANK_BYTES)
        yield bad(f"{free} of memory free, at least {needed} needed", "end what else runs there, or start fewer ranks")
    if report.disk_problem:
        yield bad(f"no logs can be written to {report.disk_problem}", "name another folder with --log-dir")
    elif report.disk_bytes is not None and report.disk_bytes < DISK_BYTES:
        yield bad(f"{gib(report.disk_bytes)} of disk free for logs", "free some, or name another folder with --log-dir")
    if report.open_files < OPEN_FILES:
        yield warning(f"only {report.open_files} open files are allowed", f"`ulimit -n {OPEN_FILES * 4}` before the start")
    if report.shared_bytes < SHARED_BYTES:
        help = "give the container more, as by `docker run --shm-size=8g`"
        yield warning(f"/dev/shm has {gib(report.shared_bytes)}, too little for workers of DataLoaders", help)
    if others and not report.own_addresses:
        yield warning("its own name stands for no address", "enter it in DNS or /etc/hosts")
    elif others and all(map(_is_loopback, report.own_addresses)):
        what = f"its own name stands for {report.own_addresses[0]}, where only itself is reached"
        yield warning(what, "Odyssey gets by; for other programs correct /etc/hosts")
    for complaint in report.complaints:
        yield warning(complaint, "")


def _of_device(at: int, device: Device) -> Iterator[Finding]:
    if device.problem:
        yield Finding(Level.BAD, at, f"{device.name} does not compute: {device.problem}", "see `nvidia-smi` and `dmesg`")
        return
    if device.odd:
        what = f"{device.name} computes other bits of the same product: {device.odd}"
        yield Finding(Level.BAD, at, what, "it corrupts models silently: take the host out, and have it tested")
    used = device.memory_bytes - device.free_bytes
    if device.name != "cpu" and used > max(OTHERS_SHARE * device.memory_bytes, OTHERS_BYTES):
        what = f"{gib(used)} of {device.name}'s {gib(device.memory_bytes)} are in use"
        yield Finding(Level.WARNING, at, what, "end what runs there, see `nvidia-smi`")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


# -- among equals ------------------------------------------------------------------------------------------------------


def _equals(reports: Sequence[HostReport], key: Callable[[HostReport, Device], T]) -> dict[T, list[tuple[int, Device]]]:
    """Devices that compute, with where they are."""
    found: dict[T, list[tuple[int, Device]]] = defaultdict(list)
    for at, report in enumerate(reports):
        for device in report.devices:
            if not device.problem:
                found[key(report, device)].append((at, device))
    return found


def _model(report: HostReport, device: Device) -> tuple[str, ...]:
    return device.model, report.versions.torch, report.versions.cuda


def _digests(reports: Sequence[HostReport]) -> Iterator[Finding]:
    groups, names = _equals(reports, _model), labels(reports)
    for devices in groups.values():
        votes = Counter(device.digest for _, device in devices)
        digest, n = votes.most_common(1)[0]
        if len(votes) == 1:
            continue
        if n * 2 > len(devices):
            for at, device in devices:
                if device.digest != digest:
                    what = f"{device.name} computes other bits than {n} equal devices of {len(devices)}"
                    yield Finding(Level.BAD, at, what, "it corrupts models silently: take the host out, and have it tested")
        else:
            who = ", ".join(dict.fromkeys(names[at] for at, _ in devices))
            what = f"{who}: equal devices compute different bits, and there is no majority to say which are wrong"
            yield Finding(Level.BAD, None, what, "check them together with a further host of this kind")
    if len(groups) > 1:
        kinds = "; ".join(f"{model}, torch {torch}" for model, torch, *_ in groups)
        yield Finding(Level.NOTE, None, f"what differs cannot be compared bit for bit: {kinds}", "")


def _speeds(reports: Sequence[HostReport]) -> Iterator[Finding]:
    n_of = Counter(report.machine for report in reports if report.machine)
    shared = [at for at, report in enumerate(reports) if n_of[report.machine] > 1]
    if shared:
        names = labels(reports)
        what = f"{', '.join(names[at] for at in shared)} share a machine: their speeds are not compared"
        yield Finding(Level.NOTE, None, what, "")
    for devices in _equals(reports, lambda report, device: (*_model(report, device), str(device.n_threads))).values():
        alone = [(at, device) for at, device in devices if at not in shared and math.isfinite(device.flops)]
        if len(alone) < 2:
            continue
        median = statistics.median(device.flops for _, device in alone)
        for at, device in alone:
            if device.flops < SLOW * median:
                what = f"{device.name} computes at {device.flops / median:.0%} of the median of {len(alone)} equal devices"
                yield Finding(Level.BAD, at, what, "look for other processes, its temperature and its power limit")


def _memories(reports: Sequence[HostReport]) -> Iterator[Finding]:
    alike: dict[tuple[float, tuple[str, ...]], list[int]] = defaultdict(list)
    for at, report in enumerate(reports):
        if not report.problem:
            alike[report.n_processors, tuple(device.model for device in report.devices)].append(at)
    for group in alike.values():
        median = statistics.median(reports[at].memory_bytes for at in group)
        for at in group:
            if reports[at].memory_bytes < LESS_MEMORY * median:
                what = f"{gib(reports[at].memory_bytes)} of memory, where equal hosts have {gib(median)}"
                yield Finding(
                    Level.WARNING, at, what, "a module may be broken (`dmidecode -t memory`), or a control group has less"
                )


def _versions(reports: Sequence[HostReport]) -> Iterator[Finding]:
    measured = [at for at, report in enumerate(reports) if not report.problem]
    for program in Versions.__struct_fields__:
        its = {at: str(getattr(reports[at].versions, program)) for at in measured}
        most = Counter(its.values()).most_common(1)[0][0] if its else ""
        for at, version in its.items():
            if version != most:
                what = f"{program} {version or 'is missing'}, where most hosts have {most or 'none'}"
                yield Finding(Level.WARNING, at, what, "install the same on all hosts")


def gib(n_bytes: float) -> str:
    """`12 GiB`, `0.4 GiB`."""
    value = n_bytes / (1 << 30)
    return f"{value:.0f} GiB" if value >= 9.95 else f"{value:.1f} GiB"
