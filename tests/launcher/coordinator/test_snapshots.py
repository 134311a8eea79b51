"""The coordinator's state as bytes: whoever goes on from them decides as whoever did not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from launcher.coordinator.state import packed, unpacked
from odyssey.codec import Malformed
from tests.examples import examples
from tests.launcher.coordinator.test_machine import Job


class Packing(Job):
    """Random lives, in which the state goes through bytes before every event."""

    def take_news(self, body: object, generation: int | None) -> None:
        before = self.talk.state
        there_and_back = unpacked(packed(before))
        assert there_and_back == before and type(there_and_back) is type(before)
        self.talk.state = there_and_back
        super().take_news(body, generation)


TestPackedLives = Packing.TestCase
TestPackedLives.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck), max_examples=examples(60))


@pytest.mark.parametrize("data", [b"", b"j", b"p\xc1", b"j\x81\xa5world\x01", b"x\x80"])
def test_bytes_that_are_no_state_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpacked(data)
