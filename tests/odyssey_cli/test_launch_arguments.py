"""What a command line that starts ranks comes to, held against torchrun's own parser and launcher as the oracle."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.launch
import torch.distributed.run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from launcher.options import Entry, Rendezvous, RunOptions
from odyssey.errors import UsageError
from odyssey_cli.command_line.options import OPTIONS, Command, Origin
from odyssey_cli.command_line.parser import HelpAsked, parse
from odyssey_cli.command_line.request import read
from odyssey_cli.command_line.torch_version import installed
from tests import ROOT
from tests.examples import examples

SCRIPT = str(ROOT / "tests" / "models.py")
"""Any script that exists."""
PARSER = torch.distributed.run.get_args_parser()
SPELLINGS = {string for action in PARSER._actions for string in action.option_strings} - {"-h", "--help"}
TAKEN = [option for option in OPTIONS if option.origin is Origin.TORCHRUN and option.is_of(Command.TORCHRUN)]
THEIRS = [option for option in TAKEN if option.name in SPELLINGS]
"""Those of torch 2.10 to 2.13 are taken with an older one as well."""


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working directory of its own, and a place for the folders that torchrun makes when it is only configured."""
    folder = tmp_path_factory.mktemp("launch")
    before = Path.cwd()
    os.chdir(folder)
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        yield
    os.chdir(before)


def ours(argv: Sequence[str], environment: Mapping[str, str] | None = None, command: Command = Command.TORCHRUN) -> RunOptions:
    return read(argv, environment or {}, command).options


@dataclass
class Asked:
    """What torchrun would have launched."""

    config: Any
    entrypoint: Any
    arguments: tuple[str, ...]


def torchruns(argv: Sequence[str], environment: Mapping[str, str], module: Any = torch.distributed.run) -> Asked | None:
    """Torchrun's own reading, up to the launch; None if it refuses."""
    asked: list[Asked] = []

    def launch(config: Any, entrypoint: Any) -> Any:
        return lambda *arguments: asked.append(Asked(config, entrypoint, arguments))

    with (
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **environment}),
        mock.patch.object(torch.distributed.run, "elastic_launch", launch),
        mock.patch.object(torch.multiprocessing, "_set_thread_name"),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            arguments = module.parse_args(list(argv))
            (module.launch if module is torch.distributed.launch else module.run)(arguments)
        except (SystemExit, ValueError, AssertionError, RuntimeError):
            return None
    return asked[0]


def check_agree(options: RunOptions, asked: Asked) -> None:
    """The same job, said in both ways."""
    config = asked.config
    assert options.n_ranks_per_node == config.nproc_per_node
    assert options.max_restarts == config.max_restarts
    assert options.role == config.role
    assert options.event_log_handler == config.event_log_handler
    assert options.numa_binding == (config.numa_options.affinity_mode.value if config.numa_options else "")
    newer = {
        "virtual_local_rank": lambda asked: options.virtual_local_rank == asked,
        "signals_to_handle": lambda asked: options.ending_signals == tuple(asked.split(",")),
        "shutdown_timeout": lambda asked: options.shutdown_timeout_s == asked,
        "duplicate_stdout_filters": lambda asked: options.stdout_filters == tuple(asked),
        "duplicate_stderr_filters": lambda asked: options.stderr_filters == tuple(asked),
    }
    known = {option.dest for option in THEIRS}
    assert [name for name, agrees in newer.items() if name in known and not agrees(getattr(config, name))] == []
    assert options.shown_ranks == frozenset(config.logs_specs._local_ranks_filter or ())
    assert options.redirects == config.logs_specs._redirects
    assert options.tee == config.logs_specs._tee
    assert options.line_prefix == (config.log_line_prefix_template or "")
    if options.log_dir != Path("odyssey-logs"):  # torchrun's default is a new folder below /tmp
        assert str(options.log_dir) == config.logs_specs._root_log_dir
    check_meeting(options, config)
    check_command(options, asked)


