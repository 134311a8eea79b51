"""What a task of a SLURM step takes from its environment, and when it leaves that alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.cluster.links.addresses import control_ports
from launcher.options import Rendezvous, RunOptions
from odyssey.errors import UsageError
from odyssey_cli.command_line.from_slurm import filled, told
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.parser import parse
from odyssey_cli.command_line.request import read
from odyssey_cli.slurm.address import first_host
from odyssey_cli.slurm.hostlist import hosts
from odyssey_cli.slurm.step import PORTS, Step, is_step, step_of
from tests import ROOT
from tests.examples import examples

SCRIPT = str(ROOT / "tests" / "models.py")
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "localhost,n[2-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_GPUS_ON_NODE": "8",
}
"""The second of four tasks, each on a node with 8 GPUs."""


def options(*argv: str, **environment: str) -> RunOptions:
    return read([*argv, SCRIPT], TASK | environment, Command.RUN).options


def meeting(options: RunOptions) -> tuple[Rendezvous, int, int, int | None, str]:
    return options.rendezvous, options.min_agents, options.max_agents, options.node_rank, options.run_id


# -- lists of hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[9-10,1]", ["n9", "n10", "n1"]),
        ("a,n[1,3],b-ib", ["a", "n1", "n3", "b-ib"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[5]", ["n5"]),
        ("n[003-3]", ["n003"]),
    ],
)
def test_a_list_of_hosts_names_each(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "n1,", ",n1", "n[", "n[1-3", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[1--2]", "n 1", "n[[1]]",
             "n[0-99999999999]", "n[1-65000],m[1-65000]", "[1-60000][1-60000]", "n[１]"],
)  # fmt: skip
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|more than"):
        hosts(text)


NAME = st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True)


@st.composite
def compressed(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list as SLURM would write it, and its hosts, by other means."""
    text, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(NAME)
        width = draw(st.integers(1, 4))
        ranges = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=3))
        text.append(f"{prefix}[{','.join(f'{a:0{width}d}-{a + n:0{width}d}' for a, n in ranges)}]")
        for a, n in ranges:
            names += [prefix + str(number).rjust(width, "0") for number in range(a, a + n + 1)]
    return ",".join(text), names


@given(compressed())
def test_what_is_written_short_comes_out_whole(pair: tuple[str, list[str]]) -> None:
    text, names = pair
    assert list(hosts(text)) == names


@given(st.text("n0129[]-,", max_size=24))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        found = hosts(text)
    except ValueError:
        return
    assert found and all(found)
    assert hosts(",".join(found)) == found


# -- a step ------------------------------------------------------------------------------------------------------------


def step(**environment: str) -> Step | None:
    all_of_them = {name: value for name, value in (TASK | environment).items() if value != "unset"}
    return step_of(all_of_them) if is_step(all_of_them) else None


def the_step(**environment: str) -> Step:
    found = step(**environment)
    assert found is not None
    return found


def test_a_task_knows_its_place() -> None:
    found = the_step()
    assert (found.job, found.step, found.node, found.local_task, found.n_tasks_here) == ("1234", 0, 1, 0, 1)
    assert found.hosts == ("localhost", "n2", "n3", "n4")
    assert found.run_id == "1234.0" and found.is_agent


def test_a_task_of_an_array_is_known_by_its_index() -> None:
    assert the_step(SLURM_ARRAY_JOB_ID="1230", SLURM_ARRAY_TASK_ID="4").run_id == "1230_4.0"


def test_a_requeued_job_has_another_run_id_and_port() -> None:
    again = the_step(SLURM_RESTART_COUNT="2")
    assert again.run_id == "1234.0-restart2"
    assert again.port != the_step().port


