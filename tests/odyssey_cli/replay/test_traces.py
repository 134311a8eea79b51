"""Traces: every format that is read, what is wrong with others, and those that are drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.errors import UsageError
from odyssey_cli.replay.generators import GENERATORS, SHAPE, Failures
from odyssey_cli.replay.traces import DAY_S, Change, NodeEventKind, Trace, at_once, parse, read
from tests.examples import examples

FOLDER = Path(__file__).parent / "traces"
GOOD = [path.read_bytes() for path in sorted(FOLDER.glob("*.[jc]s*"))] + [
    b"0,4\n60,3\n90,4\n",
    b"seconds,node,what\n# mine\n1,0,lost\n2,3,failed\n8,0,returned\n",
    b"1,rack7/n1,lost\n2,rack7/n2,lost\n",
]


def there_at(trace: Trace, at_s: float) -> int:
    """Nodes, counted from the changes alone."""
    nodes = set(range(trace.n_nodes)) - trace.away
    for change in trace.changes:
        if change.at_s <= at_s:
            (nodes.add if change.kind is NodeEventKind.RETURNED else nodes.discard)(change.node)
    return len(nodes)


def test_faults_of_a_cluster() -> None:
    trace = read(str(FOLDER / "infinitehbd.json"))

    first = [change for change in trace.changes if change.at_s == 3.8955 * 86400]
    assert [change.kind for change in first] == [NodeEventKind.LOST, NodeEventKind.LOST]
    last = json.loads((FOLDER / "infinitehbd.json").read_text())[-1]
    assert trace.length_s == last["event_time"] * 86400
    assert sorted({change.node for change in trace.changes}) == list(range(trace.n_nodes))


def test_nodes_that_never_failed_are_known_by_their_number_only() -> None:
    trace = read(str(FOLDER / "infinitehbd.json"), seed=3, n_nodes=400)

    assert trace.n_nodes == 400
    assert trace == read(str(FOLDER / "infinitehbd.json"), seed=3, n_nodes=400)
    assert trace.changes != read(str(FOLDER / "infinitehbd.json"), seed=4, n_nodes=400).changes


def test_two_faults_of_a_node_are_one_loss() -> None:
    faults = [
        ("a", 1, "fault_start"),
        ("a", 2, "fault_start"),
        ("a", 3, "fault_end"),
        ("a", 5, "fault_end"),
        ("b", 4, "fault_end"),
    ]
    rows = ",".join(f'{{"node_id": "{node}", "event_time": {day}, "event_type": "{what}"}}' for node, day, what in faults)

    trace = parse(f"[{rows}]".encode(), "faults")

    days = [(change.at_s / 86400, change.kind) for change in trace.changes]
    assert days == [(1, NodeEventKind.LOST), (4, NodeEventKind.RETURNED), (5, NodeEventKind.RETURNED)]
    assert len(trace.away) == 1, "b was away before"


def test_spot_instances_take_the_places_of_those_that_went() -> None:
    trace = read(str(FOLDER / "parcae.csv"))

    instances: dict[str, None] = {}
    for line in (FOLDER / "parcae.csv").read_text().splitlines():
        at, what, name = line.split(",")
        instances.update({name: None}) if what == "add" else instances.pop(name)
        if not line.endswith(("node37", "node38")):  # within one moment
            assert at == "0" or there_at(trace, float(at) / 1000) >= 0
    assert there_at(trace, trace.length_s) == len(instances)
    assert trace.n_nodes < 60, "names are more than there ever were at once"


def test_an_instance_may_take_the_place_of_one_that_goes_at_the_start() -> None:
    trace = parse(b"0,add,a\n0,add,b\n0,remove,a\n0,add,c\n0,remove,b\n5000,remove,c\n9000,add,d\n", "mine.csv")

    assert [there_at(trace, at_s) for at_s in (0, 4, 5, 9)] == [1, 1, 0, 1]
    assert (trace.n_nodes, trace.away, trace.n_losses) == (2, {1}, 1), "what goes before the start is no loss"


@pytest.mark.parametrize("name", ["skypilot.json", "points"])
def test_counts_of_nodes_are_met_at_every_point(name: str) -> None:
    counts = [7, 7, 3, 0, 5, 9]
    points = "".join(f"{300 * i},{n}\n" for i, n in enumerate(counts)).encode()
    if name == "skypilot.json":
        points = b'{"metadata": {"gap_seconds": 300}, "data": %s}' % str(counts).encode()

    trace = parse(points, name, seed=5)

    assert [there_at(trace, 300 * i) for i in range(len(counts))] == counts
    assert trace.length_s == (1800 if name == "skypilot.json" else 1500)


def test_our_own_format() -> None:
    trace = parse(GOOD[-2], "mine.csv")

    assert trace.changes == (
        Change(1, 0, NodeEventKind.LOST),
        Change(2, 3, NodeEventKind.FAILED),
        Change(8, 0, NodeEventKind.RETURNED),
    )
    assert (trace.n_nodes, trace.length_s, trace.away) == (4, 8, frozenset())


def test_a_node_that_returns_first_was_away() -> None:
    assert parse(b"5,1,returned\n", "t").away == {1}


def test_a_trace_is_cut_to_the_job_and_says_so() -> None:
    trace = parse(GOOD[-2], "mine.csv")

    fewer, more = trace.cut(2, 5), trace.cut(6, 50)

    assert [change.node for change in fewer.changes] == [0]
    assert (fewer.n_nodes, fewer.length_s) == (2, 5)
    assert fewer.notes == ("nodes 2 to 3 of the trace are not the job's",)
    assert (more.n_nodes, more.length_s) == (6, 8)
    assert more.notes == ("nodes 4 to 5 of the job are not in the trace: they never fail",)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "t: expected a trace, it has no line of one"),
        ("\n1,2\n2\n", "t: line 3: expected 2 fields, as above, got 1"),
        ("1,2,lost,4\n", "t: line 1: expected 2 or 3 fields, got 4"),
        ("0,4\nsoon,3\n", "t: line 2: expected a time, got 'soon'"),
        ("-1,4\n", "t: line 1: expected a time from 0 on, got '-1'"),
        ("nan,4\n", "t: line 1: expected a time from 0 on, got 'nan'"),
        ("0,4\n2e10,4\n1e10,3\n", "t: line 2: expected a time of at most 1e+10 s"),
        ("0,4\ninf,3\n", "t: line 2: expected a time of at most 1e+10 s"),
        ("1,0,lost\n2e10,0,returned\n", "t: line 2: expected a time of at most 1e+10 s"),
        ("0,add,n1\n2e13,remove,n1\n", "t: line 2: expected a time of at most 1e+13 ms"),
        ("0,4\n1,3.5\n", "t: line 2: expected a number of nodes, a whole number up to 1048576, got '3.5'"),
        ("1,0,lost\n2,0,gone\n", "t: line 2: expected lost, failed, returned, got 'gone'"),
        ("1,0,lost\n2,0,lost\n", "t: line 2: '0' is lost, and not there"),
        ("1,0,lost\n2,0,returned\n3,0,returned\n", "t: line 3: '0' is returned, and there already"),
        ("0,add,n1\n60000,remove,n2\n", "t: line 2: 'n2' is removed, and not there"),
        ("0,add,n1\n60000,pause,n1\n", "t: line 2: expected add or remove, got 'pause'"),
        ("0,4\n", "t: expected nodes that come or go after 0 s, it has none"),
        ("[1]", "t: [0]: expected `object`, got `int`"),
        ('[{"node_id": "a", "event_time": 1, "event_type": "fault"}]', "t: [0].event_type: invalid enum value 'fault'"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "t: metadata.gap_seconds: expected `float` > 0.0"),
        ('{"metadata": {"gap_seconds": 1}, "data": [1, -1]}', "t: data[1]: expected `int` >= 0"),
        ("{", "t: not JSON: "),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text.encode(), "t")

    assert caught.value.what.startswith(where)
    assert caught.value.help


def test_a_trace_of_configs_is_found_by_its_name_and_a_file_of_that_name_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InfiniteHBD's: 584 faults of 231 of 400 servers in 348 days, of which two began while another lasted."""
    monkeypatch.chdir(tmp_path)
    trace = read("infinitehbd-400")
    assert (trace.name, trace.n_nodes, trace.n_losses, trace.length_s // DAY_S) == ("infinitehbd-400", 400, 582, 348)
    assert len({change.node for change in trace.changes}) == 231

    (tmp_path / "infinitehbd-400").write_text("0,0,lost\n10,0,returned\n")
    assert read("infinitehbd-400").n_nodes == 1


def test_a_file_that_is_none_is_one_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=str(path)):
            read(str(path))


