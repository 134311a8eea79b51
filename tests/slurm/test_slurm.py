"""Jobs under a real SLURM: what a cluster's user submits, loses and sees.

Nodes share this machine's address, so any agent may be the first to have the endpoint, and leads. Which is lost: see LOST.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from odyssey_cli.slurm.hostlist import hosts
from tests.slurm.cluster import Cluster, Job, by_recipe, cluster, end, slurm

__all__ = ["cluster", "slurm"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "slurm"
LOST = [pytest.param(False, id="a follower"), pytest.param(True, id="the one that leads")]
"""Whether the agent that is lost leads."""

SAYS = """
import os, sys
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
WHO = SAYS + 'say("rank", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")))\n'
"""A script that says who it is, and ends."""


def submit(cluster: Cluster, folder: Path, script: str, commands: str, *options: str) -> Job:
    """A batch script around commands; the ranks run `script`, as plain spawns: most tests need no torch in them."""
    (folder / "train.py").write_text(script)
    return cluster.submit(folder, f"#!/bin/bash\n{commands}\n", *options)


# -- where agents meet -------------------------------------------------------------------------------------------------


def test_hosts_are_those_that_scontrol_names(cluster: Cluster) -> None:
    rng = random.Random(12)

    def numbers() -> str:
        width, parts = rng.randint(1, 4), []
        for _ in range(rng.randint(1, 3)):
            first = rng.randint(0, 300)
            parts.append(f"{first:0{width}d}" + (f"-{first + rng.randint(0, 12):0{width}d}" if rng.random() < 0.7 else ""))
        return f"[{','.join(parts)}]"

    def name() -> str:
        return "".join(rng.choice("abcn-x") for _ in range(rng.randint(1, 4))).strip("-") + "n"

    for _ in range(150):
        text = ",".join(
            name() + rng.choice(["", str(rng.randint(0, 99)), numbers(), name() + numbers() + numbers()])
            for _ in range(rng.randint(1, 4))
        )
        assert list(hosts(text)) == cluster.run("scontrol", "show", "hostnames", text).split(), text


def test_srun_needs_no_addresses(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, WHO, "srun odyssey run --verbose train.py", "-N4", "--ntasks-per-node=1")
    job.ends("COMPLETED")
    assert job.lines("rank") == [f"rank {n} 4 {n} {job.id}.0" for n in range(4)], job.story()
    assert f"from SLURM, step {job.id}.0: " in job.output
    assert "a lost node ends the step" in job.output
    assert list((tmp_path / "odyssey-logs").glob(f"{job.id}.0_*/events.jsonl"))


def test_tasks_of_a_node_are_its_ranks_and_wait_for_their_agent(cluster: Cluster, tmp_path: Path) -> None:
    """Four tasks on two nodes: two agents with two ranks each. All tasks exit as their agent does."""
    script = WHO + "if len(sys.argv) > 1: sys.exit(3)\n"
    commands = """
        srun odyssey run train.py; echo "srun $?"
        srun --kill-on-bad-exit=0 -o task%t.txt bash -c 'odyssey run train.py fail; echo "task $SLURM_PROCID exits with $?"'
    """
    job = submit(cluster, tmp_path, script, commands, "-N2", "--ntasks-per-node=2")
    job.wait_for("srun 0")
    job.ends("COMPLETED")  # as the last command of the shell of each task
    assert job.lines("rank") == [f"rank {n} 4 {n // 2} {job.id}.0" for n in range(4)], job.story()
    texts = [(tmp_path / f"task{n}.txt").read_text() for n in range(4)]
    assert [text.splitlines()[-1] for text in texts] == [f"task {n} exits with 1" for n in range(4)]


def test_nodes_are_checked_by_one_line(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "", "srun odyssey check --json seen.json", "-N2", "-w", "n[1-2]", "--ntasks-per-node=1")
    job.ends("COMPLETED")
    assert "a lost node ends the step" in job.output, job.story()
    assert len(json.loads((tmp_path / "seen.json").read_text())["hosts"]) == 2, job.story()


