"""What an agent that another one leads asks of whoever keeps it up to lead the job itself (launcher/agent/succession.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.joblog.events import JobEnded
from odyssey.protocol.reports import Committed


class Successors(Protocol):
    """Who keeps this agent up to lead the job itself."""

    def welcomed(self, listener: Listener, number: int, leader: int, address: Address, log: str) -> None:
        """This agent is in, and another one leads."""

    def led_anew(self) -> None:
        """Another agent leads than before, and its word is here by which ranks start."""

    def is_over(self, ended: JobEnded) -> None:
        """The leading agent says that the job has ended so; what all have decided may not be known here."""

    def passed(self, unit: Committed) -> bool:
        """A unit is final, as a rank here tells. Whether it is the first one here to do so."""

    def know(self, number: int, address: Address) -> None:
        """Another agent of the job, and where it is reached."""

    def forgotten(self, job_goes_on: bool) -> None:
        """This agent has no place any more; `job_goes_on`: without it, so that nobody of the job looks for it here."""

    def found(self, number: int) -> None:
        """The agent that led is gone, and so are all that came before this one: it begins the job."""

    @property
    def has_begun(self) -> bool:
        """This agent is in the job by what all have decided, not only by the word of who leads."""

    @property
    def was_in(self) -> bool:
        """This agent has had a place in the job, whether it has one now or not."""

    @property
    def is_known(self) -> bool:
        """An agent that led has taken this one in, and others may come to it."""

    @property
    def others(self) -> Mapping[int, Address]:
        """Where agents of the job are reached, or were, by number."""

    def can_follow(self, is_gone: bool) -> bool:
        """Whether another agent may lead now; `is_gone`: the process of the one that led has ended."""

    @property
    def can_do_without(self) -> bool:
        """The job may move what the ranks here hold to others, if it is asked to."""

    def close(self) -> None: ...