def check_meeting(options: RunOptions, config: Any) -> None:
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, 29400 if config.rdzv_backend == "c10d" else 29500)
    if config.rdzv_backend == "static":
        if installed() < (2, 13) and options.master_port == 0:
            port = 0  # older ones then take 29500, which only one job of a host can
        assert (options.master_addr, options.master_port) == (host, port)
        assert options.max_agents == config.max_nodes
        if config.max_nodes > 1:
            assert options.rendezvous is Rendezvous.STATIC
            assert options.node_rank == config.rdzv_configs["rank"]
            assert options.run_id == config.run_id
            assert options.join_timeout_s == float(config.rdzv_configs["timeout"])
        else:
            assert options.rendezvous is Rendezvous.LOCAL
    elif port == 0:
        assert (options.rendezvous, options.max_agents, options.master_port) == (Rendezvous.LOCAL, 1, 0)
    else:
        assert options.rendezvous is Rendezvous.C10D
        assert (options.min_agents, options.max_agents) == (config.min_nodes, config.max_nodes)
        assert (options.master_addr, options.master_port) == (host, port)
        assert options.run_id == config.run_id
        assert options.join_timeout_s == float(config.rdzv_configs.get("join_timeout", 600))
        assert options.last_call_s == float(config.rdzv_configs.get("last_call_timeout", 30))


def check_command(options: RunOptions, asked: Asked) -> None:
    appended = ("--local-rank=${local_rank}",) if options.passes_local_rank else ()
    behind = (*appended, *options.arguments)
    match options.entry:
        case Entry.SCRIPT:
            expected = (options.interpreter or sys.executable, ("-u", options.script, *behind))
        case Entry.MODULE:
            expected = (options.interpreter or sys.executable, ("-u", "-m", options.script, *behind))
        case Entry.PROGRAM:
            expected = (options.script, behind)
        case Entry.PATH:
            expected = (torch.distributed.run.run_script_path, (options.script, *behind))
    assert (asked.entrypoint, asked.arguments) == expected


# -- any command line --------------------------------------------------------------------------------------------------

WORD = st.text("abcxyz019_.", min_size=1, max_size=6)
RANKS = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
VALUES: dict[str, st.SearchStrategy[str]] = {
    "nnodes": st.sampled_from(["1", "1:1", "2", "2:2", "1:4", "3:5"]),
    "nproc_per_node": st.sampled_from(["1", "2", "13", "cpu"]),
    "rdzv_backend": st.sampled_from(["static", "c10d"]),
    "rdzv_endpoint": st.sampled_from(["", "localhost:0", "node0:29500", "10.0.0.1:1234", "[::1]:29400", "localhost:29400"]),
    "rdzv_id": WORD,
    "rdzv_conf": st.sampled_from(
        ["", "join_timeout=7,last_call_timeout=2", "timeout=5", "is_host=0, other = x", "read_timeout=3"]
    ),
    "max_restarts": st.sampled_from(["0", "3", "100"]),
    "monitor_interval": st.sampled_from(["5", "0.1", "1e-2"]),
    "start_method": st.sampled_from(["spawn", "fork", "forkserver"]),
    "event_log_handler": st.sampled_from(["null", "console"]),
    "role": st.one_of(st.just(""), WORD),
    "log_dir": st.sampled_from(["logs", "logs/not/there", "/dev/null"]),
    "redirects": st.sampled_from(["0", "1", "2", "3", "0:1", "0:3,1:2"]),
    "tee": st.sampled_from(["0", "3", "1:1,0:0"]),
    "local_ranks_filter": RANKS.map(lambda ranks: ",".join(map(str, ranks))),
    "log_line_prefix_template": st.sampled_from(["", "[${rank}] ", "${hostname}: "]),
    "duplicate_stdout_filters": st.text("ab,", max_size=8),
    "duplicate_stderr_filters": st.sampled_from(["apple", "a,,b,c", ""]),
    "node_rank": st.sampled_from(["0", "1"]),
    "master_addr": st.sampled_from(["127.0.0.1", "node0", "[0:0:0:0:0:0:0:1]"]),
    "master_port": st.sampled_from(["29500", "1234"]),
    "local_addr": st.sampled_from(["10.0.0.7", "node7"]),
    "numa_binding": st.sampled_from(["node", "socket", "exclusive", "core-complex"]),
    "signals_to_handle": st.sampled_from(["SIGTERM", "SIGTERM,SIGINT,SIGUSR1"]),
    "shutdown_timeout": st.sampled_from(["0", "5", "60"]),
}
VALUES = {dest: values for dest, values in VALUES.items() if dest in {option.dest for option in THEIRS}}
UNCHECKED = {"logs_specs": "has to be installed", "standalone": "a switch", "print_completion": "starts nothing"}
REST = st.lists(
    st.sampled_from(["--nnodes", "-m", "--module", "x", "--lr=3", "-r3", "--help", "", "--verbose", "--"]), max_size=4
)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """Options in any spelling, some of them in the environment; then the script and what is the script's."""
    chosen = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True))
    switches = draw(st.lists(st.sampled_from([option.dest for option in THEIRS if option.is_switch]), max_size=2))
    argv: list[str] = []
    environment: dict[str, str] = {}
    for dest in draw(st.permutations([*chosen, *switches])):
        option = next(option for option in THEIRS if option.dest == dest)
        value = "" if option.is_switch else draw(VALUES[dest])
        # numa-binding is the only option here that torchrun reads no variable for
        if dest != "numa_binding" and draw(st.integers(0, 3)) == 0:
            environment[f"PET_{dest.upper()}"] = value or ("1" if option.is_switch else "")
            if draw(st.booleans()):
                continue
        spelling = draw(st.sampled_from(option.spellings))
        if spelling.startswith("--"):
            spelling = spelling[: draw(st.integers(min(5, len(spelling)), len(spelling)))]
        if option.is_switch:
            argv.append(spelling)
        elif spelling.startswith("--") and draw(st.booleans()):
            argv.append(f"{spelling}={value}")
        elif not spelling.startswith("--") and value and draw(st.booleans()):
            argv.append(f"{spelling}{value}")
        else:
            argv += [spelling, value]
    is_module = "module" in switches and "run_path" not in switches
    script = "tests.models" if is_module else "env" if "no_python" in switches and "run_path" not in switches else SCRIPT
    return [*argv, *draw(st.sampled_from([[], [], [], ["--"]])), script, *draw(REST)], environment


