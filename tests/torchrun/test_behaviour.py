"""How ranks are run: arguments, streams, sessions, signals and all that a script can see of it; as under torchrun."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import ODYSSEY_RUN, OURS, PROBE, Launcher, Probe, Run, Scene, scene, scene_in, torchrun_too, under_both
from tests.torchrun import record

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)


# -- a plain start -----------------------------------------------------------------------------------------------------


LOOKS_LIKE_OURS = ["--nproc-per-node", "7", "--max-restarts=1", "-r", "3"]


@pytest.fixture(scope="module", params=[torchrun_too, OURS, ODYSSEY_RUN], ids=str)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Run]]:
    """Two ranks of a script with a relative path, with options behind it that look like the launcher's."""
    with scene_in(tmp_path_factory.mktemp("plain") / "start") as scene:
        scene.write("code/train.py", Path(PROBE).read_text())
        scene.write("input", "a line\n")
        arguments = [
            "code/train.py",
            "--nproc-per-node",
            "7",
            "--max-restarts=1",
            "-r",
            "3",
            "--local-rank",
            "${local_rank}",
            "",
        ]
        run = scene.start(request.param, "--nproc-per-node=2", *arguments, stdin=scene.cwd / "input").succeed()
        record.hold("torchrun/test_behaviour.py::plain", scene, request.param)
        yield scene, run


def probes(scene: Scene) -> list[Probe]:
    return [scene.probe(rank) for rank in range(scene.n_probes())]


def test_the_script_gets_its_arguments_and_its_local_rank_where_it_asks(plain: tuple[Scene, Run]) -> None:
    scene, _ = plain
    for rank, probe in enumerate(probes(scene)):
        rest = ["code/train.py", *LOOKS_LIKE_OURS, "--local-rank", str(rank), ""]
        assert probe.facts["argv"] == rest
        assert probe.facts["orig_argv"] == [sys.executable, "-u", *rest]
        assert probe.facts["executable"] == sys.executable


def test_the_script_is_main_as_if_python_had_started_it(plain: tuple[Scene, Run]) -> None:
    scene, _ = plain
    for probe in probes(scene):
        facts = probe.facts
        assert (facts["name"], facts["is_main"], facts["package"]) == ("__main__", True, None)
        assert (facts["has_spec"], facts["cached"]) == (False, None)
        assert facts["file"] == str(scene.cwd / "code/train.py")
        assert facts["path0"] == str(scene.cwd / "code")
        assert facts["cwd"] == str(scene.cwd)


def test_ps_shows_the_script(plain: tuple[Scene, Run]) -> None:
    scene, _ = plain
    for probe in probes(scene):
        assert " ".join(probe.facts["cmdline"]).rstrip() == " ".join(probe.facts["orig_argv"]).rstrip()


def test_streams_are_the_launchers_own_and_unbuffered(plain: tuple[Scene, Run]) -> None:
    scene, run = plain
    for probe in probes(scene):
        assert probe.facts["streams"][:2] == [str(scene.cwd / "input"), run.stdout_path]
        if not run.is_ours:  # ours keep the last lines of a stderr that is no terminal, to show them if the rank fails
            assert probe.facts["streams"][2] == run.stderr_path
        assert probe.facts["write_through"] is True


def test_each_rank_is_in_a_session_of_its_own(plain: tuple[Scene, Run]) -> None:
    scene, run = plain
    for probe in probes(scene):
        assert probe.facts["pid"] == probe.facts["sid"] == probe.facts["pgid"]
        assert probe.facts["ppid"] == run.process.pid
    assert len({probe.facts["pid"] for probe in probes(scene)}) == 2


