"""What a rank finds in its environment, and which of the launcher's variables are read: as under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import ODYSSEY_RUN, OURS, PROBE, Launcher, Run, Scene, free_port, scene, scene_in, torchrun_too, under_both
from tests.torchrun import record

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

GIVEN = {
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "WORLD_SIZE",
}  # fmt: skip
"""What torchrun adds to a rank's environment when there is more than one."""
OURS_GIVEN = {"PYTHONFAULTHANDLER"}
"""What we add beside it, under names that are not ours."""


def added(scene: Scene, run: Run, rank: int = 0) -> dict[str, str]:
    """What the launcher added to its own environment or changed in it, but for our own prefix."""
    env = scene.probe(rank).env
    assert set(run.env) <= set(env)
    return {
        name: value
        for name, value in env.items()
        if run.env.get(name) != value and not (run.is_ours and name.startswith("ODYSSEY_"))
    }


# -- one agent ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[torchrun_too, OURS, ODYSSEY_RUN], ids=str)
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Run]]:
    """Nothing but the number of ranks is said."""
    with scene_in(tmp_path_factory.mktemp("two") / "ranks") as scene:
        run = scene.start(request.param, "--nproc-per-node", "2", PROBE).succeed()
        record.hold("torchrun/test_environment.py::two_ranks", scene, request.param)
        yield scene, run


def test_these_variables_are_given_and_no_others(two_ranks: tuple[Scene, Run]) -> None:
    scene, run = two_ranks
    for rank in (0, 1):
        assert set(added(scene, run, rank)) == GIVEN | (OURS_GIVEN if run.is_ours else set())


def test_each_rank_knows_its_seat(two_ranks: tuple[Scene, Run]) -> None:
    scene, _ = two_ranks
    assert scene.probe(0).assignment == (0, 0, 2, 2, 0, 1, 0, 2)
    assert scene.probe(1).assignment == (1, 1, 2, 2, 0, 1, 1, 2)