def test_jobs_at_once_on_the_same_nodes_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    meet = WHO + "with open('../go') as file: file.read()\n"
    os.mkfifo(tmp_path / "go")
    jobs = [
        submit(cluster, tmp_path / name, meet, "srun odyssey run train.py", "-N2", "-w", "n[1-2]", "--ntasks-per-node=1")
        for name in ("a", "b")
    ]
    for job in jobs:
        job.wait_for("rank", 2)
    (tmp_path / "go").open("w").close()
    for job in jobs:
        cluster.wait_for(lambda job=job: go(tmp_path / "go", job), job.story)
        job.ends("COMPLETED")
        assert job.lines("rank") == [f"rank {n} 2 {n} {job.id}.0" for n in range(2)]


def go(pipe: Path, job: Job) -> bool:
    """Let all who wait at the pipe go on; True when the job is over."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        pass  # nobody waits there now
    return job.shows("JobState") == "COMPLETED"


def test_an_array_and_a_heterogeneous_job(cluster: Cluster, tmp_path: Path) -> None:
    array = submit(cluster, tmp_path, WHO, "srun odyssey run train.py", "-N2", "--array=4", "--ntasks-per-node=1")
    array.ends("COMPLETED")
    assert array.lines("rank") == [f"rank {n} 2 {n} {array.id}_4.0" for n in range(2)], array.story()

    parts = ["-N2 --ntasks-per-node=1", "hetjob", "-N1 --ntasks-per-node=2"]
    commands = "\n".join([*(f"#SBATCH {part}" for part in parts), "srun --het-group=0,1 odyssey run train.py"])
    uneven = submit(cluster, tmp_path, WHO, commands)
    uneven.ends("COMPLETED")
    expected = [(0, 0), (1, 1), (2, 2), (3, 2)]  # the agent of the last node has two ranks
    assert uneven.lines("rank") == [f"rank {n} 4 {node} {uneven.id}.0" for n, node in expected], uneven.story()


def test_torchruns_own_recipe_runs_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    commands = r"""
        nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
        head_node_ip=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
        srun odyssey run --nnodes $SLURM_NNODES --nproc_per_node 1 --rdzv_id 101 --rdzv_backend c10d \
            --rdzv_endpoint $head_node_ip:29512 train.py
        srun odyssey-torchrun --nnodes $SLURM_NNODES --rdzv_id 102 --rdzv_backend c10d \
            --rdzv_endpoint $head_node_ip:29512 train.py
        srun bash -c 'odyssey run --nnodes $SLURM_NNODES --node_rank $SLURM_NODEID \
            --master_addr 127.0.0.1 --master_port 29513 train.py'
    """
    job = submit(cluster, tmp_path, WHO, commands, "-N2", "--ntasks-per-node=1")
    job.ends("COMPLETED")
    static = [line for line in job.lines("rank") if line.endswith("none")]
    assert [line.split()[1:3] for line in static] == [["0", "2"], ["1", "2"]], job.story()
    for name in ("101", "102"):
        assert [line.split()[1:3] for line in job.lines("rank") if line.endswith(name)] == [["0", "2"], ["1", "2"]]


def test_the_batch_script_itself_is_no_step(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, WHO, "odyssey run train.py", "-N2", "--ntasks-per-node=2")
    job.ends("COMPLETED")
    assert [line.split()[1:3] for line in job.lines("rank")] == [["0", "1"]], job.story()


# -- losses ------------------------------------------------------------------------------------------------------------

SURVIVES = (
    SAYS
    + """
import signal
say("attempt", os.environ["ODYSSEY_ATTEMPT"], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid())
if os.environ["ODYSSEY_ATTEMPT"] == "0":
    signal.pause()
