"""Whether all ranks of a script start again after a failure, and when: the policy, without processes and clocks.

In this order: a slot that is gone, exit codes that are never retried, the same failure twice before any progress, the count,
the limit in a window of time. Then a pause, where the last attempt came to nothing either.

Single ranks of a Job start again, and one slot that is bad must not use up what is allowed for all: it is retired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from launcher.failures.root_cause import Ends, FailureKind, RankEnd, signature

LONGEST_BACKOFF_S = 300.0
UNTOLD_PROGRESS_S = 60.0
"""An attempt that ran longer than this has made progress, if the script gives no sign of any, ever."""


LOSSES_OF_A_SLOT = 3
"""So many in vain, one after the other, or within the window of the limit, and nothing is started there any more."""


class Policy(msgspec.Struct, frozen=True):
    """As asked for on the command line, see RunOptions."""

    max_restarts: int = 0
    never_retry: tuple[int, ...] = ()
    limit: tuple[int, float] | None = None
    backoff_s: float = 1.0
    retries_same_failure: bool = False


class Past(msgspec.Struct, frozen=True):
    """What earlier failures mean for the next decision. `times`: of all restarts. `n_in_row`: how many since the last progress.

    `signature`: of the last failure, where no progress came before it; None if there was none, or it may not come again.
    """

    times: tuple[float, ...] = ()
    n_in_row: int = 0
    signature: str | None = None


class Restart(msgspec.Struct, frozen=True):
    """All ranks start again after `wait_s`. `why_wait`: for people, empty where there is no wait."""

    past: Past
    wait_s: float
    why_wait: str


class GiveUp(msgspec.Struct, frozen=True):
    """`why` follows the failure's own words; empty where they say everything."""

    why: str
    help: str = ""


def decide(
    policy: Policy, past: Past, n_restarts: int, now: float, ends: Ends, root: RankEnd | None, *, had_progress: bool
) -> Restart | GiveUp:
    """After an attempt whose ranks are all gone. `root` is None where agents were lost and no rank failed."""
    if policy.max_restarts == 0:
        return GiveUp("")
    never = sorted(
        e.status for e in ends.values() if e.kind is not FailureKind.ENDED and e.status in policy.never_retry and e.status
    )
    if never:
        return GiveUp(
            f"exit code {never[0]} is never retried", f"--never-retry {','.join(map(str, policy.never_retry))} says so"
        )
    same = signature(root) if root is not None and not had_progress else None
    if same is not None and same == past.signature and not policy.retries_same_failure:
        return GiveUp(
            "the same failure came twice with no step in between; restarting again would not help",
            "mend the script, or, if it may go well the next time, run with --retry-same-failure",
        )
    if n_restarts >= policy.max_restarts:
        return GiveUp(f"{n_restarts} of {policy.max_restarts} restarts used")
    if policy.limit is not None and _n_allowed_now(policy, past, now) <= 0:
        n_allowed, window_s = policy.limit
        return GiveUp(f"{n_allowed} restarts within {window_s:g} s, no more are allowed by --restart-limit")
    n_in_row = 0 if had_progress else past.n_in_row
    wait_s = backoff_s(policy.backoff_s, n_in_row)
    why_wait = f"{_ordinal(n_in_row + 1)} restart in a row without progress" if wait_s else ""
    return Restart(replace(counted(past, now), n_in_row=n_in_row + 1, signature=same), wait_s, why_wait)


def after_progress(past: Past) -> Past:
    """A step has been made since the last failure: what comes now is another one."""
    return past if past.signature is None and past.n_in_row == 0 else replace(past, signature=None, n_in_row=0)


def counted(past: Past, now: float) -> Past:
    """After a restart at `now`."""
    return replace(past, times=(*past.times, now))


def _n_allowed_now(policy: Policy, past: Past, now: float) -> float:
    """How many restarts the limit in a window of time leaves."""
    if policy.limit is None:
        return math.inf
    n_allowed, window_s = policy.limit
    return n_allowed - sum(time > now - window_s for time in past.times)


class SlotLoss(msgspec.Struct, frozen=True):
    """A rank was lost, and not its slot. `in_vain`: no unit became final from when its process took part."""

    time: float
    in_vain: bool


def why_retired(policy: Policy, losses: Sequence[SlotLoss]) -> str:
    """Why nothing is to be started any more in a slot that these were lost in, the newest last; empty if something is."""
    newest = losses[-LOSSES_OF_A_SLOT:]
    if len(newest) < LOSSES_OF_A_SLOT:
        return ""
    if all(loss.in_vain for loss in newest):
        return f"lost {len(newest)} times in a row before it took part in a step"
    if policy.limit is not None and newest[-1].time - newest[0].time < policy.limit[1]:
        return f"lost {len(newest)} times within {policy.limit[1]:g} s (--restart-limit)"
    return ""


def backoff_s(first_s: float, n_in_row: int) -> float:
    """None before the first of a row of restarts without progress, then `first_s`, doubling."""
    if n_in_row == 0:
        return 0.0
    return float(min(LONGEST_BACKOFF_S, first_s * 2.0 ** min(n_in_row - 1, 64)))


def made_progress(*, told: bool, gives_signs: bool, ran_s: float) -> bool:
    """`told`: a step or heartbeat in this attempt; `gives_signs`: in any attempt, so that silence means something."""
    return told or (not gives_signs and ran_s > UNTOLD_PROGRESS_S)


def _ordinal(number: int) -> str:
    """`second`, `11th`, `22nd`."""
    words = {1: "first", 2: "second", 3: "third"}
    if number in words:
        return words[number]
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


@dataclass(slots=True)
class Restarts:
    """The restarts of a job.
    They are what is allowed, what came of earlier failures, how many there were, and why there was the last one of all
    ranks."""

    policy: Policy = field(default_factory=Policy)
    past: Past = field(default_factory=Past)
    n: int = 0
    last_failure: str = ""

    def may_respawn(self, now: float) -> bool:
        """Whether a single rank of a Job may be started again: the count and the limit are the job's, the rest does not fit."""
        return self.n < self.policy.max_restarts and _n_allowed_now(self.policy, self.past, now) > 0

    def judge(self, now: float, ends: Ends, root: RankEnd | None, *, had_progress: bool) -> Restart | GiveUp:
        """`decide` for this job now."""
        return decide(self.policy, self.past, self.n, now, ends, root, had_progress=had_progress)

    def take(self, decision: Restart) -> None:
        """A restart that was decided is counted."""
        self.n += 1
        self.past = decision.past

    def take_respawn(self, now: float) -> None:
        """Single ranks of a Job are started again: one restart."""
        self.n += 1
        self.past = counted(self.past, now)

    def take_back(self, n: int) -> None:
        """All ranks start again where single ones have failed, so many: what was counted of each is counted of all instead."""
        if n:
            past, self.n = self.past, self.n - n
            self.past = Past(past.times[:-n], max(0, past.n_in_row - n))