@pytest.mark.parametrize(("node", "expected"), [(0, 3), (1, 3), (2, 1), (3, 2)])
def test_nodes_may_have_different_numbers_of_tasks(node: int, expected: int) -> None:
    assert the_step(SLURM_STEP_TASKS_PER_NODE="3(x2),1,2", SLURM_NODEID=str(node)).n_tasks_here == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_STEP_ID": "unset"},  # the batch script
        {"SLURM_STEP_ID": "4294967291"},  # the same, of newer versions
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_PTY_PORT": "1234"},  # srun --pty bash
        {"TORCHELASTIC_RUN_ID": "x"},  # a rank
        {"SLURM_JOB_ID": "unset"},
    ],
    ids=str,
)
def test_outside_of_a_step_slurm_says_nothing(environment: dict[str, str]) -> None:
    assert step(**environment) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NODELIST", "n[1-"),
        ("SLURM_NODEID", "4"),
        ("SLURM_NODEID", "-1"),
        ("SLURM_LOCALID", "x"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x1)"),
        ("SLURM_STEP_TASKS_PER_NODE", ""),
        ("SLURM_STEP_ID", "٣"),
        ("SLURM_RESTART_COUNT", "two"),
    ],
)
def test_what_cannot_be_understood_is_told_by_its_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        step(**{name: value})


@given(st.integers(1, 1 << 31), st.integers(0, 65), st.integers(0, 130), st.integers(0, 130), st.integers(0, 50))
@settings(max_examples=examples(200))
def test_neighbours_among_jobs_and_steps_meet_at_different_ports(job: int, apart: int, a: int, b: int, restarts: int) -> None:
    def port(job: int, step: int) -> int:
        return the_step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step), SLURM_RESTART_COUNT=str(restarts)).port

    one, other = port(job, a), port(job + apart, b)
    assert one in PORTS and other in PORTS and not set(control_ports(one)) & set(PORTS)
    assert (one == other) == (apart == 0 and a == b)


# -- what becomes of the command line ----------------------------------------------------------------------------------


def test_srun_needs_no_addresses() -> None:
    found = options()
    assert meeting(found) == (Rendezvous.C10D, 4, 4, 1, "1234.0")
    assert (found.master_addr, found.master_port) == ("localhost", the_step().port)
    assert found.n_ranks_per_node == 8
    assert found.forwarded_signals == ("SIGUSR1", "SIGUSR2")


def test_a_check_needs_none_either() -> None:
    found = read([], TASK, Command.CHECK).options
    assert (meeting(found), found.master_port) == (meeting(options()), options().master_port)
    assert found.n_ranks_per_node == 8


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--nnodes=2:4"], "min_agents", 2),
        (["--node-rank=3"], "node_rank", 3),
        (["--rdzv-id=mine"], "run_id", "mine"),
        (["--nproc-per-node=2"], "n_ranks_per_node", 2),
        (["--master-port=777"], "master_port", 777),
        (["--rdzv-backend=static"], "rendezvous", Rendezvous.STATIC),
        (["--forward-signals=SIGUSR2"], "forwarded_signals", ("SIGUSR2",)),
        (["--signals-to-handle=SIGTERM,SIGUSR1"], "forwarded_signals", ("SIGUSR2",)),
    ],
)
def test_each_part_can_be_given_and_the_rest_stays(argv: list[str], field: str, value: object) -> None:
    found = options(*argv)
    assert getattr(found, field) == value
    expected = options()
    same = {"master_addr", "master_port", "max_agents", "run_id", "node_rank", "n_ranks_per_node"} - {field}
    assert {name: getattr(found, name) for name in same} == {name: getattr(expected, name) for name in same}


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (["--rdzv-endpoint=localhost:29500", "--rdzv-backend=c10d", "--nnodes=4"], {}),
        (["--master-addr=localhost", "--master-port=29500", "--nnodes=4", "--node-rank=1"], {}),
        (["--standalone"], {}),
        ([], {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost", "PET_NODE_RANK": "1"}),
        ([], {"PET_RDZV_ENDPOINT": "localhost:29500", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2"}),
        ([], {"PET_NNODES": "1"}),
    ],
)
def test_who_says_how_to_meet_has_said_it_all(argv: list[str], environment: dict[str, str]) -> None:
    def without_slurm(environment: Mapping[str, str]) -> RunOptions:
        return read([*argv, "--forward-signals=SIGUSR1,SIGUSR2", SCRIPT], environment, Command.RUN).options

    assert options(*argv, **environment) == without_slurm(environment)


@pytest.mark.parametrize("command", [Command.RUN, Command.TORCHRUN])
def test_who_says_how_to_meet_needs_nothing_of_slurm(command: Command) -> None:
    few = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-"}
    found = read(["--standalone", SCRIPT], few, command).options
    assert found.forwarded_signals == ("SIGUSR1", "SIGUSR2")


def test_torchruns_own_command_line_takes_from_slurm_only_what_keeps_it_alive() -> None:
    found = read([SCRIPT], TASK, Command.TORCHRUN).options
    assert (found.rendezvous, found.n_ranks_per_node) == (Rendezvous.LOCAL, 1)
    assert found.forwarded_signals == ("SIGUSR1", "SIGUSR2")


def test_several_jobs_in_a_step_are_one_a_node() -> None:
    found = options("--nnodes=1")
    assert meeting(found) == (Rendezvous.LOCAL, 1, 1, None, "1234.0")
    assert (found.master_port, found.n_ranks_per_node) == (0, 8)


def test_a_step_on_one_node_takes_its_name_and_its_ranks() -> None:
    found = options(SLURM_STEP_NODELIST="n1", SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE="1")
    assert meeting(found) == (Rendezvous.LOCAL, 1, 1, None, "1234.0")
    assert (found.master_port, found.n_ranks_per_node) == (0, 8)


def test_more_agents_than_nodes_would_be_waited_for_in_vain() -> None:
    with pytest.raises(UsageError, match=r"--nnodes 5: step 1234\.0 has 4 nodes"):
        options("--nnodes=5")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_NODE": "8"}, 2),
        ({"SLURM_GPUS_ON_NODE": ""}, 1),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "(S:0-1)"}, 1),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8),
    ],
    ids=str,
)
def test_a_rank_for_each_gpu_and_without_gpus_for_each_task(environment: dict[str, str], expected: int) -> None:
    assert options(**environment).n_ranks_per_node == expected


