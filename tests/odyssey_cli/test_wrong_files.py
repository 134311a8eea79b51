"""Profiles, job files and flags of `odyssey rehearse` and `replay`, each changed a little: an answer, or one clear error."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import to_json
from odyssey_cli.__main__ import main
from tests import job_events
from tests.examples import examples

pytestmark = pytest.mark.timeout(120)

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    3,
    1e-300,
    1e308,
    math.nan,
    math.inf,
    10**30,
    1 << 62,
    "",
    "three",
    [],
    [[]],
    {},
    {"a": 1},
]
JOB = "model: MODEL\ncluster: CLUSTER\nlayout: 2x2\nglobal_batch: 16\nmicro_batch: 1\n"
MODEL = "name: small\nn_blocks: 4\nhidden: 64\nsequence: 32\nvocabulary: 100\n"
CLUSTER = (
    "name: four\nn_ranks: 4\nranks_per_node: 2\nmemory_gb: 8\nflops: {bf16: 1.0e+12}\nefficiency: 0.5\n"
    "memory_bandwidth: 1.0e+11\nintra_host: {latency_s: 1.0e-5, bandwidth: 1.0e+10}\n"
    "inter_host: {latency_s: 1.0e-5, bandwidth: 1.0e+9}\nrecovery: {detect_s: 0.1, pause_s: 0.5}\n"
)
WITHIN = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "trace.csv").write_text("3600,1,lost\n7200,1,returned\n9000,0,lost\n")
    (tmp_path / "good.json").write_bytes(to_json(job_events.profile()))
    return tmp_path


def told(*arguments: str) -> tuple[int, str]:
    """Exit code, and the error if there is one: one line, perhaps with help, and no traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert "Traceback" not in err.getvalue(), err.getvalue()
    assert len(errors) == (code != ExitCode.OK), err.getvalue()
    assert code in (ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE), err.getvalue()
    assert all(line.startswith(("error: ", "help: ", "odyssey: ")) for line in lines), err.getvalue()
    return code, errors[0].removeprefix("error: ") if errors else ""


def is_about(source: str) -> tuple[int, str]:
    """What both commands say of a source: nothing is rehearsed, as the drill names a rank that no job has."""
    replayed = told("replay", "trace.csv", source, "--policy", "shrink", "--policy", "torchrun")
    code, error = told("rehearse", source, "--slow", "1000000000=2")
    assert code != ExitCode.OK
    if replayed[0] == ExitCode.USAGE and source in replayed[1]:
        assert error == replayed[1], "the same file, the same error"
    return replayed


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of everything within a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def with_change(value: Any, path: tuple[str | int, ...], other: Any, how: str) -> Any:
    """A copy in which what stands at `path` is replaced, left out, or has an unknown neighbour."""
    changed = json.loads(json.dumps(value))
    at = changed
    for key in path[:-1]:
        at = at[key]
    if how == "left out":
        del at[path[-1]]
    elif how == "with a neighbour" and isinstance(at, dict):
        at["unknown"] = other
    else:
        at[path[-1]] = other
    return changed


@WITHIN
@given(data=st.data())
def test_a_changed_profile_is_a_profile_or_one_error(folder: Path, data: st.DataObject) -> None:
    good = json.loads((folder / "good.json").read_text())
    path = data.draw(st.sampled_from(list(places(good))))
    how = data.draw(st.sampled_from(["replaced", "replaced", "replaced", "left out", "with a neighbour"]))
    changed = with_change(good, path, data.draw(st.sampled_from(ODD)), how)
    (folder / "p.json").write_text(json.dumps(changed))
    code, error = is_about("p.json")
    if code == ExitCode.USAGE:
        assert error.startswith("p.json: ")


