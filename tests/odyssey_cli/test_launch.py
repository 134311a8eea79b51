"""`odyssey run`'s own options, what is found out before anything is started, what cannot be meant, and the help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launcher.options import Entry, RunOptions
from odyssey.errors import UsageError
from odyssey_cli.command_line import devices, torch_version
from odyssey_cli.command_line.help import help_text, short_help_text
from odyssey_cli.command_line.options import OPTIONS, Command
from odyssey_cli.command_line.parser import HelpAsked, parse
from odyssey_cli.command_line.request import read
from tests import ROOT

SCRIPT = str(ROOT / "tests" / "models.py")
"""Any script that exists."""


def ours(argv: Sequence[str], environment: Mapping[str, str] | None = None, command: Command = Command.TORCHRUN) -> RunOptions:
    return read(argv, environment or {}, command).options


# -- our own options ---------------------------------------------------------------------------------------------------


def test_options_of_ours_reach_the_run() -> None:
    argv = ["--never-retry", "2,70-72", "--restart-limit", "5/1h", "--restart-backoff", "0", "--retry-same-failure"]
    argv += ["--forward-signals", "SIGUSR1,SIGHUP", "--stdin-rank", "1", "--stall-timeout", "10m", "--end-stalled"]
    argv += ["--json-report", "/tmp/report.json", "--verbose", "--nodes", "2"]

    options = ours([*argv, SCRIPT], command=Command.RUN)

    assert (options.never_retry, options.restart_limit) == ((2, 70, 71, 72), (5, 3600.0))
    assert (options.restart_backoff_s, options.retries_same_failure) == (0.0, True)
    assert options.forwarded_signals == ("SIGUSR1", "SIGHUP")
    assert options.ending_signals == ("SIGTERM", "SIGINT", "SIGQUIT")
    assert (options.stdin_rank, options.stall_timeout_s, options.ends_stalled) == (1, 600.0, True)
    assert (options.json_report, options.verbose) == (Path("/tmp/report.json"), True)


def test_defaults_are_those_of_run_options() -> None:
    assert ours([SCRIPT], command=Command.RUN) == RunOptions(SCRIPT)


def test_nproc_cpu_counts_what_this_process_may_use() -> None:
    assert ours(["--nproc-per-node=cpu", SCRIPT]).n_ranks_per_node == len(os.sched_getaffinity(0))


def stand_in_for_torch(folder: Path, accelerators: int, gpus: int) -> dict[str, str]:
    """An environment in which `import torch` finds so many devices."""
    (folder / "torch.py").write_text(
        "class accelerator:\n"
        f"    is_available = staticmethod(lambda: {accelerators} > 0)\n"
        f"    device_count = staticmethod(lambda: {accelerators})\n"
        "class cuda:\n"
        f"    is_available = staticmethod(lambda: {gpus} > 0)\n    device_count = staticmethod(lambda: {gpus})\n"
        "class _C:\n    _get_privateuse1_backend_name = staticmethod(lambda: 'npu')\n"
        "class npu:\n    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: 5)\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "all of them"}


@pytest.mark.parametrize(
    ("listed", "n_present", "count"),
    [
        ("0,1", 8, 2), ("7", 8, 1), (None, 8, None), ("", 8, None), ("-1", 8, None), ("0,8", 8, None), ("0,0", 8, None),
        ("GPU-8932f937", 8, None), ("0", 0, None), ("0,1,-1", 8, None),
    ],
)  # fmt: skip
def test_a_list_of_visible_gpus_counts_if_it_can_be_understood_without_the_driver(
    listed: str | None, n_present: int, count: int | None
) -> None:
    assert devices.listed_gpus(listed, n_present) == count


def test_devices_are_counted_by_torch_in_a_process_of_its_own(tmp_path: Path) -> None:
    environment = stand_in_for_torch(tmp_path, accelerators=3, gpus=3)

    assert devices.count("gpu", "--nproc-per-node", environment) == 3
    assert devices.count("npu", "--nproc-per-node", environment) == 5
    with pytest.raises(UsageError, match="PET_NPROC_PER_NODE: expected a number, auto, cpu, gpu or xpu, got 'gpus'"):
        devices.count("gpus", "PET_NPROC_PER_NODE", environment)


def test_a_host_without_devices_has_processors_only(tmp_path: Path) -> None:
    environment = stand_in_for_torch(tmp_path, accelerators=0, gpus=0)

    assert devices.count("auto", "--nproc-per-node", environment) == devices.processors()
    with pytest.raises(UsageError, match="torch finds no gpu on this host"):
        devices.count("gpu", "--nproc-per-node", environment)


def test_a_torch_that_cannot_be_imported_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda.so is missing')")

    with pytest.raises(UsageError, match=r"cannot ask torch for devices: ImportError: libcuda\.so is missing"):
        devices.count("gpu", "--nproc-per-node", {**os.environ, "PYTHONPATH": str(tmp_path)})


def test_a_link_of_the_log_dir_is_followed_and_devnull_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    assert ours(["--log-dir", str(tmp_path / "link"), SCRIPT]).log_dir == tmp_path / "link"
    assert ours(["--log-dir", "/dev/null", SCRIPT]).log_dir == Path("/dev/null")


def test_logs_go_to_the_users_state_folder_where_the_working_directory_has_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odyssey-logs").write_text("a file")
    monkeypatch.chdir(tmp_path)

    request = read([SCRIPT], {"XDG_STATE_HOME": str(tmp_path / "state")}, Command.RUN)

    assert request.options.log_dir == tmp_path / "state/odyssey/logs"
    assert request.notes == (f"odyssey-logs is not a directory: logs go to {tmp_path}/state/odyssey/logs",)


def test_a_job_runs_without_logs_where_there_is_no_place_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odyssey-logs").write_text("a file")
    monkeypatch.chdir(tmp_path)

    request = read([SCRIPT], {"HOME": str(tmp_path / "odyssey-logs")}, Command.TORCHRUN)

    assert request.options.log_dir == Path(os.devnull)
    assert "no logs are kept" in request.notes[0]


def test_only_odyssey_run_wants_a_display_and_only_for_scripts_that_use_odyssey(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("import odyssey")
    other.write_text("import torch")
    assert [command for command in Command if command.has_script and read([str(ours)], {}, command).wants_display] == [
        Command.RUN
    ]
    assert not read(["--no-display", str(ours)], {}, Command.RUN).wants_display
    assert not read([str(other)], {}, Command.RUN).wants_display


# -- what cannot be meant ----------------------------------------------------------------------------------------------

WRONG = [
    (["--nnodes", "0"], "--nnodes: expected at least 1, got 0"),
    (["--nnodes", "3:2"], "--nnodes: expected MIN at most MAX, got 3:2"),
    (["--nnodes", "1:2:3"], "--nnodes: expected N or MIN:MAX, got '1:2:3'"),
    (["--nproc-per-node", "0"], "--nproc-per-node: expected at least 1, got 0"),
    (["--nproc-per-node", "-2"], "--nproc-per-node: expected at least 1, got -2"),
    (["--nproc-per-node", "2.5"], "--nproc-per-node: expected a number, auto, cpu, gpu or xpu, got '2.5'"),
    (["--rdzv-backend", "etcd-v2"], "--rdzv-backend: etcd-v2 is not supported"),
    (["--rdzv-backend", "c10"], "--rdzv-backend: unknown value 'c10'"),
    (["--rdzv-endpoint", "h:x"], "--rdzv-endpoint: 'x' is no port, in 'h:x'"),
    (["--rdzv-endpoint", "h:²"], "--rdzv-endpoint: '²' is no port, in 'h:²'"),
    (["--rdzv-endpoint", "h:70000"], "--rdzv-endpoint: '70000' is no port"),
    (["--rdzv-endpoint", "10.0.0.1 172.17.0.1:29500"], "--rdzv-endpoint: '10.0.0.1 172.17.0.1' is no host"),
    (["--rdzv-conf", "join_timeout"], "--rdzv-conf: expected KEY=VALUE,KEY=VALUE, got 'join_timeout'"),
    (["--rdzv-conf", "timeout=x"], "--rdzv-conf timeout: expected a duration, got 'x'"),
    (["--rdzv-conf", "is_host=maybe"], "--rdzv-conf is_host: expected 1 or 0, got 'maybe'"),
    (["--standalone", "--nnodes", "2"], "--standalone is for one agent, --nnodes is 2"),
    (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:0"], "--rdzv-endpoint: port 0 is a free port"),
    (["--nnodes", "2", "--master-port", "0"], "--master-port: port 0 is a free port, which 2 agents"),
    (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2: there are 2 agents, numbered from 0"),
    (["--node-rank", "-1"], "--node-rank: expected at least 0, got -1"),
    (["--master-port", "x"], "--master-port: expected a whole number, got 'x'"),
    (["--master-port", "-1"], "--master-port: expected 0 to 65535, got -1"),
    (["--max-restarts", "-1"], "--max-restarts: expected at least 0, got -1"),
    (["--max-restarts", "many"], "--max-restarts: expected a whole number, got 'many'"),
    (["--monitor-interval", "fast"], "--monitor-interval: expected seconds, got 'fast'"),
    (["--start-method", "frok"], "--start-method: unknown value 'frok'"),
    (["--numa-binding", "nodes"], "--numa-binding: unknown value 'nodes'"),
    (["--redirects", "4"], "--redirects: expected streams, got '4'"),
    (["-t", "0:1,"], "--tee: expected streams, got '0:1,'"),
    (["--local-ranks-filter", "a"], "--local-ranks-filter: expected local ranks, got 'a'"),
    (["--signals-to-handle", "SIGTERM,SIGFOO"], "--signals-to-handle: SIGFOO is no signal"),
    (["--signals-to-handle", "SIGKILL"], "--signals-to-handle: SIGKILL cannot be handled"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout: expected a duration, got '-1'"),
    (["--module", "--no-python"], "--no-python and --module exclude each other"),
    (["--standalone=1"], "--standalone takes no value"),
    (["--rdzv", "x"], "ambiguous option: --rdzv"),
    (["--nprocs", "4"], "no such option: --nprocs"),
    (["--nodes", "2", "--nnodes", "2"], "--nodes 2 and --nnodes 2 exclude each other"),
    (["--never-retry", "0"], "--never-retry: 0 is no exit code of a failure"),
    (["--never-retry", "a"], "--never-retry: expected exit codes, got 'a'"),
    (["--restart-limit", "5"], "--restart-limit: expected N/TIME, got '5'"),
    (["--restart-limit", "²/1h"], "--restart-limit: expected N/TIME, got '²/1h'"),
    (["--restart-limit", "5/x"], "--restart-limit: expected a duration, got 'x'"),
    (["--forward-signals", "SIGINT"], "--forward-signals: SIGINT ends the job, always"),
    (["--signals-to-handle", "SIGUSR1", "--forward-signals", "SIGUSR1"], "SIGUSR1 cannot both end the job and only be"),
    (["--end-stalled"], "--end-stalled needs --stall-timeout"),
    (["--stall-timeout", "0"], "--stall-timeout: expected more than 0 seconds, got '0'"),
    (["--stdin-rank", "1"], "--stdin-rank 1: there is 1 rank, numbered from 0"),
    (["--json-report", "/not/there/x.json"], "--json-report: no directory /not/there"),
    (["--json-report", "/tmp"], "--json-report: /tmp is a directory"),
    (["--log-dir", SCRIPT], f"--log-dir: {SCRIPT} is not a directory"),
    (["--log-dir", f"{SCRIPT}/below"], f"--log-dir: {SCRIPT}/below: {SCRIPT} is not a directory"),
]


@pytest.mark.parametrize(("argv", "what"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_a_wrong_option_is_explained_in_one_line_with_a_way_out(argv: list[str], what: str) -> None:
    with pytest.raises(UsageError) as error:
        ours([*argv, SCRIPT], command=Command.RUN)

    assert error.value.what.startswith(what)
    assert error.value.help and "\n" not in error.value.what + error.value.help


def test_a_script_that_an_option_has_taken_is_found() -> None:
    with pytest.raises(UsageError) as error:
        ours(["--nproc-per-node", "2", "--tee", SCRIPT])

    assert error.value.what == f"no script given: {SCRIPT} is the value of --tee"


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match="PET_NNODES: expected N or MIN:MAX, got 'two'"):
        ours([SCRIPT], {"PET_NNODES": "two"})
    with pytest.raises(UsageError, match="PET_STANDALONE: expected 0 or 1, got 'yes'"):
        ours([SCRIPT], {"PET_STANDALONE": "yes"})


def test_scripts_that_cannot_run_are_told_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'ä'\n".encode("latin-1"))
    (tmp_path / "warns.py").write_text("x = '\\d'\n")
    (tmp_path / "program").write_text("")

    def said(*argv: str) -> str:
        with pytest.raises(UsageError) as error:
            ours(argv)
        return error.value.what

    assert said("-m", "train.py") == "-m: train.py is a file, expected a module"
    assert said("-m", "no_such_module.train") == "-m: there is no module no_such_module"
    assert said("--no-python", "no-such-program") == "--no-python: no program no-such-program on PATH"
    assert said("--no-python", "./program") == "./program cannot be executed"
    assert said("missing.py") == "no such script: missing.py"
    assert [ours([name]).script for name in ("latin.py", "warns.py")] == ["latin.py", "warns.py"]
    (tmp_path / "my-train.py").write_text("")
    for name in ("warns", "my-train", "warns.of-no-name"):  # Python runs what no import statement can name
        assert ours(["-m", name]).entry is Entry.MODULE
    assert said("-m", "warns..train") == "-m: 'warns..train' is no name of a module"
    assert sys.path[0] != str(tmp_path)


def test_too_few_open_files_are_told_and_the_soft_limit_is_raised_only_if_it_must_be() -> None:
    code = f"""