say("done", os.environ["RANK"])
"""
)
"""Waits in the first attempt for what a test does to it; all is well in the second."""


def rank_of(job: Job, rank: int) -> psutil.Process:
    (line,) = job.lines(f"attempt 0 rank {rank} ")
    return psutil.Process(int(line.split()[-1]))


@pytest.mark.parametrize("leads", LOST)
def test_a_lost_task_is_no_failure_when_the_training_succeeded(cluster: Cluster, tmp_path: Path, leads: bool) -> None:
    job = by_recipe(cluster, tmp_path, SURVIVES, "--nodes=3", "--elastic=1", "odyssey", "run", "--max-restarts=1", "train.py")
    job.wait_for("attempt 0", 3)
    end(next(agent for agent in job.agents() if job.leads(agent) == leads))
    job.ends("COMPLETED")
    assert job.lines("done") == ["done 0", "done 1"], job.story()
    assert job.lines("attempt 1 rank 0 of 2"), job.story()
    assert "as SLURM runs this step" not in job.output, "the recipe has no flaw"


def test_a_lost_rank_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    job = by_recipe(cluster, tmp_path, SURVIVES, "--nodes=2", "run", "--max-restarts=1", "train.py")
    job.wait_for("attempt 0", 2)
    end(rank_of(job, 1))
    job.ends("COMPLETED")
    assert job.lines("done") == ["done 0", "done 1"], job.story()


def test_a_failure_is_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    job = by_recipe(cluster, tmp_path, "raise ValueError('no such layer')", "--nodes=2", "train.py")
    job.ends("FAILED", "1:0")
    assert "no such layer" in job.output


def test_a_lost_node_daemon_is_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM takes its node for lost after some time, and ends nothing else."""
    text = """
rank = os.environ["RANK"]
say("begins")
with open(f"go{rank}") as file: file.read()
open(f"done{rank}", "w").close()
"""
    for rank in range(2):
        os.mkfifo(tmp_path / f"go{rank}")
    job = by_recipe(cluster, tmp_path, SAYS + text, "--nodes=2", "--elastic=1", "run", "--max-restarts=1", "train.py")
    job.wait_for("begins", 2)
    second = hosts(job.shows("NodeList"))[1]
    cluster.node("kill-node", int(second[1:]))
    try:
        job.wait_for(f"Node failure on {second}")
        for rank in range(2):
            (tmp_path / f"go{rank}").write_text("")
        job.ends("COMPLETED")
        assert len(list(tmp_path.glob("done?"))) == 2, "the agent went on, though srun shows nothing of it any more"
    finally:
        cluster.node("start-node", int(second[1:]))
        cluster.wait_for(lambda: cluster.run("sinfo", "-hN", "-p", "p", "-t", "idle", "-o", "%N").count("n") == 4, job.story)


def test_a_drained_node_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = by_recipe(cluster, tmp_path, SURVIVES, "--nodes=2", "run", "--max-restarts=1", "train.py")
    job.wait_for("attempt 0", 2)
    node = hosts(job.shows("NodeList"))[0]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        end(rank_of(job, 0))
        job.ends("COMPLETED")
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_options_that_end_all_tasks_with_one_are_told(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, WHO, "srun -K1 --wait=60 odyssey run train.py", "-N2", "--ntasks-per-node=1")
    job.ends("COMPLETED")
    (told,) = job.lines("odyssey: as SLURM runs this step")
    assert "--kill-on-bad-exit=0" in told and "60 s after the first" in told and "--no-kill" in told


# -- signals, and the end of time --------------------------------------------------------------------------------------

COUNTS = (
    SAYS
    + """
import signal
def got(number, frame):
    say("rank", os.environ["RANK"], "got", signal.Signals(number).name)
    if number == signal.SIGUSR2: sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM): signal.signal(number, got)
say("waits", os.environ["RANK"])
while True: signal.pause()
"""
)


def test_a_signal_to_a_job_reaches_ranks_once_and_ends_nobody_else(cluster: Cluster, tmp_path: Path) -> None:
    job = by_recipe(cluster, tmp_path, COUNTS, "--nodes=2", "run", "--nproc-per-node=2", "train.py")
    job.wait_for("waits", 4)
    before = {process.pid for process in job.processes("-u")}  # ranks, zygotes, the store
    job.cancel("--signal=USR1")
    job.wait_for("got SIGUSR1", 4)
    assert {process.pid for process in job.processes("-u")} == before
    job.cancel("--signal=USR2")  # whatever an agent passed on of the first has come before
    job.ends("COMPLETED")
    for name in ("SIGUSR1", "SIGUSR2"):
        got = [line for line in job.lines("rank") if line.endswith(name)]
        assert got == [f"rank {n} got {name}" for n in range(4)], job.story()


