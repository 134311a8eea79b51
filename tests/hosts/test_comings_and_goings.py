"""Ten minutes of agents that come and go at random: the job goes on exactly, or ends where it must, and nothing is left.

ODYSSEY_SOAK_S: how long for each kind of job (600). ODYSSEY_SOAK_SEED: of the first episode; the others count on from it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from tests import exactness, reference
from tests.agent_runs import TRAIN
from tests.hosts.comings_and_goings import DETECT_S, MOST, N_HOSTS, Episode, something, too_much
from tests.hosts.network import Hosts, Impossible

SOAK_S = float(os.environ.get("ODYSSEY_SOAK_S", "600"))
SEED = int(os.environ.get("ODYSSEY_SOAK_SEED") or secrets.randbelow(1_000_000))
EPISODE_S = 90.0
N_STEPS, LAST = 150, 15
"""The steps of a Job, and how many of them there are in which nothing happens any more."""
JOB = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS), "--pause", "0.2")
SILENT_S = {"Job": 6 * DETECT_S + 25.0, "plain": 6 * DETECT_S + 50.0}
"""At most without a step: a leading agent is lost, another one is elected, and all is begun again; on a busy machine."""
PLAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import odyssey

dist.init_process_group("gloo")
step = 0
while True:
    is_over = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(is_over)
    odyssey.heartbeat(step)
    if dist.get_rank() == 0:
        print(f"step {step} of {dist.get_world_size()}", flush=True)
    if is_over > 0:
        break
    step += 1
    time.sleep(0.1)
dist.destroy_process_group()
"""


def _episodes(folder: Path, run: Callable[[Hosts, Path, int, Random], None]) -> None:
    until, seed = time.monotonic() + SOAK_S, SEED
    while time.monotonic() < until:
        print(f"seed {seed}: ODYSSEY_SOAK_SEED={seed} ODYSSEY_SOAK_S=1 runs this episode alone", flush=True)
        its = folder / str(seed)
        its.mkdir()
        try:
            hosts = Hosts(N_HOSTS, its, 100 + os.getpid() % 100)
        except Impossible as error:
            pytest.skip(f"no network namespaces here: {error}")
        run(hosts, its, 29_400 + seed % 100, Random(seed))
        seed += 1


@pytest.mark.soak
@pytest.mark.timeout(3 * SOAK_S + 600)
def test_a_job_goes_on_exactly_while_agents_come_and_go(tmp_path: Path) -> None:
    def run(hosts: Hosts, folder: Path, port: int, random: Random) -> None:
        n, out = random.choice((3, 4, 4)), folder / "out.pt"
        its = Episode(
            hosts, folder, port, random, [TRAIN, *JOB, "--out", str(out)], holds_state=True, silence_s=SILENT_S["Job"]
        )
        try:
            if _live_through(its, n, lambda: its.steps() < N_STEPS - LAST):
                its.end_well()
                losses, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
                result = torch.load(out)
                assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE, its.broken("")
                assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())
        finally:
            its.close()

    _episodes(tmp_path, run)


@pytest.mark.soak
@pytest.mark.timeout(3 * SOAK_S + 600)
def test_a_plain_script_goes_on_while_agents_come_and_go(tmp_path: Path) -> None:
    def run(hosts: Hosts, folder: Path, port: int, random: Random) -> None:
        script, end = folder / "plain.py", folder / "end"
        script.write_text(PLAIN)
        its = Episode(hosts, folder, port, random, [str(script), str(end)], holds_state=False, silence_s=SILENT_S["plain"])
        until = time.monotonic() + EPISODE_S
        try:
            if _live_through(its, random.randint(3, MOST), lambda: time.monotonic() < until):
                end.touch()
                its.end_well()
        finally:
            its.close()

    _episodes(tmp_path, run)


def cut_off_and_taken_in(its: Episode, i: int) -> None:
    """The host is lost, and comes back to a job that goes on without it, which takes it in: for work, or to stand by."""
    n_lost = its.seen().n_lost
    its.tell(f"h{i} is cut off")
    its.lose(i, "cut")
    its.until(lambda: its.seen().n_lost > n_lost)
    its.until_on()
    its.give_back(i, "cut")
    its.until(lambda: i in (seen := its.seen()).members and i not in seen.coming)
    its.tell(f"h{i} has a rank again")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", ["a member", "the one that leads"])
def test_a_host_is_cut_off_and_taken_in_again_three_times_in_a_row(who: str, tmp_path: Path) -> None:
    try:
        hosts = Hosts(3, tmp_path, 100 + os.getpid() % 100)
    except Impossible as error:
        pytest.skip(f"no network namespaces here: {error}")
    n_steps, out = 300, tmp_path / "out.pt"
    job = [*JOB[: JOB.index("--steps")], "--steps", str(n_steps), "--pause", "0.2", "--out", str(out)]
    its = Episode(hosts, tmp_path, 29_400, Random(0), [TRAIN, *job], holds_state=True, silence_s=SILENT_S["Job"])
    try:
        for i in hosts.numbers:
            its.start(i)
        its.until_on()
        for _ in range(3):
            seen = its.seen()
            cut_off_and_taken_in(its, next(i for i in seen.members if (i == seen.leader) == (who == "the one that leads")))
        assert its.steps() < n_steps, "all of that was while the job ran"
        its.end_well()
        _, expected = exactness.expected_of("gpt", n_steps, 15, 2)
        assert reference.largest_difference(expected, torch.load(out)["state"]["model"]) < exactness.TOLERANCE
    finally:
        its.close()


def _live_through(its: Episode, n: int, goes_on: Callable[[], bool]) -> bool:
    """Whether the job is to come to its end now; else it has lost too much, and all have ended."""
    for i in range(1, n + 1):
        its.start(i)
    its.until_on()
    its.tell(f"{n} agents train")
    is_doomed, n_before = its.random.random() < 0.25, its.random.randint(0, 3)
    while goes_on():
        if is_doomed and n_before <= 0 and too_much(its):
            its.end_all()
            return False
        something(its)
        n_before -= 1
        time.sleep(its.random.uniform(0.0, 3.0))
    return True
