"""Whether and when a script starts again: the policy against its rules. Whole stories of it are in conversations/."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.restart_policy import (
    GiveUp,
    Past,
    Policy,
    Restart,
    SlotLoss,
    backoff_s,
    decide,
    made_progress,
    why_retired,
)
from launcher.failures.root_cause import RankEnd
from launcher.joblog.events import Cause, CauseKind

EXIT = RankEnd(0, 1.0, Cause(CauseKind.EXIT, "exit code 3", 3))
KILL = RankEnd(0, 1.0, Cause(CauseKind.SIGNAL, "SIGKILL", -9))
CRASH = RankEnd(0, 1.0, Cause(CauseKind.SIGNAL, "SIGSEGV", -11))
MEMORY = RankEnd(0, 1.0, Cause(CauseKind.OUT_OF_MEMORY, "killed for want of memory", -9))
DRILL = RankEnd(0, 1.0, Cause(CauseKind.DRILL, "SIGKILL by drill", -9))
BROKEN = RankEnd(0, 1.0, Cause(CauseKind.EXIT, "exit code 1", 1), error="RuntimeError: Connection closed by peer [::1]:7")


def error(text: str) -> RankEnd:
    return RankEnd(0, 1.0, Cause(CauseKind.EXIT, "exit code 1", 1), error=text)


FIRST = Past()


def ask(
    cause: RankEnd | None, policy: Policy, past: Past = FIRST, n: int = 0, now: float = 0.0, progress: bool = False
) -> Restart | GiveUp:
    ends = {cause.rank: cause} if cause is not None else {}
    return decide(policy, past, n, now, ends, cause, had_progress=progress)


def twice(first: RankEnd, second: RankEnd, *, progress: bool = False) -> Restart | GiveUp:
    policy = Policy(9)
    once = ask(first, policy)
    assert isinstance(once, Restart) and once.wait_s == 0
    return ask(second, policy, once.past, 1, 1.0, progress)


@pytest.mark.parametrize("cause", [EXIT, CRASH, MEMORY, error("KeyError: 7")])
def test_the_scripts_own_failure_twice_before_any_progress_is_given_up(cause: RankEnd) -> None:
    answer = twice(cause, cause)
    assert isinstance(answer, GiveUp) and "the same failure came twice" in answer.why
    assert isinstance(twice(cause, cause, progress=True), Restart)


@pytest.mark.parametrize("cause", [KILL, DRILL, BROKEN])
def test_what_comes_from_outside_is_never_the_same_failure(cause: RankEnd) -> None:
    answer = twice(cause, cause)
    assert isinstance(answer, Restart) and answer.wait_s == 1.0


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (error("IndexError: 17 at 0x7f3a"), error("IndexError: 4 at 0x11"), True),
        (error("KeyError: 'a'"), error("KeyError: 'b'"), False),
        (error("KeyError: 'a'"), EXIT, False),
        (EXIT, RankEnd(1, 2.0, Cause(CauseKind.EXIT, "exit code 3", 3)), True),
        (EXIT, RankEnd(0, 2.0, Cause(CauseKind.EXIT, "exit code 4", 4)), False),
        (CRASH, KILL, False),
    ],
)
def test_failures_are_the_same_by_their_text_without_numbers_and_their_code(
    first: RankEnd, second: RankEnd, same: bool
) -> None:
    assert isinstance(twice(first, second), GiveUp) is same


def test_a_lost_agent_is_no_failure_of_the_script() -> None:
    answer = ask(None, Policy(1), Past(signature="exit 3"))
    assert isinstance(answer, Restart) and answer.past.signature is None


def test_exit_codes_that_are_never_retried_count_on_every_rank_that_failed_by_itself() -> None:
    policy = Policy(9, never_retry=(3,))
    assert isinstance(ask(EXIT, policy), GiveUp)
    victim = RankEnd(1, 1.0, Cause(CauseKind.ENDED, "ended with the others, exit code 3", 3))
    both = decide(policy, Past(), 0, 0.0, {0: KILL, 1: victim}, KILL, had_progress=False)
    assert isinstance(both, Restart)


@given(
    n_allowed=st.integers(1, 4),
    window_s=st.floats(1, 100),
    gaps=st.lists(st.floats(0, 60), min_size=1, max_size=30),
    restarts=st.integers(0, 40),
)
def test_no_window_holds_more_restarts_than_are_allowed(
    n_allowed: int, window_s: float, gaps: list[float], restarts: int
) -> None:
    """Against a count by brute force over every window that ends with a restart."""
    policy = Policy(restarts, limit=(n_allowed, window_s))
    past, now, times = Past(), 0.0, []
    for n, gap in enumerate(gaps):
        now += gap
        answer = ask(KILL, policy, past, n, now, progress=True)
        full = sum(time > now - window_s for time in times) >= n_allowed
        if isinstance(answer, GiveUp):
            assert full or n >= restarts
            return
        assert not full and n < restarts
        times.append(now)
        past = answer.past
    for end in times:
        assert sum(end - window_s < time <= end for time in times) <= n_allowed


@given(st.lists(st.booleans(), max_size=40))
def test_pauses_grow_while_nothing_comes_of_it_and_start_anew_after_progress(progress: list[bool]) -> None:
    past, in_row = Past(), 0
    for n, made in enumerate(progress):
        answer = ask(KILL, Policy(1000, backoff_s=2.0), past, n, progress=made)
        assert isinstance(answer, Restart)
        in_row = 0 if made else in_row
        assert answer.wait_s == (0.0 if in_row == 0 else min(300.0, 2.0 * 2 ** (in_row - 1)))
        assert bool(answer.why_wait) == (answer.wait_s > 0)
        in_row += 1
        past = answer.past


def test_a_pause_is_never_longer_than_five_minutes() -> None:
    assert backoff_s(1.0, 5000) == 300.0 and backoff_s(0.0, 7) == 0.0


def test_silence_is_progress_after_a_minute_only_if_the_script_never_gives_a_sign() -> None:
    assert made_progress(told=True, gives_signs=True, ran_s=0.1)
    assert made_progress(told=False, gives_signs=False, ran_s=61.0)
    assert not made_progress(told=False, gives_signs=False, ran_s=59.0)
    assert not made_progress(told=False, gives_signs=True, ran_s=6000.0)


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=6),
    st.one_of(st.none(), st.tuples(st.integers(0, 9), st.floats(1, 1000))),
)
def test_a_slot_is_retired_after_three_losses_in_vain_or_within_the_window(
    told: list[tuple[float, bool]], limit: tuple[int, float] | None
) -> None:
    losses = [SlotLoss(time, in_vain) for time, in_vain in sorted(told)]
    why = why_retired(Policy(9, limit=limit), losses)
    newest = losses[-3:]
    is_in_vain = len(newest) == 3 and not any(not loss.in_vain for loss in newest)
    is_often = limit is not None and len([loss for loss in newest if loss.time > losses[-1].time - limit[1]]) == 3
    assert bool(why) == (is_in_vain or is_often)
    assert ("in a row" in why) == is_in_vain
