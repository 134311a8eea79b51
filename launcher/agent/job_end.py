"""How a job ends: with an exit code, the reason in its last line of log, and nobody left."""

from __future__ import annotations

import signal

from launcher.agent.drills import Faults
from launcher.agent.part import Part
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.quorum import Quorum
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.joblog.events import JobEnded
from launcher.joblog.exit_codes import SIGNALS

MEMBERS_S = 5.0
"""For other agents, beyond the shutdown time-out of their ranks, to be gone."""


class JobEnd:
    """`hangs`, `stalls`, `faults`: what goes on beside the ranks until then."""

    def __init__(
        self,
        part: Part,
        cluster: Cluster,
        quorum: Quorum,
        hangs: JobHangs,
        stalls: StallWatch,
        faults: Faults,
    ) -> None:
        self._local, self._log, self._agreement = part.local, part.log, part.agreement
        self._cluster = cluster
        self._quorum = quorum
        self._hangs = hangs
        self._stalls = stalls
        self._faults = faults
        self.signal = signal.SIGTERM
        """What ranks are ended with: the signal that ends the job."""
        self._why = ("", "")

    def tell_why(self, ended: JobEnded) -> None:
        """Before the last line of the log."""
        self._why = (ended.reason, ended.help)
        if ended.code <= SIGNALS:  # else the user knows
            self._faults.tell_never_fired()
        self._log.hand_on(ended)

    def begin(self, code: int) -> None:
        """The log has ended: end all that is left. Members that are told to end hear of no entry any more."""
        if self._agreement is not None:
            self._agreement.tell()
        self.apart(code)
        self._cluster.end(self.signal, code, *self._why, self._log.retold())
        self._local.loop.later(self._local.options.shutdown_timeout_s + MEMBERS_S, self._cluster.leave_members)

    def apart(self, code: int) -> None:
        """For this agent alone: another one leads."""
        self._local.code = code
        self._quorum.end()
        self._hangs.stop()
        self._stalls.close()
        self._faults.end()
