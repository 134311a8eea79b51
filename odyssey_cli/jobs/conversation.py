"""Questions to agents of a job on other hosts: several at once, each with one answer, and none waited for longer than said."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.links import secret
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.questions import Answer, Ask, NotLeading, Question
from launcher.host.loop import Loop
from odyssey.codec import Malformed, Packed
from odyssey.errors import OdysseyError
from odyssey.protocol.frames import MAX_FRAME_BYTES, packed
from odyssey_cli.jobs.find import FoundJob

ANSWER_S = 10.0
N_LEADERS = 3
"""So many are asked, one after the other, who leads."""
_answer = Packed(Answer)


@dataclass(frozen=True)
class Unreachable:
    """`why`: for people."""

    why: str


class Conversation:
    """With any agents of a job. It goes on over one link each."""

    def __init__(self, job: FoundJob) -> None:
        """Raises UsageError if the job's secret is not to be had."""
        assert job.owner is not None
        self._job = job
        self._owner = job.owner
        self._agents = job.agents
        self._key = secret.key(os.environ, Path(self._owner.secret_file) if self._owner.secret_file else None)
        self._loop = Loop(time.monotonic)
        self._lines: dict[int, _Line] = {}

    def ask(self, questions: Mapping[int, Question], limit_s: float) -> dict[int, Answer | Unreachable]:
        """By numbers of agents. All of them at once."""
        for number, question in questions.items():
            line = self._lines.get(number)
            if line is None or line.is_over:
                line = self._lines[number] = _Line(self._loop, self._addresses(number), self._key, self._owner.port)
            line.ask(question)
        waiting = [self._lines[number] for number in questions]

        def give_up() -> None:
            for line in waiting:
                if line.answer is None:
                    line.end("it does not answer")

        limit = self._loop.later(limit_s, give_up)
        while any(line.answer is None for line in waiting):
            self._loop.turn()
        limit.cancel()
        answers = {number: self._lines[number].answer for number in questions}
        return {number: answer for number, answer in answers.items() if answer is not None}

    def ask_leader(self, question: Question, help: str) -> tuple[int, Answer]:
        """The number of the agent that leads, and what it answers; `help`: where it cannot be asked. Raises OdysseyError."""
        leader = self._agents.leader
        for _ in range(N_LEADERS):
            match self.ask({leader: question}, ANSWER_S)[leader]:
                case NotLeading(leader=number):
                    leader = number
                case Unreachable(why=why):
                    what = f"{self._agents.name(leader)}, which leads {self._job.name}, cannot be asked: {why}"
                    raise OdysseyError(what, help)
                case answer:
                    return leader, answer
        raise OdysseyError(f"nobody leads {self._job.name} at the moment", "try again in a few seconds")

    def _addresses(self, number: int) -> list[Address]:
        info = self._agents.known.get(number)
        if info is not None and number == self._owner.number and info.port:
            return [Address("127.0.0.1", info.port), Address("::1", info.port)]
        if info is not None and info.address:
            return [Address(info.address, info.port)]
        return [Address(*self._owner.leader_at)] if number == self._owner.leader else []

    def close(self) -> None:
        for line in self._lines.values():
            line.end("")
        self._loop.close()


class _Line:
    """To one agent. `answer`: to the last question, None until there is one."""

    def __init__(self, loop: Loop, addresses: list[Address], key: bytes, port: int) -> None:
        self.answer: Answer | Unreachable | None = None
        self.is_over = False
        self._link: Link | None = None
        self._question = b""
        self._connector = Connector(
            loop, addresses, key, port, connected=self._connected, failed=lambda why, refused: self.end(why)
        )

    def ask(self, question: Question) -> None:
        self.answer, self._question = None, packed(question)
        if self._link is not None:
            self._link.send(self._question)

    def _connected(self, link: Link, address: Address) -> None:
        self._link = link
        link.begin(self._received, self.end, MAX_FRAME_BYTES)
        link.send(packed(Ask()))
        link.send(self._question)

    def _received(self, body: bytes) -> None:
        try:
            self.answer = _answer.decode(body)
        except Malformed as error:
            self.end(f"it sent what is no answer: {error}")

    def end(self, why: str) -> None:
        """Nothing comes any more."""
        if self.is_over:
            return
        self.is_over = True
        self._connector.close()
        if self._link is not None:
            self._link.close()
        if self.answer is None:
            self.answer = Unreachable(why)
