"""The job's folder, its files, and the entry points that decide about them."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.distributed.elastic.events import handlers

from launcher.coordinator.rank_assignment import RankAssignment, assignments_on_one_host
from launcher.host.loop import Loop
from launcher.joblog.events import Event, Note
from launcher.options import RunOptions, Std
from launcher.output.console import Console, Filtered, Lines
from launcher.output.log_files import JobFolder, LogFile, Outlet
from launcher.output.torch_logs_specs import CustomLogs, load
from odyssey.errors import OdysseyError, UsageError
from tests.agent_runs import Ran

SECOND = RankAssignment(
    rank=1, local_rank=1, node=0, n_ranks=2, n_local_ranks=2, n_nodes=1, role_rank=1, n_role_ranks=2, attempt=3
)


def never(text: str) -> None:
    raise AssertionError(text)


def folder(tmp_path: Path, **rest: object) -> JobFolder:
    return JobFolder(RunOptions("train.py", log_dir=tmp_path / "logs", **rest), 0.0, never)  # type: ignore[arg-type]


# -- the folder --------------------------------------------------------------------------------------------------------


def test_two_jobs_of_one_run_id_have_a_folder_each(tmp_path: Path) -> None:
    first, second = folder(tmp_path, run_id="7/a"), folder(tmp_path, run_id="7/a")
    first.append(Event(1.0, 0, "agent", Note("hello")))
    first.close()
    second.close()
    assert first.path is not None and second.path is not None and first.path != second.path
    assert first.path.name.startswith("7_a_") and first.run_id == "7/a"
    assert b"hello" in (first.path / "events.jsonl").read_bytes()


def test_streams_go_where_torchrun_puts_them(tmp_path: Path) -> None:
    job = folder(tmp_path, redirects={1: Std.OUT}, tee=Std.ERR)
    logs = job.logs_of(SECOND, {})
    job.close()
    assert job.path is not None
    attempt = job.path / "attempt_3"
    assert logs.outlets[Std.OUT] == Outlet(attempt / "1/stdout.log", is_teed=False, is_shown=False)
    assert logs.outlets[Std.ERR] == Outlet(attempt / "1/stderr.log", is_teed=True, is_shown=True)
    assert logs.error_file == str(attempt / "1/error.json")
    assert logs.filtered[Std.OUT] == attempt / "filtered_stdout.log"
    assert [path for path in attempt.rglob("*") if path.is_file()] == []


def test_what_goes_to_no_file_is_kept_beside_torchruns_tree_of_two_attempts(tmp_path: Path) -> None:
    job = folder(tmp_path, tee=Std.ERR, keep_bytes=100)
    assert job.path is not None
    for attempt in range(4):
        outlets = job.logs_of(replace(SECOND, attempt=attempt), {}).outlets
        kept = outlets[Std.OUT].kept
        assert kept == job.path / f"kept/attempt_{attempt}/1/stdout.log" and outlets[Std.ERR].kept is None
        kept.parent.mkdir(parents=True)
    job.close()
    assert sorted(path.name for path in (job.path / "kept").iterdir()) == ["attempt_2", "attempt_3"]


def test_ranks_that_are_not_shown_still_have_their_files(tmp_path: Path) -> None:
    job = folder(tmp_path, tee=Std.OUT, shown_ranks=frozenset({0}))
    logs = job.logs_of(SECOND, {})
    job.close()
    assert logs.outlets[Std.OUT].file is not None and not logs.outlets[Std.OUT].is_shown
    kept = job.path / "kept/attempt_3/1/stderr.log"
    assert logs.outlets[Std.ERR] == Outlet(None, is_teed=False, is_shown=False, kept=kept)


def test_failure_domains_on_one_host_do_not_share_files(tmp_path: Path) -> None:
    job = folder(tmp_path, n_nodes=2, redirects=Std.ALL)
    assignments = assignments_on_one_host(2, 1, 0, 0)
    files = {job.logs_of(assignment, {}).outlets[Std.OUT].file for assignment in assignments.values()}
    job.close()
    assert len(files) == 2


def test_dev_null_keeps_nothing(tmp_path: Path) -> None:
    job = JobFolder(RunOptions("train.py", log_dir=Path(os.devnull), redirects=Std.ALL, tee=Std.OUT), 0.0, never)
    job.append(Event(1.0, 0, "agent", Note("hello")))
    logs = job.logs_of(SECOND, {})
    job.close()
    assert job.path is None and logs.error_file == ""
    assert logs.outlets[Std.OUT] == Outlet(None, is_teed=True, is_shown=True)
    assert logs.outlets[Std.ERR] == Outlet(None, is_teed=False, is_shown=True)


def test_a_log_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UsageError) as caught:
        folder(tmp_path)
    assert caught.value.what.startswith(f"cannot make the log directory {tmp_path}/logs/")
    assert caught.value.what.endswith(": not a directory")


def test_a_full_disk_is_told_once_and_ends_nothing() -> None:
    told: list[str] = []
    file = LogFile(Path("/dev/full"), told.append)
    file.write(b"some")
    file.write(b"more")
    file.close()
    assert told == ["cannot write to /dev/full: no space left on device; the job goes on without this file"]


# -- lines -------------------------------------------------------------------------------------------------------------


class Reader:
    """What a console that is a pipe has been given, in the end."""

    def __init__(self) -> None:
        self.loop = Loop(lambda: 0.0)
        self.console = Console(self.loop, lambda: None, never)
        self.console.start()
        self._read_end, self.fd = os.pipe()

    def lines(self, prefix: bytes) -> Lines:
        return Lines(self.loop, self.console, self.fd, prefix)

    def text(self) -> bytes:
        self.console.close()
        os.close(self.fd)
        with open(self._read_end, "rb") as file:
            text = file.read()
        self.loop.close()
        return text


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"d\ne", b"\n\n"]), max_size=12))
def test_however_lines_come_each_is_shown_once_behind_the_prefix(pieces: list[bytes]) -> None:
    reader = Reader()
    lines = reader.lines(b"[0]:")
    for piece in pieces:
        lines.write(piece)
    lines.close()
    as_torchrun_reads = io.TextIOWrapper(io.BytesIO(b"".join(pieces))).readlines()
    assert reader.text().decode().splitlines() == [f"[0]:{line.rstrip()}" for line in as_torchrun_reads]


def test_a_prompt_is_shown_and_what_follows_does_not_tear_it() -> None:
    now = 0.0
    reader = Reader()
    reader.loop.clock = lambda: now
    first, second = reader.lines(b"[0]:"), reader.lines(b"[1]:")
    first.write(b"(Pdb) ")
    now = 1.0
    reader.loop.turn()
    first.write(b"p x\n1\n(Pdb) ")
    now = 2.0
    reader.loop.turn()
    second.write(b"loss 3\n")
    first.write(b"\n")
    first.write(b"end")
    first.close()
    second.close()
    assert reader.text() == b"[0]:(Pdb) p x\n[0]:1\n[0]:(Pdb) \n[1]:loss 3\n[0]:end\n"


def test_lines_that_match_are_copied_whole(tmp_path: Path) -> None:
    filtered = Filtered(LogFile(tmp_path / "copied.log", never), b"[0]:", ("apple", "orange"))
    for piece in (b"an ap", b"ple\nplum\n", b"oran", b"ge"):
        filtered.write(piece)
    filtered.close()
    assert (tmp_path / "copied.log").read_bytes() == b"[0]:an apple\n[0]:orange\n"


def test_a_reader_that_does_not_read_loses_nothing_and_stops_nobody() -> None:
    reader = Reader()
    written = b"x" * (3 << 20)
    reader.console.write(reader.fd, written)
    assert reader.console.is_full
    got = b""
    while len(got) < len(written):
        got += os.read(reader._read_end, 1 << 16)
    assert got + reader.text() == written
    assert reader.console.is_idle


# -- entry points ------------------------------------------------------------------------------------------------------

SPECS = """
import os
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

