"""Hosts that come to a job are compared before it begins: who is bad is left out as long as there are enough others.

Pure. An agent that has come waits until it is decided, which is when enough good ones are here, or nobody more is waited for.
Who comes later is compared with those that are there. Where another agent comes to lead, the members tell it how their hosts
are, and who else comes waits for that.
"""

from __future__ import annotations

from launcher.cluster.wire import Join
from launcher.host.fitness.findings import HostReport
from launcher.host.fitness.judgement import Finding, Level, bad_hosts, judge, labels

NOT_YET = "all hosts are compared first"
NO_REPORT = "it was not checked: give --check to all agents"


class HostComparison:
    """`own`: of the leading agent's host, which cannot be left out; `least`: agents that the job needs."""

    def __init__(self, own: HostReport, least: int) -> None:
        self._own = own
        self._least = least
        self.joins: dict[bytes, Join] = {}
        """What all other agents that are here have said, by their sessions, in the order in which they came."""
        self.is_decided = False
        self._found: list[Finding] | None = None
        """None until those that are here now have been compared."""

    def add(self, join: Join) -> None:
        """It has come, or asks again."""
        if join.session not in self.joins:
            self.joins[join.session] = join
            self._found = None

    def remove(self, session: bytes) -> None:
        """It is gone."""
        if self.joins.pop(session, None) is not None:
            self._found = None

    def _reports(self) -> list[HostReport]:
        return [self._own, *(_report_of(join) for join in self.joins.values())]

    def _findings(self) -> list[Finding]:
        if self._found is None:
            self._found = judge(self._reports())
        return self._found

    def _bad(self) -> dict[bytes, str]:
        """Other agents with a bad host, and why it is."""
        bad, tokens = bad_hosts(self._findings()), list(self.joins)
        return {tokens[at - 1]: why for at, why in bad.items() if at > 0}

    @property
    def n_good(self) -> int:
        """How many the job could begin with, the leading one among them; 0 as long as it is unclear who is wrong."""
        if any(finding.level is Level.BAD and finding.at is None for finding in self._findings()):
            return 0
        return 1 + len(self.joins) - len(self._bad())

    def why_not(self, token: bytes) -> str:
        """Why this agent has no place yet; empty if it may have one."""
        if not self.is_decided:
            return NOT_YET
        bad = self._bad()
        n_needed = max(0, self._least - (1 + len(self.joins) - len(bad)))
        if token not in bad or token in [its for its in self.joins if its in bad][:n_needed]:
            return ""
        return f"its host is left out: {bad[token]}"

    def verdict(self) -> list[str]:
        """For people: what is bad, and what becomes of it."""
        names, tokens = labels(self._reports()), [b"", *self.joins]
        lines = []
        for finding in self._findings():
            if finding.level is not Level.BAD:
                continue
            if finding.at is None:
                lines.append(f"check: {finding.what}; the job goes on with them ({finding.help})")
            elif finding.at == 0 or not self.why_not(tokens[finding.at]):
                end = "it leads the job" if finding.at == 0 else "there are too few others"
                lines.append(f"check: {names[finding.at]}: {finding.what}; the job goes on with it, as {end} ({finding.help})")
            else:
                lines.append(f"check: {names[finding.at]}: {finding.what} ({finding.help})")
        return lines or [f"check: {len(names)} host{'s' if len(names) > 1 else ''}: all good"]


def _report_of(join: Join) -> HostReport:
    return join.report if join.report is not None else HostReport(join.host, join.n_ranks, problem=NO_REPORT)
