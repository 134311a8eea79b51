"""Links between all agents of a job for their consensus, each made when there is something to say.

What is said over a link that breaks is lost: the consensus says it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.listener import Listener
from launcher.cluster.wire import JoinMesh
from launcher.consensus.messages import Message
from launcher.consensus.node import ProtocolError
from odyssey.codec import Malformed, Packed
from odyssey.protocol.frames import MAX_FRAME_BYTES, packed

MAX_QUEUED = 64
"""Messages for an agent that is being connected to; the oldest are lost first."""
_message = Packed(Message)
Received = Callable[[int, Message], None]


class _Peer:
    """Another agent. `link`: from us to it; it has one of its own to us."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.connector: Connector | None = None
        self.queued: deque[bytes] = deque(maxlen=MAX_QUEUED)


class Mesh:
    """Links to all other agents, made when there is something to say.
    `received(number, message)`: what an agent says; it may raise ProtocolError, which costs the link. `where`: agents are
    reached; `me`: our number; `log`: which one it is about; `reconnect_s`: a link over which nothing gets through for so long
    is made anew. Agents of another job, which may have been reached here before, are not heard."""

    def __init__(
        self, listener: Listener, where: Mapping[int, Address], me: int, log: str, reconnect_s: float, received: Received
    ) -> None:
        self._listener = listener
        self._where = where
        self._me = me
        self._log = log
        self._reconnect_s = reconnect_s
        self._received = received
        self._peers: dict[int, _Peer] = {}
        self._incoming: dict[int, Link] = {}
        self._is_over = False
        listener.give(JoinMesh, self._joined)

    def send(self, number: int, message: Message) -> None:
        """Now, or when its link is there. Nothing, where nobody knows where it is."""
        if self._is_over or number not in self._where:
            return
        peer = self._peers.setdefault(number, _Peer())
        body = packed(message)
        if peer.link is not None and peer.link.is_open:
            peer.link.send(body)
            return
        peer.queued.append(body)
        if peer.connector is None:
            at = self._where[number]
            peer.connector = self._listener.connect(
                at, lambda link, _address: self._connected(peer, link), lambda _why, _is_nobody: self._failed(peer)
            )

    def _connected(self, peer: _Peer, link: Link) -> None:
        peer.connector, peer.link = None, link
        link.end_if_unacknowledged(self._reconnect_s)
        link.begin(lambda body: link.close(), lambda why: None, 0)  # it has nothing to say here
        link.send(packed(JoinMesh(self._me, self._log)))
        for body in peer.queued:
            link.send(body)
        peer.queued.clear()

    def _failed(self, peer: _Peer) -> None:
        peer.connector = None
        peer.queued.clear()

    def _joined(self, link: Link, words: JoinMesh) -> None:
        if self._is_over or words.log != self._log:
            link.close()
            return
        if (before := self._incoming.get(words.number)) is not None:
            before.close()
        self._incoming[words.number] = link

        def said(body: bytes) -> None:
            try:
                self._received(words.number, _message.decode(body))
            except (Malformed, ProtocolError):
                link.close()

        link.begin(said, lambda why: None, MAX_FRAME_BYTES)

    def close(self) -> None:
        """No link is left, and who comes is sent away."""
        self._is_over = True
        for peer in self._peers.values():
            if peer.connector is not None:
                peer.connector.close()
            if peer.link is not None:
                peer.link.close()
        for link in self._incoming.values():
            link.close()