class Mine(LogsSpecs):
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        if "refuse" in self._root_log_dir:
            raise ValueError("no room")
        os.makedirs(self._root_log_dir, exist_ok=True)
        file = {n: f"{self._root_log_dir}/{e['RANK']}-{e['TORCHELASTIC_RESTART_COUNT']}.txt" for n, e in envs.items()}
        for n, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = f"{self._root_log_dir}/{n}.json"
            env["MINE"] = f"told {n}"
        return LogsDest(
            file, dict.fromkeys(envs, ""), {0: file[0]}, {}, {},
            f"{self._root_log_dir}/found.txt", f"{self._root_log_dir}/found-errors.txt",
        )
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers `mine`, and `broken`, which cannot be imported."""
    (tmp_path / "my_specs.py").write_text(SPECS)
    info = tmp_path / "my_specs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-specs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = my_specs:Mine\nbroken = no_such_module:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
@pytest.mark.timeout(120)
def test_a_class_of_ones_own_decides_where_output_goes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print('apple', os.environ['MINE'], os.environ['TORCHELASTIC_ERROR_FILE'])")
    logs = tmp_path / "logs"
    options = RunOptions(
        str(script), n_ranks_per_node=2, log_dir=logs, logs_specs="mine", capture_output=True, stdout_filters=("apple",)
    )
    ran = Ran(options)
    assert ran.code == 0
    for rank in range(2):
        assert (logs / f"{rank}-0.txt").read_text() == f"apple told {rank} {logs}/{rank}.json\n"
    assert ran.output == {(0, "stdout"): f"apple told 0 {logs}/0.json\n".encode()}
    assert (logs / "found.txt").read_text() == f"[default0]:apple told 0 {logs}/0.json\n"


@pytest.mark.usefixtures("package")
def test_a_name_that_nobody_offers_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError) as caught:
        load("yours")
    assert caught.value.what == "--logs-specs yours: no such entry point of torchrun.logs_specs"
    assert "mine" in caught.value.help


@pytest.mark.usefixtures("package")
def test_an_entry_point_that_cannot_be_imported_says_so() -> None:
    with pytest.raises(UsageError, match="no_such_module:Mine cannot be imported: No module named 'no_such_module'"):
        load("broken")


@pytest.mark.usefixtures("package")
def test_a_class_that_raises_is_one_error(tmp_path: Path) -> None:
    custom = CustomLogs(RunOptions("train.py", logs_specs="mine", log_dir=tmp_path / "refuse"))
    with pytest.raises(OdysseyError, match="--logs-specs mine: ValueError: no room"):
        custom.logs_of(SECOND, {})


class Kept(logging.Handler):
    """Events as torchrun's handlers get them."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("code", "first", "second"), [(0, "SUCCEEDED", "SUCCEEDED"), (3, "FAILED", "TERMINATED")])