import resource
from odyssey_cli.command_line.request import read
from odyssey_cli.command_line.options import Command
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
read(["--nproc-per-node", "2", {SCRIPT!r}], {{}}, Command.RUN)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
read(["--nproc-per-node", "20", {SCRIPT!r}], {{}}, Command.RUN)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
read(["--nproc-per-node", "40", {SCRIPT!r}], {{}}, Command.RUN)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.stdout.split() == ["100", "232"]
    assert "40 ranks need 432 open files, the limit is 300" in done.stderr


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", list(Command))
def test_help_lists_every_option_once_in_80_columns(command: Command) -> None:
    with pytest.raises(HelpAsked) as asked:
        ours(["--help"], command=command)

    lines = str(asked.value).splitlines()
    named = [found[1] for line in lines if (found := re.match(r"  (?:-\w, |    )(--[\w-]+)", line))]
    assert sorted(named) == sorted(["--help", *(option.name for option in OPTIONS if option.is_of(command))])
    assert max(map(len, lines)) <= 80


def test_help_of_a_run_reads_like_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_version, "installed", lambda: (2, 15))
    golden = Path(__file__).parent / "help_run.txt"

    assert help_text(Command.RUN) + "\n" == golden.read_text()


def test_the_short_help_of_a_run_reads_like_this() -> None:
    golden = Path(__file__).parent / "help_run_short.txt"

    assert short_help_text(Command.RUN) + "\n" == golden.read_text()


