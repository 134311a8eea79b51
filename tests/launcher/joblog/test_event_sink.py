"""The order in which an agent's news are read."""

from __future__ import annotations

from launcher.joblog.event_sink import EventSink, Sender
from launcher.joblog.events import Body, RankExited
from odyssey.protocol.reports import Report


class Reader:
    """Tells of two more when it takes rank 0's exit; notes when it has done with an event."""

    def __init__(self, sink: EventSink) -> None:
        self.sink = sink
        self.seen: list[str] = []

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        assert isinstance(body, RankExited)
        self.seen.append(f"{body.rank} begins")
        if body.rank == 0:
            self.sink.event(RankExited(1))
            self.sink.say("at once")
            self.sink.event(RankExited(2))
        self.seen.append(f"{body.rank} ends")

    def heard(self, sender: Sender, report: Report) -> None:
        raise AssertionError(report)

    def say(self, text: str) -> None:
        self.seen.append(text)


def test_what_an_event_causes_comes_behind_all_that_is_done_upon_it() -> None:
    sink = EventSink()
    reader = Reader(sink)
    sink.read_by(reader)
    sink.event(RankExited(0))
    assert reader.seen == ["0 begins", "at once", "0 ends", "1 begins", "1 ends", "2 begins", "2 ends"]
