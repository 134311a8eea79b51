"""What is compared on a trace: every strategy alone, the choice among all, and what published systems would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

import strategies
from odyssey.errors import UsageError
from odyssey_cli.replay import elastic
from odyssey_cli.replay.job import Setup
from odyssey_cli.replay.outcome import Result
from odyssey_cli.replay.starts import Starts
from odyssey_cli.replay.terms import Terms
from odyssey_cli.replay.traces import Trace

Progress = Callable[[float], None]
Live = Callable[[Trace, Setup, Starts, Terms, Progress], Result]


class Policy(msgspec.Struct, frozen=True):
    """`about`: in a few words, for the table; `like`: a published system, in whose words docs/replay.md describes it."""

    name: str
    about: str
    live: Live
    like: bool = False


def all_policies() -> tuple[Policy, ...]:
    """In the order of the table."""
    ours = [
        Policy("auto", "the best plan after every loss", partial(_ours, "auto", False)),
        Policy("auto+restart", "and a user who starts again for nodes that wait", partial(_ours, "auto", True)),
    ]
    ours += [Policy(name, f"--strategy {name}", partial(_ours, name, False)) for name in strategies.names()]
    return tuple(ours)


def named(names: Sequence[str]) -> tuple[Policy, ...]:
    """These; all if none is named. Raises UsageError for an unknown one."""
    known = {policy.name: policy for policy in all_policies()}
    for name in names:
        if name not in known:
            raise UsageError(f"--policy: there is no {name!r}", f"one or more of: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names)) if names else tuple(known.values())


def _ours(strategy: str, grows: bool, trace: Trace, setup: Setup, starts: Starts, terms: Terms, progress: Progress) -> Result:
    return elastic.live(trace, replace(setup, strategy=strategy), starts, terms, progress, grows=grows)