@pytest.mark.parametrize("command", [Command.RUN, Command.PROFILE, Command.CHECK])
def test_the_short_help_is_a_third_of_a_screen_and_names_the_whole_one(command: Command) -> None:
    with pytest.raises(HelpAsked) as asked:
        ours(["-h"], command=command)

    lines = str(asked.value).splitlines()
    assert 15 <= len(lines) <= 20 and max(map(len, lines)) <= 80
    assert lines[-1] == f"All options: {command.value} --help"


@pytest.mark.parametrize("command", [Command.TORCHRUN, Command.LAUNCH])
def test_the_short_help_of_torchrun_has_all_options_as_its_own_has(command: Command) -> None:
    assert short_help_text(command) == help_text(command)


def test_the_first_screen_of_a_runs_help_is_enough_to_start() -> None:
    screen = help_text(Command.RUN).splitlines()[:24]

    examples = [line.split()[3:] for line in screen if line.startswith("$ odyssey run")]
    assert len(examples) == 3
    for arguments in examples:
        assert parse(arguments, {}, Command.RUN).script == "train.py"
    for name in ("--nproc-per-node", "--nodes", "--nnodes", "--max-restarts", "--on-loss", "--tee"):
        assert any(line[6:].startswith(f"{name} ") for line in screen), name


def test_help_behind_the_script_is_the_scripts() -> None:
    assert ours([SCRIPT, "--help", "-h"]).arguments == ("--help", "-h")


def test_a_launcher_that_was_started_without_streams_gives_ranks_empty_ones(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(os.readlink('/proc/self/fd/0') + repr(os.read(0, 9)))")
    command = f"exec {sys.executable} -m odyssey_cli run --log-dir /dev/null {script} {tmp_path}/said <&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "/dev/nullb''"
