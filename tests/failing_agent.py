"""`odyssey run`, of which the agent fails by a bug: the first unit that it hears of while it leads is one too many."""

from __future__ import annotations

import sys

from launcher.agent.agent import Agent
from launcher.joblog.event_sink import Sender
from odyssey.protocol.reports import Committed, Report
from odyssey_cli.__main__ import main

heard = Agent.heard


def fail(agent: Agent, sender: Sender, report: Report) -> None:
    if isinstance(report, Committed):
        raise KeyError("a bug")
    heard(agent, sender, report)


if __name__ == "__main__":
    Agent.heard = fail  # type: ignore[method-assign]
    sys.exit(main())