def test_constants_have_torchruns_values(two_ranks: tuple[Scene, Run]) -> None:
    scene, run = two_ranks
    found = added(scene, run)
    assert found["ROLE_NAME"] == "default"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["TORCHELASTIC_MAX_RESTARTS"] == "0"
    assert found["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert found["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_ranks_agree_on_a_master_where_a_store_answers(two_ranks: tuple[Scene, Run]) -> None:
    scene, _ = two_ranks
    first, second = scene.probe(0).env, scene.probe(1).env
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert first[name] == second[name] != ""
    assert int(first["MASTER_PORT"]) > 0
    assert scene.probe(0).facts["store_answers"] and scene.probe(1).facts["store_answers"]


def test_each_rank_has_an_error_file_of_its_own(two_ranks: tuple[Scene, Run]) -> None:
    scene, _ = two_ranks
    files = [Path(scene.probe(rank).env["TORCHELASTIC_ERROR_FILE"]) for rank in (0, 1)]
    run_id = scene.probe(0).env["TORCHELASTIC_RUN_ID"]
    for rank, file in enumerate(files):
        assert file.is_absolute() and file.parent.is_dir()
        assert file.parts[-3:] == ("attempt_0", str(rank), "error.json")
        assert file.parts[-4].startswith(run_id)
    assert files[0].parents[1] == files[1].parents[1]


@under_both
def test_what_is_set_already_is_left_alone(scene: Scene, launcher: Launcher) -> None:
    env = {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_VISIBLE_DEVICES": "5,7", "LOGLEVEL": "ERROR"}
    arguments = [
        "--standalone",
        "--nproc_per=2",
        "--max_restarts=3",
        "--role",
        "trainer",
        "--signals-to-handle=SIGTERM,SIGUSR2",
    ]
    scene.start(launcher, *arguments, PROBE, env=env).succeed()
    for rank in (0, 1):
        found = scene.probe(rank).env
        assert {name: found[name] for name in env} == env
        assert found["TORCHELASTIC_MAX_RESTARTS"] == "3"
        assert found["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR2"
        assert found["ROLE_NAME"] == "trainer"
        assert scene.probe(rank).assignment == (rank, rank, 2, 2, 0, 1, rank, 2)


@under_both
def test_a_single_rank_may_use_all_threads_and_the_run_id_is_the_one_given(scene: Scene, launcher: Launcher) -> None:
    """With what is accepted without complaint: options of static beside c10d, no role, unknown keys, an abbreviation."""
    arguments = [
        "--nnodes=1:1", "--rdzv_backend", "c10d", "--rdzv_end", "localhost:0", "--rdzv-id", "101",
        "--rdzv-conf", "timeout=900,colour=blue,is_host=1", "--node_rank", "3", "--master_addr", "10.0.0.1",
        "--master_port", "1",
        "--local-addr", "127.0.0.1", "--role", "", "--monitor-interval=0.05", "--start_method", "fork",
    ]  # fmt: skip
    run = scene.start(launcher, *arguments, PROBE).succeed()
    found = added(scene, run)
    assert set(found) == GIVEN - {"OMP_NUM_THREADS"} | (OURS_GIVEN if run.is_ours else set())
    assert found["TORCHELASTIC_RUN_ID"] == "101"
    assert found["ROLE_NAME"] == ""
    assert found["MASTER_PORT"] != "1" and scene.probe().facts["store_answers"]
    assert scene.probe().assignment == (0, 0, 1, 1, 0, 1, 0, 1)


@under_both
def test_static_ranks_meet_at_the_port_given(scene: Scene, launcher: Launcher) -> None:
    port = free_port()
    scene.start(launcher, "--nproc-per-node=2", f"--master_port={port}", "--master-addr", "127.0.0.1", PROBE).succeed()
    for rank in (0, 1):
        assert scene.probe(rank).env["MASTER_ADDR"] == "127.0.0.1"
        assert scene.probe(rank).env["MASTER_PORT"] == str(port)
        assert scene.probe(rank).env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert scene.probe(rank).facts["store_answers"]


# -- several agents ----------------------------------------------------------------------------------------------------

SEATS = [(0, 0, 3, 1, 0, 2, 0, 3), (1, 0, 3, 2, 1, 2, 1, 3), (2, 1, 3, 2, 1, 2, 2, 3)]
"""The seats of the ranks of an agent with one rank, and of one with two."""


@under_both
def test_kubeflows_variables_make_a_static_job_of_two_agents(scene: Scene, launcher: Launcher) -> None:
    port = free_port()
    shared = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    runs = [
        scene.start(launcher, PROBE, env=shared | {"PET_NPROC_PER_NODE": str(node + 1), "PET_NODE_RANK": str(node)})
        for node in (0, 1)
    ]
    for run in runs:
        run.succeed()
    assert [scene.probe(rank).assignment for rank in range(3)] == SEATS
    for rank in range(3):
        found = scene.probe(rank).env
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", str(port))
        assert found["PET_NNODES"] == "2"
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert scene.probe(rank).facts["store_answers"]
    # torchrun looks at the ranks of its own host, not of the job
    assert "OMP_NUM_THREADS" not in scene.probe(0).env and scene.probe(1).env["OMP_NUM_THREADS"] == "1"


@under_both
def test_agents_meet_through_c10d_and_share_out_the_ranks(scene: Scene, launcher: Launcher) -> None:
    where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=meet"]
    runs = [scene.start(launcher, *where, f"--nproc-per-node={n}", PROBE) for n in (1, 2)]
    for run in runs:
        run.succeed()
    assert scene.n_probes() == 3
    probes = [scene.probe(rank) for rank in range(3)]
    groups = [probe.assignment[4] for probe in probes]
    assert groups in ([0, 1, 1], [0, 0, 1])  # whichever came first
    for rank, probe in enumerate(probes):
        n_local = groups.count(groups[rank])
        local_rank = rank - groups.index(groups[rank])
        assert probe.assignment == (rank, local_rank, 3, n_local, groups[rank], 2, rank, 3)
        assert probe.env["TORCHELASTIC_RUN_ID"] == "meet"
        assert probe.facts["store_answers"]
    assert len({(probe.env["MASTER_ADDR"], probe.env["MASTER_PORT"]) for probe in probes}) == 1


@under_both
def test_roles_are_counted_apart(scene: Scene, launcher: Launcher) -> None:
    where = ["--nnodes=2", f"--master-port={free_port()}"]
    runs = [
        scene.start(launcher, *where, f"--node-rank={i}", "--role", role, PROBE) for i, role in enumerate(("actor", "critic"))
    ]
    for run in runs:
        run.succeed()
    assert [scene.probe(rank).assignment for rank in (0, 1)] == [(0, 0, 2, 1, 0, 2, 0, 1), (1, 0, 2, 1, 1, 2, 0, 1)]
    assert [scene.probe(rank).env["ROLE_NAME"] for rank in (0, 1)] == ["actor", "critic"]


# -- variables that are read -------------------------------------------------------------------------------------------


@under_both
def test_options_can_be_given_by_variables(scene: Scene, launcher: Launcher) -> None:
    scene.write("folder/__init__.py", "")
    scene.write("folder/probe.py", Path(PROBE).read_text())
    env = {
        "PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "4", "PET_ROLE": "worker", "PET_MODULE": "1",
        "PET_LOG_DIR": str(scene.cwd / "logs"), "PET_REDIRECTS": "0:1", "PET_TEE": "1:2", "PET_NO_PYTHON": "0",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM", "PET_SHUTDOWN_TIMEOUT": "5", "PET_RUN_PATH": "0",
    }  # fmt: skip
    scene.start(launcher, "folder.probe", "--module", "x", env=env).succeed()
    probe = scene.probe(1)
    assert probe.facts["argv"][1:] == ["--module", "x"] and probe.facts["package"] == "folder"
    assert probe.env["TORCHELASTIC_MAX_RESTARTS"] == "4"
    assert probe.env["ROLE_NAME"] == "worker"
    logs = {path.name for path in (scene.cwd / "logs").glob("*/attempt_0/*/std*")}
    assert logs == {"stdout.log", "stderr.log"}
    assert {path.parent.name for path in (scene.cwd / "logs").glob("*/attempt_0/*/stdout.log")} == {"0"}


@under_both
def test_the_command_line_wins_over_variables(scene: Scene, launcher: Launcher) -> None:
    env = {"PET_NPROC_PER_NODE": "5", "PET_ROLE": "other", "PET_MAX_RESTARTS": "9", "PET_RDZV_ID": "none of it"}
    scene.start(launcher, "--nproc-per-node=1", "--role=mine", "--max-restarts=2", "--standalone", PROBE, env=env).succeed()
    assert scene.n_probes() == 1
    assert (scene.probe().env["ROLE_NAME"], scene.probe().env["TORCHELASTIC_MAX_RESTARTS"]) == ("mine", "2")
    assert scene.probe().env["TORCHELASTIC_RUN_ID"] != "none of it"


@under_both
def test_another_interpreter_and_virtual_local_ranks(scene: Scene, launcher: Launcher) -> None:
    interpreter = scene.cwd / "python"
    interpreter.write_text(f'#!/bin/sh\nWRAPPED="$*" exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    env = {"PYTHON_EXEC": str(interpreter), "CUDA_VISIBLE_DEVICES": "4, 6"}
    scene.start(launcher, "--virtual-local-rank", "--nproc-per-node=2", PROBE, "a b", env=env).succeed()
    for rank, device in enumerate(("4", "6")):
        found = scene.probe(rank).env
        assert found["WRAPPED"] == f"-u {PROBE} a b"
        assert (found["LOCAL_RANK"], found["RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", str(rank), "2")
        assert found["CUDA_VISIBLE_DEVICES"] == device
        assert found["TORCHELASTIC_ERROR_FILE"].endswith(f"/{rank}/error.json")