@pytest.mark.parametrize(
    ("path", "other", "error"),
    [
        (("layers", 1, "forward_s"), -0.2, "p.json: layers[1].forward_s: expected `float` > 0.0"),
        (("cluster", "intra_host", "bandwidth"), "fast", "p.json: cluster.intra_host.bandwidth: expected `float`, got `str`"),
        (("micro_batch",), 0, "p.json: micro_batch: "),
        (("global_batch",), 10**18, "p.json: global_batch: expected `int` <= 1000000000"),
        (("cluster", "ranks_per_node"), 10**18, "p.json: cluster.ranks_per_node: expected `int` <= 1000000"),
        (("cluster", "nodes_per_host"), 10**18, "p.json: cluster.nodes_per_host: expected `int` <= 1000000"),
        (("recovery", "pause_s"), None, "p.json: recovery.pause_s: "),
        (("ties",), [[0, 99]], "p.json: ties[0]: expected two or more of the layers 0 to "),
        (("ties",), [[]], "p.json: ties[0]: "),
        (("ties",), [[0, 1]], "p.json: tie_bytes: expected a size for each of 1 ties, got 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(folder: Path, path: tuple[str | int, ...], other: object, error: str) -> None:
    good = json.loads((folder / "good.json").read_text())
    (folder / "p.json").write_text(json.dumps(with_change(good, path, other, "replaced")))
    code, found = is_about("p.json")
    assert code == ExitCode.USAGE and found.startswith(error), found


@WITHIN
@given(data=st.data())
def test_a_changed_job_file_is_a_job_or_one_error(folder: Path, data: st.DataObject) -> None:
    texts = {"model.yaml": MODEL, "cluster.yaml": CLUSTER, "job.yaml": JOB}
    name = data.draw(st.sampled_from(sorted(texts)))
    text = texts[name]
    at = data.draw(st.integers(0, len(text)))
    junk = ["", "0", "-", ":", "\n", "\t", "~", "99999999999", "e9", "{", "[", "&", "*a", "nan", "\x00", "é", ": :"]
    texts[name] = text[:at] + data.draw(st.sampled_from(junk)) + text[at + data.draw(st.integers(0, 6)) :]
    for file, content in texts.items():
        (folder / file).write_text(content.replace("MODEL", "model.yaml").replace("CLUSTER", "cluster.yaml"))
    is_about("job.yaml")


@pytest.mark.parametrize(("file", "text", "field"), [("model.yaml", MODEL, "n_blocks"), ("cluster.yaml", CLUSTER, "n_ranks")])
def test_more_than_fits_in_memory_is_refused(folder: Path, file: str, text: str, field: str) -> None:
    for name, content in {
        "model.yaml": MODEL,
        "cluster.yaml": CLUSTER,
        "job.yaml": JOB,
        file: text.replace(": 4", ": 99999999"),
    }.items():
        (folder / name).write_text(content.replace("MODEL", "model.yaml").replace("CLUSTER", "cluster.yaml"))
    code, error = is_about("job.yaml")
    assert code == ExitCode.USAGE and error == f"{file}: {field}: expected `int` <= 1000000"


@pytest.mark.parametrize(
    ("file", "line", "error"),
    [
        ("cluster.yaml", "memory_gb: .inf", "cluster.yaml: memory_gb: no cluster has inf"),
        ("cluster.yaml", "memory_gb: 1.0e+300", "cluster.yaml: memory_gb: no cluster has 1e+300"),
        ("cluster.yaml", "memory_gb: 1.0e+12", "job.yaml: cluster.memory_bytes: no cluster has 1e+21"),
        ("cluster.yaml", "runtime_gb: .inf", "cluster.yaml: runtime_gb: no cluster has inf"),
        ("cluster.yaml", "op_overhead_s: .inf", "cluster.yaml: op_overhead_s: no cluster has inf"),
        ("cluster.yaml", "memory_bandwidth: .inf", "cluster.yaml: memory_bandwidth: no cluster has inf"),
        ("cluster.yaml", "recovery: {detect_s: .inf}", "cluster.yaml: recovery.detect_s: no cluster has inf"),
        ("model.yaml", "hidden: 999999999", "job.yaml: layers[1].parameter_bytes: no cluster has 2.4e+19"),
    ],
)
def test_what_nothing_can_be_computed_with_is_refused(folder: Path, file: str, line: str, error: str) -> None:
    key = line.partition(":")[0]
    for name, text in {"model.yaml": MODEL, "cluster.yaml": CLUSTER, "job.yaml": JOB}.items():
        lines = [one for one in text.splitlines() if name != file or not one.startswith(f"{key}:")]
        lines += [line] if name == file else []
        (folder / name).write_text("\n".join(lines).replace("MODEL", "model.yaml").replace("CLUSTER", "cluster.yaml"))
    assert is_about("job.yaml") == (ExitCode.USAGE, error)


@WITHIN
@given(data=st.data())
def test_odd_flags_are_answered_or_one_error(folder: Path, data: st.DataObject) -> None:
    flags = [
        *("--nodes", "--nproc-per-node", "--layout", "--mtbf", "--repair", "--transient", "--days", "--seed"),
        *("--trace-nodes", "--save", "--restart", "--checkpoint-every", "--json", "--svg"),
    ]
    values = [
        "",
        "0",
        "-1",
        "1",
        "3",
        "0.5",
        "1e308",
        "nan",
        "inf",
        "1h",
        "0s",
        "-3s",
        "2x2",
        "9x9",
        "auto",
        "/",
        "\x00",
        "é" * 300,
    ]
    given_flags = data.draw(st.lists(st.tuples(st.sampled_from(flags), st.sampled_from(values)), min_size=1, max_size=2))
    trace = data.draw(st.sampled_from(["trace.csv", "exponential", "weibull"]))
    extra = ["--mtbf", "2h", "--days", "1"] if trace != "trace.csv" else []
    told("replay", trace, "good.json", "--policy", "shrink", *extra, *(word for flag in given_flags for word in flag))


@pytest.mark.parametrize(
    "words", [["run"], ["status"], ["logs"], ["plan"], ["rehearse"], ["run", "--log-dir"], ["run", "--profile"]]
)
def test_a_name_that_is_too_long_is_one_error(words: list[str], folder: Path) -> None:
    """Such as a command line that was quoted by mistake."""
    Path("script.py").touch()
    code, error = told(*words, "é" * 300, *(["script.py"] if len(words) > 1 else []))
    assert code == ExitCode.USAGE and "é" * 50 in error and len(error) < 400


@WITHIN
@given(data=st.data())
def test_odd_flags_of_a_rehearsal_are_one_error(folder: Path, data: st.DataObject) -> None:
    flags = [
        "--nodes",
        "--nproc-per-node",
        "--layout",
        "--mtbf",
        "--seed",
        "--steps",
        "--speed",
        "--jitter",
        "--slow",
        "--drill",
    ]
    flags += ["--trace", "--strategy", "--max-restarts"]
    values = [
        "",
        "0",
        "-1",
        "0.5",
        "1e308",
        "nan",
        "inf",
        "-3s",
        "9x9",
        "/",
        "\x00",
        "7=2",
        "0=nan",
        "step=1",
        "kill=0",
        "hope",
    ]
    given_flags = data.draw(st.lists(st.tuples(st.sampled_from(flags), st.sampled_from(values)), min_size=1, max_size=2))
    words = [word for flag in given_flags for word in flag]
    code, _ = told("rehearse", "good.json", *words, "--slow", "1000000000=2")
    assert code != ExitCode.OK, "nothing was started"