@settings(max_examples=examples(100))
@given(command_lines(), st.sampled_from([Command.TORCHRUN, Command.RUN]))
def test_any_command_line_of_torchrun_means_what_it_means_there(
    line: tuple[list[str], dict[str, str]], command: Command
) -> None:
    argv, environment = line
    asked = torchruns(argv, environment)
    assume(asked is not None)
    assert asked is not None
    check_ours(argv, environment, command, asked)


def check_ours(argv: list[str], environment: dict[str, str], command: Command, asked: Asked) -> None:
    """It comes to what torchrun was asked for, or is refused for a reason that torchrun finds out too late."""
    try:
        options = ours(argv, environment, command)
    except UsageError as error:
        if not is_refused_on_purpose(error, asked.config):
            raise
    else:
        check_agree(options, asked)


def is_refused_on_purpose(error: UsageError, config: Any) -> bool:
    """What torchrun takes and then waits for in vain."""
    n_waits = config.min_nodes > 1 and config.rdzv_endpoint.endswith(":0")
    wrong_rank = "--node-rank" in error.what or "PET_NODE_RANK" in error.what
    return (
        (n_waits and ("--standalone is for one agent" in error.what or "port 0" in error.what))
        or (wrong_rank and "there is one agent" in error.what and config.max_nodes == 1)
        or (config.rdzv_backend == "static" and config.max_nodes > 1 and "port 0" in error.what)
    )


@settings(max_examples=examples(60))
@given(command_lines(), st.booleans())
def test_launch_appends_the_local_rank_as_torchs_does(line: tuple[list[str], dict[str, str]], use_env: bool) -> None:
    argv, environment = line
    argv = [*(["--use_env"] if use_env else []), *argv]
    asked = torchruns(argv, environment, torch.distributed.launch)
    assume(asked is not None)
    assert asked is not None
    check_ours(argv, environment, Command.LAUNCH, asked)


def test_every_option_of_torchrun_is_there_in_all_its_spellings() -> None:
    ours = {spelling for option in TAKEN for spelling in option.spellings}

    assert ours >= SPELLINGS
    assert ours == SPELLINGS or installed() < (2, 13)
    assert {option.dest for option in THEIRS} <= set(VALUES) | set(UNCHECKED) | {o.dest for o in THEIRS if o.is_switch}


def test_every_abbreviation_that_torchrun_takes_means_the_same_in_odyssey_run() -> None:
    n_checked = 0
    for option in THEIRS:
        for spelling in option.spellings:
            for length in range(3, len(spelling)):
                if option.dest == "print_completion":
                    continue  # nothing is parsed after it
                argv = [spelling[:length], *([] if option.is_switch else [PLAIN.get(option.dest, "1")]), "train.py"]
                with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
                    before = vars(PARSER.parse_args(["train.py"]))
                    after = vars(PARSER.parse_args(argv))
                    (changed,) = {dest for dest in after if after[dest] != before[dest]} or {option.dest}
                    for command in (Command.RUN, Command.TORCHRUN, Command.LAUNCH):
                        assert list(parse(argv, {}, command).texts) == [changed], argv
                    n_checked += 1
    assert n_checked > 200


