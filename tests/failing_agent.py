"""`odyssey run`, of which the agent fails by a bug: the first report of a rank that it hears while it leads is one too many."""

from __future__ import annotations

import sys

from launcher.agent.agent import Agent
from odyssey_cli.__main__ import main


def heard(agent: Agent, sender: object, report: object) -> None:
    raise KeyError("a bug")


if __name__ == "__main__":
    Agent.heard = heard  # type: ignore[method-assign,assignment]
    sys.exit(main())