def test_a_cancelled_job_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    text = COUNTS.replace("signal.SIGUSR2: sys", "signal.SIGTERM: sys")
    job = by_recipe(cluster, tmp_path, text, "--nodes=2", "train.py")
    job.wait_for("waits", 2)
    job.cancel()
    cluster.wait_for(lambda: job.shows("JobState") == "CANCELLED", job.story)
    job.wait_for("got SIGTERM", 2)
    cluster.wait_for(lambda: not job.processes("-u"), job.story)
    assert job.lines("rank") == ["rank 0 got SIGTERM", "rank 1 got SIGTERM"]


SAVES = (
    SAYS
    + """
import signal
def save(*_):
    say("saves", os.environ["RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
say("part", os.environ.get("SLURM_RESTART_COUNT", "0"), "as", os.environ["TORCHELASTIC_RUN_ID"], "rank", os.environ["RANK"])
if "SLURM_RESTART_COUNT" not in os.environ:
    while True: signal.pause()
"""
)


def second_part(cluster: Cluster, job: Job) -> None:
    """It waits in the queue again: SLURM lets that last two minutes, of which two seconds are enough here.

    A node does not start a job with the credential of the second in which it ended, which SLURM counts as a failure of the job.
    """
    cluster.wait_for(lambda: (job.shows("Restarts"), job.shows("Reason")) == ("1", "BeginTime"), job.story)
    queued_at = datetime.fromisoformat(job.shows("SubmitTime")).timestamp()
    cluster.wait_for(lambda: time.time() > queued_at + 2, job.story)
    assert job.shows("JobState") == "PENDING"
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    job.ends("COMPLETED")
    parts = [
        f"part {n} as {name} rank {rank}" for n, name in ((0, f"{job.id}.0"), (1, f"{job.id}.0-restart1")) for rank in (0, 1)
    ]
    assert job.lines("part") == parts, job.story()
    assert job.lines("saves") == ["saves 0", "saves 1"]


def test_a_job_whose_time_ends_goes_on_in_another_part(cluster: Cluster, tmp_path: Path) -> None:
    """SIGTERM comes before the limit of a minute, the ranks save, and the script queues the job again."""
    options = ["--nodes=2", "--requeue=1", "--time=1", "--signal=TERM@40"]
    job = by_recipe(cluster, tmp_path, SAVES, *options, "train.py")
    job.wait_for("saves", 2)
    assert "SLURM's time limit is near" in job.output
    second_part(cluster, job)


def test_a_preempted_job_goes_on_when_there_is_room(cluster: Cluster, tmp_path: Path) -> None:
    job = by_recipe(cluster, tmp_path, SAVES, "--nodes=2", "--requeue=1", "--sbatch=--nodelist=n[1-2]", "train.py")
    job.wait_for("part 0", 2)
    (tmp_path / "urgent").mkdir()
    urgent = submit(cluster, tmp_path / "urgent", "", "true", "-p", "urgent", "-N2", "-w", "n[1-2]", "--exclusive")
    job.wait_for("saves", 2)
    urgent.ends("COMPLETED")
    second_part(cluster, job)


def test_time_that_runs_out_unannounced_is_a_timeout(cluster: Cluster, tmp_path: Path) -> None:
    text = COUNTS.replace("signal.SIGUSR2: sys", "signal.SIGTERM: sys")
    job = by_recipe(cluster, tmp_path, text, "--nodes=2", "--time=1", "train.py")
    job.wait_for("waits", 2)
    cluster.wait_for(lambda: job.shows("JobState") == "TIMEOUT", job.story, 120)
    cluster.wait_for(lambda: not job.processes("-u"), job.story)


# -- batch scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_slurm_takes_our_batch_scripts(cluster: Cluster, path: Path) -> None:
    """Without GPUs: there are none here."""
    text = "".join(
        line
        for line in path.read_text().splitlines(keepends=True)
        if "gpus-per-node" not in line and "cpus-per-task" not in line
    )
    done = subprocess.run(
        ["sbatch", "--test-only"], input=text, env=cluster.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_submit_submits(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WHO)
    command = ["odyssey", "slurm", "--nodes=1", "--output=out.txt", "--submit", "train.py"]
    said = subprocess.run(command, cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, check=True).stdout
    job = Job(cluster, said.split()[-1], tmp_path)
    job.ends("COMPLETED")
    assert f"rank 0 1 0 {job.id}.0" in (tmp_path / "out.txt").read_text()
