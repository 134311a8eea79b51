"""An agent looks for the one that leads its job, again and again, until it is connected to it.

connect to the endpoint ─► ask the store there ─► connect to the leading agent
         ▲                                    └► nobody leads there yet, or any more ─┐
         └────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

from launcher.cluster.endpoint import LEADER_KEY
from launcher.cluster.quorum import TELL_EVERY_S
from launcher.host.loop import Loop, Timer
from launcher.joblog.news import News
from launcher.joblog.wording import seconds_text
from launcher.processes.rank_process import LOOKUP_S
from launcher.processes.ranks import Processes
from odyssey.codec import for_people

RETRY_S = 0.2
_LEADER = re.compile(r"(?P<port>[0-9]{1,5}) (?P<token>[0-9a-f]{1,128})", re.ASCII)
"""What `Leader.listen` has the store tell."""


class LeaderSearch:
    """`found(connected, token)`: a socket to the leading agent, and the word that it wants; `given_up(what, help)`."""

    def __init__(
        self,
        loop: Loop,
        processes: Processes,
        patience_s: float,
        news: News,
        *,
        found: Callable[[socket.socket, str], None],
        given_up: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._patience_s = patience_s
        self._news = news
        self._found = found
        self._given_up = given_up
        self._began = loop.clock()
        self._is_over = False
        self._trouble = ""
        """Why it is not there yet, for people."""
        self._lookup: Timer | None = None

    @property
    def where(self) -> str:
        """The endpoint, for people."""
        return str(self._processes.store.address)

    def start(self) -> None:
        """From now on, for as long as agents are waited for."""
        self._connect()
        self._loop.later(TELL_EVERY_S, self._tell)

    def again(self, trouble: str) -> None:
        """What was found has not taken this agent."""
        self._trouble = trouble
        self._loop.later(RETRY_S, self._connect)

    def end(self) -> None:
        """It is found and has taken this agent, or nobody is looked for any more."""
        self._is_over = True
        if self._lookup is not None:
            self._lookup.cancel()

    def _connect(self) -> None:
        if self._is_over:
            return
        if self._loop.clock() - self._began > self._patience_s:
            self._given_up(f"no leading agent at {self.where} within {self._patience_s:g} s ({self._trouble})", "")
            return
        store = self._processes.store
        try:
            with socket.create_connection((store.address.host, store.address.port), 1.0):
                pass
        except OSError as error:
            self.again(error.strerror or str(error))
            return
        self._trouble = "it listens, and its store has not answered yet"
        self._lookup = self._loop.later(LOOKUP_S + 5, self._nobody_answers)
        store.look_up(LEADER_KEY, self._told)

    def _told(self, text: str) -> None:
        """What the store at the endpoint says of the leading agent: `port token`; empty if it could not be asked."""
        if self._is_over or self._lookup is None:
            return
        self._lookup.cancel()
        self._lookup = None
        if not text:
            self._loop.later(RETRY_S, self._connect)
            return
        named = _LEADER.fullmatch(text)
        if named is None or int(named["port"]) > 65535:
            said = for_people(repr(text), 100)
            self._given_up(f"the store at {self.where} does not say where the leading agent listens: {said}", "")
            return
        try:
            connected = socket.create_connection((self._processes.store.address.host, int(named["port"])), 5.0)
        except OSError as error:
            self.again(error.strerror or str(error))
            return
        self._trouble = "it is connected, and the leading agent has not answered yet"
        self._found(connected, named["token"])

    def _nobody_answers(self) -> None:
        if not self._processes.spawner.asks:
            self._lookup = self._loop.later(LOOKUP_S + 5, self._nobody_answers)  # torch is still being imported
            return
        self._given_up(
            f"what listens at {self.where} is not the store of an Odyssey job: it did not answer within {LOOKUP_S:g} s",
            "is another program, or a job of torchrun, at this port? choose another endpoint for all agents",
        )

    def _tell(self) -> None:
        if not self._is_over:
            waited_s = self._loop.clock() - self._began
            self._news.say(f"waiting for the leading agent at {self.where} for {seconds_text(waited_s)}: {self._trouble}")
            self._loop.later(TELL_EVERY_S, self._tell)