def test_a_registered_handler_gets_torchruns_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, first: str, second: str
) -> None:
    from torch.distributed.elastic.events.api import Event as TorchEvent

    kept = Kept()
    monkeypatch.setitem(handlers._log_handlers, f"kept{code}", kept)
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, signal, sys\nif {code} == 0: sys.exit(0)\nif os.environ['RANK'] == '0': sys.exit({code})\nsignal.pause()"
    )
    options = RunOptions(
        str(script),
        n_ranks_per_node=2,
        log_dir=tmp_path / "logs",
        event_log_handler=f"kept{code}",
        capture_output=True,
        run_id="j",
    )
    assert Ran(options).code == (1 if code else 0)
    events = [TorchEvent.deserialize(message) for message in kept.messages]
    states = sorted((e.source.value, str(e.metadata["global_rank"]), str(e.metadata["state"])) for e in events)
    of_workers = [("WORKER", "0", "START"), ("WORKER", "1", "START"), ("WORKER", "0", first), ("WORKER", "1", second)]
    assert states == sorted([*of_workers, ("AGENT", "None", "SUCCEEDED")])
    assert {e.metadata["run_id"] for e in events} == {"j"}


def test_an_unknown_handler_is_one_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(UsageError, match="no handler is registered as 'none-such'"):
        Ran(RunOptions(str(script), log_dir=tmp_path / "logs", event_log_handler="none-such"))