def check(data: bytes) -> None:
    """A sound trace, or the one error."""
    try:
        trace = parse(data, "t")
    except UsageError as error:
        what = error.what
        trace = None
    if trace is None:
        assert what.startswith("t: ") and "\n" not in what
        return
    assert [change.at_s for change in trace.changes] == sorted(change.at_s for change in trace.changes)
    state = {node: node not in trace.away for node in range(trace.n_nodes)}
    for change in trace.changes:
        assert 0 <= change.at_s <= trace.length_s
        assert state[change.node] is (change.kind is not NodeEventKind.RETURNED)
        state[change.node] = change.kind is not NodeEventKind.LOST
    assert sum(map(len, at_once(trace.changes))) == len(trace.changes)


@settings(max_examples=examples(150))
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='0123456789,.-e\n"[]{}: addremovlst', max_size=60).map(str.encode)))
def test_any_bytes_are_a_trace_or_one_error(data: bytes) -> None:
    check(data)


@settings(max_examples=examples(200))
@given(data=st.data())
def test_any_change_of_a_good_trace_is_a_trace_or_one_error(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(GOOD))
    check(good)
    at = data.draw(st.integers(0, len(good)))
    other = data.draw(
        st.one_of(st.binary(max_size=4), st.sampled_from([b"-", b"1e999", b"null", b"\n", b",", b"9" * 30, b"nan"]))
    )
    check(good[:at] + other + good[at + data.draw(st.integers(0, 8)) :])


