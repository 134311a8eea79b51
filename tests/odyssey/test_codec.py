"""Bytes from outside: whatever is wrong with them is one error, and what we write ourselves is read as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.cluster import questions, wire
from launcher.joblog import events
from launcher.joblog.events import Event, Note
from launcher.planning import precompute
from odyssey import codec
from odyssey.codec import Json, Malformed, Packed
from odyssey.errors import PlanError
from odyssey.plan import plan
from odyssey.protocol import orders, reports
from odyssey.protocol.frames import Deframer, frame
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position, Result
from odyssey.zygote import protocol
from perfmodel.profile.profile import Profile
from tests.examples import examples
from tests.odyssey.any_value import values_of

PACKED = [
    wire.FirstWords,
    questions.Question,
    questions.Answer,
    wire.FromMember,
    wire.FromLeader,
    reports.Report,
    orders.Command,
    protocol.Answer,
    precompute.Answer,
]
SPOKEN = [Event, Profile, plan.Plan]
lenient = settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def deep(opening: bytes) -> bytes:
    return opening * 100_000


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: getattr(kind, "__name__", str(kind)[:40]))
@lenient
@given(data=st.data())
def test_whatever_is_wrong_with_msgpack_is_malformed(kind: Any, data: st.DataObject) -> None:
    decoder = Packed(kind)
    whole = msgspec.msgpack.encode(data.draw(values_of(kind)))
    assert msgspec.msgpack.encode(decoder.decode(whole)) == whole
    _reads_or_refuses(decoder, _spoiled(data, whole))


@pytest.mark.parametrize("kind", SPOKEN, ids=lambda kind: kind.__name__)
@lenient
@given(data=st.data())
def test_whatever_is_wrong_with_json_is_malformed(kind: Any, data: st.DataObject) -> None:
    whole = codec.to_json(data.draw(values_of(kind)))
    _reads_or_refuses(Json(kind), _spoiled(data, whole))


def _reads_or_refuses(decoder: Packed | Json, data: bytes) -> None:
    why = ""
    try:
        decoder.decode(data)
    except Malformed as error:
        why = str(error)
    assert "\n" not in why
    assert len(why) < 400


def _spoiled(data: st.DataObject, whole: bytes) -> bytes:
    """Cut, turned over somewhere, with something put in, or made up."""
    where = data.draw(st.integers(0, len(whole) - 1))
    put = data.draw(st.binary(max_size=6))
    return data.draw(st.sampled_from([whole[:where], whole[:where] + put + whole[where + len(put) :], whole + put, put]))


TYPE_TOLD = b"\x82\xa4type\xa4Told"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        TYPE_TOLD + b"\xa4text\xa2\xff\xfe",
        TYPE_TOLD + b"\xa4more" + deep(b"\x91"),
        TYPE_TOLD + b"\xa4text\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xabTakeSamples\xa5ranks\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode(wire.Signal(9999)),
        msgspec.msgpack.encode(wire.DrillRank(0, -1)),
        msgspec.msgpack.encode(wire.Welcome(-1, 0, "", 1, "", "")),
        msgspec.msgpack.encode(wire.JobIsOver(1 << 40, "", "")),
        msgspec.msgpack.encode(wire.Join(b"t" * 16, "v", "", "a\x1b[2Jb", 1, 1, "", None, "", 1)),
        msgspec.msgpack.encode(wire.Join(b"t" * 16, "v", "", "host", 1, 1 << 60, "", None, "", 1)),
        msgspec.msgpack.encode(wire.Happened(1, events.RankStarted(0, -1, 0))),
        msgspec.msgpack.encode(reports.OpTimes(1, (reports.OpTime("F", 0, 1 << 60, 1, 0.1),))),
        msgspec.msgpack.encode(
            {"type": "step_committed", "rank": 0, "generation": 1, "n_samples": 1, "unit_s": 0.1,
             "result": {"position": (0, 0, 0), "kind": "load", "values": [math.inf]}}
        ),
    ],
)  # fmt: skip
def test_frames_that_would_end_whoever_acts_on_them_are_malformed(body: bytes) -> None:
    for kind in (wire.FromMember | wire.FromLeader, reports.Report):
        with pytest.raises(Malformed):
            Packed(kind).decode(body)


@given(lengths=st.lists(st.integers(0, 300), max_size=8), cut=st.integers(1, 400), limit=st.integers(16, 200))
def test_a_frame_beyond_the_limit_is_refused_before_it_has_come(lengths: list[int], cut: int, limit: int) -> None:
    frames = [frame(wire.Notice("x" * length)) for length in lengths]
    stream = b"".join(frames)
    deframer = Deframer(wire.FromMember, limit)
    expected = []
    for message, length in zip(frames, lengths, strict=True):
        if len(message) - 4 > limit:
            break
        expected.append(length)
    got: list[int] = []
    why = ""
    try:
        for start in range(0, len(stream), cut):
            for message in deframer.feed(stream[start : start + cut]):
                got.append(len(message.text))
            assert len(deframer._buffer) <= limit + 4
    except Malformed as error:
        why = str(error)
        assert not deframer._buffer
    assert got == expected
    assert ("frame of" in why) == (len(expected) < len(lengths))


def test_what_a_stranger_claims_to_send_is_not_waited_for() -> None:
    deframer = Deframer(wire.Join, 1 << 16)
    with pytest.raises(Malformed, match="4294967295 bytes"):
        list(deframer.feed(b"\xff\xff\xff\xff"))


def test_text_for_people_obeys_no_terminal_and_has_an_end() -> None:
    assert codec.for_people("a\x1b[2Jb\r\x07\u202ec\nd\te", 100) == "a\\x1b[2Jb\\r\\x07\\u202ec\nd\te"
    assert codec.for_people("x" * 12, 10) == "x" * 10 + " … (2 more characters)"


# -- what we write ourselves -------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Equal, and every float the same one: its sign, and NaN too."""
    return repr(msgspec.to_builtins(one)) == repr(msgspec.to_builtins(other))


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("kind", events.Body.__args__, ids=lambda kind: kind.__name__)
@lenient
@given(data=st.data())
def test_every_event_is_read_as_it_was_written(kind: Any, data: st.DataObject) -> None:
    event = Event(data.draw(values_of(float)), 1, "agent", data.draw(values_of(kind)))
    line = events.encode(event)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    json.loads(line, parse_constant=refuse)
    assert same(events.decode(line), event)


