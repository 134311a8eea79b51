"""What a member tells again to who leads anew: all that may be lost, in words that will be heard."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from launcher.cluster.led.reported import Reported
from launcher.cluster.wire import MAX_FIRST_BYTES, Attach, FromRank, Happened, Stopped
from launcher.joblog.events import Cause, CauseKind, Diagnostics, RankLost, RankStarted
from odyssey.protocol.reports import Committed, Failed, Finished, Hello, Paused
from odyssey.protocol.units import Position, Result
from tests.launcher.coordinator.talk import model


def unit(step: int, process: int, unit_in_step: int = 0, n_loads: int = 0) -> FromRank:
    result = Result(Position(step, unit_in_step, n_loads), "step", (0.0, 0.0))
    return FromRank(process, Committed(process - 10, 1, result, 8, 0.1))


def positions(reported: Reported) -> list[Position]:
    return [message.report.result.position for message in reported.said() if isinstance(message.report, Committed)]


def test_units_are_told_by_a_rank_that_lives_those_that_are_final_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.cluster.led.reported.MAX_OLD", 1)
    reported = Reported()
    for rank in (0, 1):
        reported.spawned(rank, 10 + rank)
        reported.happened(RankStarted(rank, 100 + rank, 0))
    for step in range(4):
        reported.reported(1, unit(step, 11))
        reported.reported(0, unit(step, 10))
    reported.is_final(Position(0, 0))
    reported.is_final(Position(1, 0))
    reported.happened(RankLost(1, Cause(CauseKind.SIGNAL, "SIGKILL"), False))
    said = list(reported.said())
    assert positions(reported) == [Position(step, 0) for step in (1, 2, 3)]
    assert {(message.process, message.report.rank) for message in said if isinstance(message.report, Committed)} == {(10, 0)}
    reported.happened(RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False))
    assert list(reported.said()) == [], "nobody would hear of ranks that are gone"


def test_of_final_units_those_are_told_that_an_idle_rank_may_still_have_to_pass() -> None:
    """Of a load that goes back, and of what is behind that, as well. When a generation runs all ranks are at one."""
    reported = Reported()
    for rank in (0, 1):
        reported.spawned(rank, 10 + rank)
    for step in (5, 6):
        reported.reported(0, unit(step, 10))
        reported.is_final(Position(step, 0))
    load = Result(Position(7, 0), "load_state_dict", (6.0,))
    reported.reported(0, FromRank(10, Committed(0, 1, load, 0, 0.1)))
    reported.reported(0, unit(6, 10, 1, 1))
    for step in (5, 6):
        reported.reported(1, unit(step, 11))
    told = [Position(5, 0), Position(6, 0), Position(7, 0), Position(6, 1, 1)]
    assert positions(reported) == told
    reported.is_final(load.position)
    assert positions(reported) == told, "the last one is not in the log, though its step is an earlier one"
    again = unit(7, 10, 0, 1)
    reported.reported(0, replace(again, report=replace(again.report, generation=2)))
    reported.began(2)
    assert positions(reported) == [Position(7, 0, 1)]
    reported.is_final(Position(7, 0, 1))
    assert positions(reported) == [Position(7, 0, 1)]


def test_what_other_agents_ranks_have_passed_is_behind_all_that_was_told_here() -> None:
    reported = Reported()
    reported.spawned(0, 10)
    reported.reported(0, unit(2, 10))
    reported.is_final(Position(4, 0))
    reported.reported(0, unit(3, 10))
    assert positions(reported) == [Position(2, 0), Position(3, 0)]


def test_what_only_ranks_that_are_lost_have_passed_is_void_when_others_have_gone_on() -> None:
    """They do it again, and whoever leads next must not hear that it had been final."""
    reported = Reported()
    reported.spawned(0, 10)
    reported.reported(0, unit(3, 10))
    reported.happened(RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False))
    reported.spawned(0, 11)
    reported.began(1)
    assert [message.process for message in reported.said()] == [11], "it is of the generation that runs"
    reported.began(2)
    assert list(reported.said()) == []


def test_what_ranks_left_behind_is_cut_to_what_first_words_may_hold() -> None:
    reported = Reported()
    for rank in range(16):
        reported.spawned(rank, rank)
        left = Diagnostics(error="E" * 10_000_000 + "end", traceback="T" * 100_000, last_lines="short")
        reported.reported(rank, FromRank(rank, Failed(rank, "E" * 10_000_000, "help", "T" * 10_000_000)))
        reported.happened(RankLost(rank, Cause(CauseKind.SIGNAL, "SIGKILL"), False, left))
    for message in reported.told():
        if isinstance(message, FromRank):
            assert isinstance(message.report, Failed) and message.report.help == "help"
        else:
            assert isinstance(message, Happened) and isinstance(message.event, RankLost)
            assert message.event.diagnostics.error.endswith("Eend") and message.event.diagnostics.last_lines == "short"
    assert len(reported.told()) == 32
    assert len(msgspec.msgpack.encode(Attach(b"t" * 16, 1, reported.told()))) < MAX_FIRST_BYTES


def test_a_process_is_told_of_in_the_order_in_which_it_went() -> None:
    """What it said last counts before its end, and only then: of one that lives it is said again, whole, behind this."""
    reported = Reported()
    begun, lost = RankStarted(0, 100, 0), RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False)
    reported.spawned(0, 10)
    reported.happened(begun)
    reported.reported(0, FromRank(10, Hello(0, model(), 1)))
    reported.reported(0, ended := FromRank(10, Finished(0, Position(3, 0))))
    reported.stopped(0, True)
    assert reported.told() == (Happened(10, begun), Stopped(10, True))
    reported.stopped(0, False)
    reported.happened(lost)
    assert reported.told() == (Happened(10, begun), ended, Happened(10, lost))


def test_the_start_and_the_end_of_a_process_are_kept() -> None:
    reported = Reported()
    reported.spawned(0, 10)
    reported.happened(started := RankStarted(0, 100, 0))
    assert reported.starts(10) == [started] and reported.starts(9) == reported.ends(10) == []
    reported.happened(lost := RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False))
    assert reported.ends(10) == [lost] and reported.ends(9) == []


def test_what_holds_for_good_is_told_of_the_present_process_only() -> None:
    reported = Reported()
    reported.spawned(0, 10)
    reported.reported(0, FromRank(10, Finished(0, Position(3, 0))))
    reported.reported(0, FromRank(10, Paused(0, 1, Position(0, 0), "compute", ())))
    assert [message.report for message in reported.said()] == [Finished(0, Position(3, 0))]
    reported.reported(0, again := FromRank(10, Hello(0, model(), 2)))
    assert list(reported.said()) == [again], "the end of a Job before is none of the one that follows"
    reported.spawned(0, 12)
    assert list(reported.said()) == []
    assert reported.number(0) == 12 and reported.told() == ()