# -- drawn ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_drawn_traces_are_sound_and_the_seed_says_which(name: str) -> None:
    failures = Failures(32, 30 * 86400.0, 3600.0, 7200.0, 0.3, seed=1)
    trace = GENERATORS[name](failures)

    assert trace == GENERATORS[name](failures)
    assert trace.changes != GENERATORS[name](Failures(32, 30 * 86400.0, 3600.0, 7200.0, 0.3, seed=2)).changes
    state = dict.fromkeys(range(32), True)
    for change in trace.changes:
        assert state[change.node] is (change.kind is not NodeEventKind.RETURNED)
        state[change.node] = change.kind is not NodeEventKind.LOST
    failed = sum(change.kind is NodeEventKind.FAILED for change in trace.changes)
    assert failed / trace.n_losses == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("name", "deviation"), [("exponential", 1.0), ("weibull", 1.757)])
def test_gaps_have_the_mean_and_the_spread_that_they_are_to_have(name: str, deviation: float) -> None:
    trace = GENERATORS[name](Failures(10_000, 4000 * 3600.0, 3600.0, 60.0, 0.0, seed=7))
    times = [change.at_s for change in trace.changes if change.kind is NodeEventKind.LOST]
    gaps = [b - a for a, b in pairwise(times)]

    assert mean(gaps) == pytest.approx(3600, rel=0.06)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(deviation, rel=0.08)
    assert SHAPE == 0.6


def test_correlated_losses_take_neighbours_along() -> None:
    trace = GENERATORS["correlated"](Failures(64, 1000 * 3600.0, 3600.0, 60.0, 0.0, seed=7))
    incidents = [group for group in at_once(trace.changes) if group[0].kind is NodeEventKind.LOST]

    assert all(len({change.node // 8 for change in group}) == 1 for group in incidents)
    assert mean(map(len, incidents)) == pytest.approx(2.1, abs=0.15)