def test_tasks_that_are_bound_to_a_gpu_each_are_told_so() -> None:
    bound = {"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(UsageError, match="1 of the 8 GPUs") as error:
        options(**bound)
    assert "--ntasks-per-node=1" in error.value.help
    assert options("--nproc-per-node=1", **bound).n_ranks_per_node == 1


def test_verbose_tells_in_one_line_what_was_taken() -> None:
    request = read(["--verbose", "--nproc-per-node=2", SCRIPT], TASK, Command.RUN)
    assert request.notes == (
        "from SLURM, step 1234.0: --forward-signals SIGUSR1,SIGUSR2 --nnodes 4 --node-rank 1 --rdzv-backend c10d "
        f"--rdzv-endpoint localhost:{the_step().port} --rdzv-id 1234.0",
    )
    assert read([SCRIPT], TASK, Command.RUN).notes == ()


def test_what_verbose_tells_is_what_another_agent_could_be_given() -> None:
    given, found = filled(parse([SCRIPT], TASK, Command.RUN))
    assert found is not None
    taken = told(given, found).partition(": ")[2].split()
    assert read([*taken, SCRIPT], {}, Command.RUN).options == options()


# -- the first host ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"n1", "10.0.0.1", "10.0.0.9"}, "n1"),
        ({"10.0.0.1", "10.0.0.9"}, "10.0.0.1"),
        ({"10.0.0.9"}, "10.0.0.9"),
    ],
)
def test_the_first_host_is_reached_by_name_or_as_slurm_does(known: set[str], expected: str) -> None:
    found = the_step(SLURM_STEP_NODELIST="n[1-4]", SLURM_LAUNCH_NODE_IPADDR="10.0.0.9")
    assert first_host(found, resolves=known.__contains__, node_address={"n1": "10.0.0.1"}.__getitem__) == expected


def test_a_host_that_nobody_can_resolve_is_told() -> None:
    with pytest.raises(UsageError, match="n1, has no address"):
        first_host(the_step(SLURM_STEP_NODELIST="n[1-4]"), resolves=lambda _: False, node_address=lambda _: "")
