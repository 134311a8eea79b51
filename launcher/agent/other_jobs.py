"""What becomes of an agent that leads when it hears of another one that leads a job of the same run id, or its own."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.cluster.leading.redirects import LedElsewhere
from launcher.cluster.links.connect import Address
from launcher.joblog.events import StopRequested
from launcher.joblog.exit_codes import ExitCode
from launcher.processes.local_agent import LocalAgent


def joins(local: LocalAgent, address: Address, others: Sequence[Address] = (), *, was_in: bool) -> None:
    """It becomes an agent that another one leads: it has begun no job, or (`was_in`) its own goes on with `others` in it."""
    if local.code is None:
        local.fail(LedElsewhere(address, others, was_in=was_in))
        local.code = ExitCode.FAILED


def is_younger(local: LocalAgent, address: Address) -> None:
    """Two jobs have begun, each where nobody of the other could be heard, and the one that is led there did first."""
    what = f"an older job of this --rdzv-id is led at {address}, so this one ends"
    local.sink.event(StopRequested(what, ExitCode.FAILED, "start its agents again: they join the other one"))