@lenient
@given(values_of(plan.Plan))
def test_every_plan_is_read_as_it_was_written(written: plan.Plan) -> None:
    assert same(plan.decode(plan.encode(written)), written)


@lenient
@given(values_of(Profile))
def test_every_profile_is_read_as_it_was_written(written: Profile) -> None:
    assert same(Json(Profile).decode(codec.to_json(written)), written)


@given(st.floats())
@example(math.nan)
@example(math.inf)
@example(-math.inf)
@example(-0.0)
@example(5e-324)
def test_every_loss_is_read_as_it_was_written(loss: float) -> None:
    event = Event(1.5, 1, "rank 0", Committed(0, 1, Result(Position(3, 0), "step", (loss, 0.0)), 8, 0.1))
    assert same(events.decode(events.encode(event)), event)


def test_a_loss_that_is_no_number_is_spelled_out() -> None:
    event = Event(1.5, 1, "rank 0", Committed(0, 1, Result(Position(3, 0), "step", (math.nan, -math.inf)), 8, 0.1))
    assert json.loads(events.encode(event))["body"]["result"]["values"] == ["NaN", "-Infinity"]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "null", "1"])
def test_text_stays_text(word: str) -> None:
    event = Event(1.5, 1, word, Note(word))
    assert events.decode(events.encode(event)) == event


@pytest.mark.parametrize("line", [b'{"generation": "\xff"}', deep(b"["), '"\ud800"', b"[]", b""])
def test_a_line_that_is_no_event_is_malformed(line: bytes | str) -> None:
    with pytest.raises(Malformed):
        events.decode(line)


@pytest.mark.parametrize("text", [b"\xff\xfe", b'{"generation": ' + deep(b"["), b"null"])
def test_a_file_that_is_no_plan_is_a_plan_error(text: bytes) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        plan.decode(text)
