"""What is compared on a trace: every strategy alone, the choice among all, and torchrun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

import strategies
from odyssey.errors import UsageError
from odyssey.plan.approximation import LowRank
from odyssey_cli.replay import elastic, restarting
from odyssey_cli.replay.first_plans import FirstPlans
from odyssey_cli.replay.outcome import Result
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Trace
from strategies.situation import Protect

Progress = Callable[[float], None]
NEEDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "redundant": (" --protect state", {"protect": Protect.STATE}),
    "neighbour": (" --allow-approximate", {"approximate": LowRank()}),
}
"""Strategies that would propose nothing else: the option that each is given, and what that comes to in the job's Aim."""
NOTHING: tuple[str, Mapping[str, object]] = ("", {})
Live = Callable[[Trace, Setup, FirstPlans, RestartCosts, Progress], Result]


class Policy(msgspec.Struct, frozen=True):
    """`about`: in a few words."""

    name: str
    about: str
    live: Live


def all_policies() -> tuple[Policy, ...]:
    """In the order of the table."""
    ours = [
        Policy("auto", "the best plan after every change", partial(_ours, "auto")),
        *(Policy(name, f"--strategy {name}{NEEDS.get(name, NOTHING)[0]}", partial(_ours, name)) for name in strategies.names()),
    ]
    about = "like torchrun: all start again from the checkpoint, at the best interval"
    return *ours, Policy("torchrun", about, restarting.live)


def named(names: Sequence[str]) -> tuple[Policy, ...]:
    """These; all if none is named. Raises UsageError for an unknown one."""
    known = {policy.name: policy for policy in all_policies()}
    for name in names:
        if name not in known:
            raise UsageError(f"--policy: there is no {name!r}", f"one or more of: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names)) if names else tuple(known.values())


def _ours(
    strategy: str, trace: Trace, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts, progress: Progress
) -> Result:
    aim = replace(setup.aim, **NEEDS.get(strategy, NOTHING)[1])
    return elastic.live(trace, replace(setup, strategy=strategy, aim=aim), first_plans, restart_costs, progress)