def test_signals_limits_and_threads_are_those_of_a_fresh_process(plain: tuple[Scene, Run]) -> None:
    scene, run = plain
    alone = {"RANK": "alone", "TORCHELASTIC_RESTART_COUNT": "", "MASTER_ADDR": "", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    if run.is_ours:  # and have Python tell of crashes
        alone["PYTHONFAULTHANDLER"] = "1"
    subprocess.run([sys.executable, "-u", PROBE], env=scene.environment(alone), cwd=scene.cwd, check=True)
    alone_file = scene.probes_dir / "alone..json"
    expected = json.loads(alone_file.read_text())
    alone_file.unlink()
    names = ("SigIgn", "SigBlk", "umask", "nice", "cpus", "flags", "recursion", "threads")
    for rank in (0, 1):
        found = scene.probe(rank).facts
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
        # of the real-time signals, which nobody sends, ours use one to ask a rank for its stack
        assert [number for number in found["SigCgt"] if number < 32] == expected["SigCgt"]


def test_ranks_draw_different_random_numbers(plain: tuple[Scene, Run]) -> None:
    scene, _ = plain
    assert scene.probe(0).facts["random"] != scene.probe(1).facts["random"]


def test_a_run_that_succeeds_is_quiet_on_stdout(plain: tuple[Scene, Run]) -> None:
    _, run = plain
    assert run.stdout == ""
    assert "Traceback" not in run.stderr and "rror" not in run.stderr


# -- other ways to name what is run ------------------------------------------------------------------------------------


@under_both
def test_a_module_gets_options_that_look_like_the_launchers(scene: Scene, launcher: Launcher) -> None:
    scene.write("pkg/__init__.py", "")
    scene.write("pkg/train.py", Path(PROBE).read_text())
    scene.start(launcher, "--standalone", "-m", "pkg.train", "--module", "x", "-m", "${local_rank}").succeed()
    facts = scene.probe().facts
    assert facts["argv"] == [str(scene.cwd / "pkg/train.py"), "--module", "x", "-m", "0"]
    assert facts["orig_argv"] == [sys.executable, "-u", "-m", "pkg.train", "--module", "x", "-m", "0"]
    assert (facts["name"], facts["package"], facts["has_spec"], facts["path0"]) == ("__main__", "pkg", True, str(scene.cwd))


@under_both
def test_a_program_is_executed_as_it_is(scene: Scene, launcher: Launcher) -> None:
    """As numactl and nsys are used: a trampoline that starts Python in its place."""
    trampoline = scene.cwd / "bind.sh"
    trampoline.write_text('#!/bin/bash\nshift 2; export BOUND=$LOCAL_RANK; exec "$@"\n')
    trampoline.chmod(0o755)
    command = ["./bind.sh", "--cpunodebind", "${local_rank}", sys.executable, PROBE, "node-${local_rank}"]
    run = scene.start(launcher, "--nproc-per-node=2", "--no-python", *command).succeed()
    for rank in (0, 1):
        probe = scene.probe(rank)
        assert probe.env["BOUND"] == str(rank)
        assert probe.facts["cmdline"] == [sys.executable, PROBE, f"node-{rank}"]
        assert (probe.facts["sid"], probe.facts["ppid"]) == (probe.facts["pid"], run.process.pid)


@under_both
def test_a_program_is_found_on_the_path(scene: Scene, launcher: Launcher) -> None:
    run = scene.start(
        launcher, "--no-python", "bash", "-c", "echo $RANK of $WORLD_SIZE at $0; exit 0", "x${local_rank}y"
    ).succeed()
    assert run.stdout == "0 of 1 at x0y\n"


@under_both
def test_run_path_runs_the_script_as_main(scene: Scene, launcher: Launcher) -> None:
    scene.start(launcher, "--standalone", "--run-path", PROBE, "--lr", "1e-3").succeed()
    facts = scene.probe().facts
    assert facts["argv"] == [PROBE, "--lr", "1e-3"]
    assert (facts["name"], facts["file"], facts["cwd"]) == ("__main__", PROBE, str(scene.cwd))


@under_both
def test_a_directory_and_a_zip_file_are_scripts_too(scene: Scene, launcher: Launcher) -> None:
    text = Path(PROBE).read_text()
    scene.write("folder/__main__.py", text)
    with zipfile.ZipFile(scene.cwd / "packed.pyz", "w") as archive:
        archive.writestr("__main__.py", text)
    for name in ("folder", "packed.pyz"):
        scene.start(launcher, "--standalone", name, "x").succeed()
        facts = scene.probe().facts
        assert facts["argv"] == [name, "x"]
        assert facts["orig_argv"] == [sys.executable, "-u", name, "x"]
        assert facts["path0"] == str(scene.cwd / name)
        assert (facts["name"], facts["file"]) == ("__main__", str(scene.cwd / name / "__main__.py"))


@under_both
def test_the_old_launch_module_appends_the_local_rank(scene: Scene, launcher: Launcher) -> None:
    scene.start(launcher, "--nproc_per_node=2", PROBE, "--lr", "1", legacy=True).succeed()
    for rank in (0, 1):
        assert scene.probe(rank).facts["argv"] == [PROBE, f"--local-rank={rank}", "--lr", "1"]
        assert scene.probe(rank).env["LOCAL_RANK"] == str(rank)


@under_both
def test_the_old_launch_module_can_leave_it_out(scene: Scene, launcher: Launcher) -> None:
    scene.start(launcher, "--use_env", PROBE, "--lr", "1", legacy=True).succeed()
    assert scene.probe().facts["argv"] == [PROBE, "--lr", "1"]


# -- what scripts do ---------------------------------------------------------------------------------------------------

SCRIPT_OF_MANY_THINGS = """
import atexit, multiprocessing, os, pickle, sys, threading
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

class Thing:
    value = 3

def work(queue):
    queue.put((pickle.loads(pickle.dumps(Thing())).value, __name__, os.environ["RANK"]))

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing())).value == 3
    atexit.register(print, "atexit")
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(method, *queue.get())
        process.join()
    print("lines from stdin:", len(sys.stdin.readlines()))
    threading.Thread(target=print, args=("thread",)).start()
    sys.exit(None)
"""


@under_both
def test_workers_pickles_threads_and_standard_input_work(scene: Scene, launcher: Launcher) -> None:
    script = scene.write("many.py", SCRIPT_OF_MANY_THINGS)
    scene.write("input", "1\n2\n3\n")
    run = scene.start(launcher, script, stdin=scene.cwd / "input").succeed()
    assert sorted(run.stdout.splitlines()) == sorted(
        ["spawn 3 __mp_main__ 0", "fork 3 __main__ 0", "forkserver 3 __mp_main__ 0", "lines from stdin: 3", "thread", "atexit"]
    )


ALTERNATELY = """
import sys
for i in range(200):
    print(i, file=sys.stderr if i % 2 else sys.stdout)
"""


@under_both
def test_lines_keep_their_order_when_both_streams_go_to_one_file(scene: Scene, launcher: Launcher) -> None:
    script = scene.write("alternately.py", ALTERNATELY)
    command = f"exec {sys.executable} -m {' '.join(launcher.command)} {script} 2>&1"
    run = scene.start_command(["sh", "-c", command, *launcher.command]).succeed()
    assert [line for line in run.stdout.splitlines() if line.isdigit()] == [str(i) for i in range(200)]


IN_A_TERMINAL = """
import os, signal, sys
def interrupted(number, frame):
    os.write(1, b"rank got %s\\n" % signal.Signals(number).name.encode())
    sys.exit(0)
signal.signal(signal.SIGINT, interrupted)
os.write(1, b"terminals %d%d%d in front %s\\n" % (*(os.isatty(n) for n in range(3)), str(os.getsid(0) == os.getpid()).encode()))
open(os.environ["READY"], "w").write("up\\n")
signal.pause()
"""


@under_both
def test_in_a_terminal_ranks_write_to_it_and_ctrl_c_reaches_the_launcher_alone(scene: Scene, launcher: Launcher) -> None:
    """The launcher passes it on, once: were it the terminal that did, a rank in another session would get none."""
    script = scene.write("terminal.py", IN_A_TERMINAL)
    command = [sys.executable, "-m", *launcher.command, script]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(scene.cwd)
        os.execvpe(command[0], command, scene.environment({"TERM": "dumb"}))
    heard = b""
    try:
        while b"in front" not in heard or not heard.endswith(b"\n"):
            heard += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        try:
            while chunk := os.read(terminal, 4096):
                heard += chunk
        except OSError:
            pass  # EIO: the last process that had the terminal open is gone
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(terminal)
    text = heard.decode()
    assert "terminals 111 in front True" in text
    assert text.count("rank got SIGINT") == 1
    assert code == (130 if launcher.is_ours else 1)
    if launcher.is_ours:
        scene.assert_nothing_left()


@under_both
def test_several_launchers_share_a_host(scene: Scene, launcher: Launcher) -> None:
    folders = [scene.folder / f"p{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir()
    for run in [scene.start(launcher, "--nproc-per-node=1", PROBE, env={"PROBES": str(folder)}) for folder in folders]:
        run.succeed()
    found = [json.loads((folder / "0.0.json").read_text()) for folder in folders]
    assert len({facts["env"]["MASTER_PORT"] for facts in found}) == 3
    assert len({facts["env"]["TORCHELASTIC_RUN_ID"] for facts in found}) == 3


# -- the command line itself -------------------------------------------------------------------------------------------


@under_both
def test_help_names_every_option_of_torchrun(scene: Scene, launcher: Launcher) -> None:
    from torch.distributed.run import get_args_parser

    run = scene.start(launcher, "--help").succeed()
    options = [name for action in get_args_parser()._actions for name in action.option_strings if name.startswith("--")]
    assert [name for name in options if "_" not in name and name not in run.stdout] == []


@under_both
def test_a_wrong_command_line_ends_with_2(scene: Scene, launcher: Launcher) -> None:
    lines = [["--no-such-option", "x.py"], ["--nproc-per-node"], ["--nproc-per-node=2"], ["--rdzv", "c10d", "x.py"]]
    for run in [scene.start(launcher, *line) for line in lines]:
        assert run.end() == 2, run.story()
        assert run.stderr and "Traceback" not in run.stderr
