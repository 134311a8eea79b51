"""A trace against a published system: it answers each change, and the ledger is kept as for our own jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from odyssey_cli.replay.ledger import Doing, Ledger
from odyssey_cli.replay.nodes import Nodes, told
from odyssey_cli.replay.outcome import Decision, Result
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace, at_once


class Response(msgspec.Struct, frozen=True):
    """How a system goes on. `then`: for people. `step_s`: None if it cannot train until more nodes are there.

    `pause_s`: until it trains. `rolls_back`: to the newest checkpoint; `saves`: it makes one first. `nodes`: that it uses.
    """

    then: str
    step_s: float | None
    pause_s: float
    n_ranks: int
    nodes: frozenset[int]
    rolls_back: bool = False
    saves: bool = False


class System(Protocol):
    """A published system on one job. It remembers what it was told."""

    def start(self, there: frozenset[int]) -> Response:
        """On these nodes."""

    def lost(self, nodes: frozenset[int], there: frozenset[int]) -> Response | None:
        """`there`: those that are left. None if it had none of the lost ones."""

    def returned(self, there: frozenset[int]) -> Response | None:
        """`there`: all that are there now. None if it goes on as it is."""


class PublishedLife:
    """A system on the nodes of a trace."""

    def __init__(self, trace: Trace, restart_costs: RestartCosts, system: System, mean_s: float | None = None) -> None:
        """`mean_s`: between returns to a checkpoint, where that is known beforehand; None: as seen so far."""
        self._trace, self._restart_costs, self._system, self._mean_s = trace, restart_costs, system, mean_s
        self._ledger = Ledger(restart_costs.save_s)
        self._nodes = Nodes(trace)
        self._decisions: list[Decision] = []
        self._trains = False
        self._from_s = 0.0
        """When it trains, or would."""
        self._doing = Doing.RESTART
        """Until then."""
        self._n_returns = 0

    def run(self, progress: Callable[[float], None]) -> Result:
        """To the end of the trace; tells how far it is as it goes. The clock starts with the first step."""
        self._obey(self._system.start(frozenset(self._nodes.there)), 0.0, "start", Doing.RESTART)
        self._from_s = 0.0
        for changes in at_once(self._trace.changes):
            self._take(changes)
            progress(changes[0].at_s)
        end_s = self._trace.length_s
        self._pass(end_s)
        if self._is_training(end_s):
            self._ledger.train(end_s)
        self._ledger.close(end_s)
        return Result(tuple(self._ledger.stretches), tuple(self._decisions), self._n_returns, self._nodes.idle_until(end_s))

    def _is_training(self, at_s: float) -> bool:
        return self._trains and self._from_s <= at_s

    def _take(self, changes: Sequence[Change]) -> None:
        at_s = changes[0].at_s
        self._nodes.take(changes)
        there = frozenset(self._nodes.there)
        gone = frozenset(change.node for change in changes if change.kind is not NodeEventKind.RETURNED)
        response = self._system.lost(gone, there) if gone else None
        is_loss = response is not None
        if response is None and any(change.kind is NodeEventKind.RETURNED for change in changes):
            response = self._system.returned(there)
        elif response is not None and gone & there - response.nodes:  # failed, and healthy: they come back at once
            back = self._system.returned(there)
            if back is not None:
                rolls_back = response.rolls_back or back.rolls_back
                response = replace(back, pause_s=response.pause_s + back.pause_s, rolls_back=rolls_back)
        if response is None:
            return
        self._pass(at_s)
        if self._is_training(at_s):
            if is_loss or response.rolls_back:
                self._ledger.cut_off(at_s)
            else:
                self._ledger.train(self._ledger.under_way_until(at_s))  # the step ends
        if response.saves:
            self._ledger.pause(self._ledger.now_s + self._restart_costs.save_s, Doing.CHECKPOINT)
            self._ledger.saved()
        if response.rolls_back:
            self._ledger.roll_back()
            self._n_returns += 1
        is_restart = response.rolls_back or response.saves
        self._obey(response, at_s, told(changes), Doing.RESTART if is_restart else Doing.TRANSITION)

    def _pass(self, at_s: float) -> None:
        """What is no training, up to then."""
        self._ledger.pause(min(at_s, self._from_s) if self._trains else at_s, self._doing)

    def _obey(self, response: Response, at_s: float, what: str, doing: Doing) -> None:
        now_s = max(at_s, self._ledger.now_s)
        self._trains = response.step_s is not None
        self._doing = doing if self._trains else Doing.WAITING
        self._from_s = now_s + response.pause_s
        if response.step_s is not None:
            self._ledger.step_s = response.step_s
        restart_costs, mean_s = self._restart_costs, self._mean_s
        self._ledger.interval_s = (
            restart_costs.interval_s(self._n_returns, now_s) if mean_s is None else restart_costs.best_interval_s(mean_s)
        )
        self._nodes.use(response.nodes, now_s)
        self._decisions.append(Decision(at_s, what, response.then, response.n_ranks, response.step_s, self._from_s - at_s))