PLAIN = {"start_method": "fork", "numa_binding": "node", "nproc_per_node": "2", "role": "x"}
"""Values that are not the defaults."""


def test_an_abbreviation_of_our_own_options_works_where_torchrun_has_none() -> None:
    assert parse(["--lay", "2x4", "--verb", "x.py"], {}, Command.RUN).texts == {"layout": ("2x4",), "verbose": ("1",)}


def test_what_could_be_several_options_of_ours_is_the_scripts_behind_it() -> None:
    prefixes = {spelling[:length] for option in OPTIONS for spelling in option.spellings for length in range(3, len(spelling))}
    refused = set()
    for prefix in sorted(prefixes):
        given = parse(["train.py", prefix, "1"], {}, Command.RUN)
        assert (given.script, given.arguments, given.texts) == ("train.py", (prefix, "1"), {}), prefix
        try:
            parse([prefix, "1", "train.py"], {}, Command.RUN)
        except HelpAsked:
            continue
        except UsageError as error:
            refused |= {prefix} if error.what.startswith("ambiguous") else set()
    assert {"--res", "--rest", "--sur", "--log"} <= refused


def test_options_of_ours_are_none_of_torchruns_command_line() -> None:
    with pytest.raises(UsageError, match="no such option: --nodes"):
        ours(["--nodes", "2", SCRIPT])


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dest", sorted(VALUES))
def test_a_pet_variable_is_the_option(dest: str) -> None:
    value = {"rdzv_endpoint": "h:1", "node_rank": "1", "rdzv_id": "7"}.get(dest, "")
    value = value or {**PLAIN, "log_dir": "/tmp", "nnodes": "2"}.get(dest, "") or example(dest)
    context = ["--nnodes", "2"] if dest != "nnodes" else []

    by_option = ours([*context, f"--{dest}", value, SCRIPT])

    assert ours([*context, SCRIPT], {f"PET_{dest.upper()}": value}) == by_option
    has_no_effect = dest in ("monitor_interval", "start_method", "rdzv_backend", "local_addr")
    assert has_no_effect or by_option != ours([*context, SCRIPT])


def example(dest: str) -> str:
    return {
        "rdzv_backend": "static", "rdzv_conf": "timeout=5", "max_restarts": "2", "monitor_interval": "5", "redirects": "1",
        "event_log_handler": "console", "tee": "3", "local_ranks_filter": "1", "duplicate_stdout_filters": "a",
        "duplicate_stderr_filters": "a", "master_addr": "h", "master_port": "1", "local_addr": "h",
        "signals_to_handle": "SIGTERM", "shutdown_timeout": "5", "log_line_prefix_template": "x",
    }[dest]  # fmt: skip


def test_the_command_line_wins_over_the_environment() -> None:
    environment = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_STANDALONE": "0", "PET_MODULE": "1"}

    options = ours(["--nnodes=1", "tests.models"], environment)

    assert (options.max_agents, options.n_ranks_per_node, options.entry) == (1, 8, Entry.MODULE)


def test_a_job_of_kubeflows_is_a_static_one() -> None:
    environment = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0-0.job"}

    options = ours([SCRIPT], {**environment, "PET_MASTER_PORT": "29400"})

    assert (options.rendezvous, options.node_rank, options.max_agents) == (Rendezvous.STATIC, 1, 2)
    assert (options.master_addr, options.master_port, options.n_ranks_per_node) == ("job-0-0.job", 29400, 4)


def test_other_variables_of_torchruns_are_read() -> None:
    environment = {
        "LOGLEVEL": "INFO",
        "PYTHON_EXEC": "sh",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1",
    }

    options = ours([SCRIPT], environment)

    assert (options.interpreter, options.line_prefix, options.shutdown_timeout_s) == ("sh", "[${rank}] ", 7.0)
    assert options.ending_signals == ("SIGTERM", "SIGUSR1")
    assert ours(["--shutdown-timeout", "3", SCRIPT], environment).shutdown_timeout_s == 3.0


def test_the_launchers_own_interpreter_is_no_other_one() -> None:
    assert ours([SCRIPT], {"PYTHON_EXEC": sys.executable}).interpreter == ""
