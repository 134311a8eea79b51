"""What each rank of a check runs: one on each host. It measures its host, then the hosts measure each other by turns.

odyssey check ─► this on every host ─► a file on each, with what all have found
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import odyssey_cli  # noqa: F401 - from here on `launcher` is ours
from launcher.host.fitness.findings import HostReport, name
from launcher.host.fitness.measure_host import measure_host
from odyssey.codec import to_json
from odyssey_cli.check.links import TOKEN_BYTES, Answers, Asks, own_address, rounds
from odyssey_cli.check.report import Clock, Link, Seen
from odyssey_cli.slurm import recipe

MEET_S = 300.0
"""For the slowest host to come to a turn. A rank that is lost ends the job at once, whatever others wait for."""
GROUP_S = 30.0
"""For Gloo to connect hosts that have just reached each other."""


class Meeting:
    """The hosts of a check, by the job's store."""

    def __init__(self) -> None:
        self.place, self.n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.endpoint = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        whole = TCPStore(*self.endpoint, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S))
        self.store = PrefixStore(f"check {os.environ['TORCHELASTIC_RESTART_COUNT']}", whole)

    def all(self, turn: str) -> None:
        """Return when all have come to this turn. Raises SystemExit if one does not."""
        self.store.set(f"{turn} {self.place}", "")
        if self.store.add(f"{turn} n", 1) == self.n:
            self.store.set(f"{turn} all", "")
        try:
            self.store.wait([f"{turn} all"])
        except dist.DistStoreError:
            absent = [str(place) for place in range(self.n) if not self.store.check([f"{turn} {place}"])]
            sys.exit(f"odyssey: not all hosts were {turn} within {MEET_S:g} s: rank {', '.join(absent)} hangs")


class Neighbours:
    """The other hosts, as this one reaches them."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._address = own_address(os.environ.get("GLOO_SOCKET_IFNAME", ""), meeting.endpoint)
        token = os.urandom(TOKEN_BYTES)
        self._answers = Answers(self._address, token)
        meeting.store.set(f"at {meeting.place}", to_json((self._address, self._answers.port, token)).decode())

    def _ask(self, place: int) -> tuple[str, Asks]:
        """Its address, and a connection to it. Raises OSError."""
        address, port, token = msgspec.json.decode(self._meeting.store.get(f"at {place}"), type=tuple[str, int, bytes])
        return address, Asks(address, port, token)

    def links(self) -> tuple[Link, ...]:
        """From this host to those that it is to measure: first how far they are, as a busy link is slow to answer."""
        meeting, found = self._meeting, []
        for places in rounds(meeting.n):
            found.append(self._far((meeting.place + places) % meeting.n))
            meeting.all(f"asked for round trips ({places})")
        for i, link in enumerate(found):
            found[i] = self._wide(link)
            meeting.all(f"asked for bandwidth ({i})")
        return tuple(found)

    def _far(self, target: int) -> Link:
        source = self._meeting.place
        try:
            address, asks = self._ask(target)
            with asks:
                return Link(source, target, asks.round_trip()[0], is_local=address == self._address)
        except OSError as error:
            return Link(source, target, problem=name(error.strerror or error))

    def _wide(self, link: Link) -> Link:
        if link.problem:
            return link
        try:
            with self._ask(link.target)[1] as asks:
                return msgspec.structs.replace(link, bandwidth=asks.bandwidth(link.round_trip_s))
        except OSError as error:
            return msgspec.structs.replace(link, problem=name(error.strerror or error))

    def clock(self) -> Clock | None:
        """Against the first host's; one host after the other, as a busy host answers late."""
        meeting, clock = self._meeting, None
        if meeting.place == 0:
            meeting.store.set("clock 0", "")
            return None
        meeting.store.wait([f"clock {meeting.place - 1}"])
        try:
            with self._ask(0)[1] as asks:
                round_trip_s, ahead_s = asks.round_trip()
            clock = Clock(ahead_s, round_trip_s / 2)
        except OSError:
            pass  # why the first host is not reached is said of the link
        meeting.store.set(f"clock {meeting.place}", "")
        return clock

    def close(self) -> None:
        self._answers.close()


def main() -> None:
    options = _arguments()
    meeting = Meeting()
    host = _host(options.ranks, options.log_dir)
    meeting.all("measured")
    seen = _together(meeting, host) if meeting.n > 1 else Seen(host)
    meeting.store.set(f"seen {meeting.place}", to_json(seen).decode())
    if meeting.place == 0:
        every = [meeting.store.get(f"seen {place}") for place in range(meeting.n)]
        meeting.store.set("everything", f"[{b','.join(every).decode()}]")
    part = options.answer.with_suffix(".part")
    part.write_bytes(meeting.store.get("everything"))
    part.rename(options.answer)


def _host(n_ranks: int, log_dir: Path) -> HostReport:
    complaint = recipe.too_few_processors(len(os.sched_getaffinity(0)), os.environ)
    report = measure_host(n_ranks, log_dir)
    return msgspec.structs.replace(report, complaints=(*report.complaints, *([name(complaint)] if complaint else [])))


def _together(meeting: Meeting, host: HostReport) -> Seen:
    neighbours = Neighbours(meeting)
    links = neighbours.links()
    clock = neighbours.clock()
    if any(link.problem for link in links):
        meeting.store.set("apart", "")
    meeting.all("asked for their clocks")
    neighbours.close()
    problem = "" if meeting.store.check(["apart"]) else _group_problem(meeting)
    return Seen(host, links, clock, problem)


def _group_problem(meeting: Meeting) -> str:
    """Why these hosts cannot reduce a number together; empty if they can."""
    try:
        limit = timedelta(seconds=GROUP_S)
        dist.init_process_group("gloo", store=meeting.store, rank=meeting.place, world_size=meeting.n, timeout=limit)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
    except Exception as error:  # whatever torch raises is the answer
        return name(error)
    return "" if int(total) == meeting.n else f"{meeting.n} times 1 came out as {float(total):g}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check")
    parser.add_argument("answer", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
