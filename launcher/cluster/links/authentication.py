"""How two agents prove to each other that they know the secret, and the seal on every frame from then on. Pure.

    answering ─► Hello(port, nonce) ─► opening ─► nonce, proof ─► answering ─► proof ─► opening

A proof is an HMAC-SHA-256 by the secret of all that both have said, and says which side it is of, so none can be sent back to
who made it, or used again (challenge and response as in RFC 4226's family; both nonces are fresh). The keys of the seals are
made of the same, one for each direction. A seal is a keyed BLAKE2b of a frame and of its number: a frame that was changed, left
out, said again or made by somebody else does not fit. Nothing is encrypted: what agents say can be read on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

MAGIC = b"odyssey\x01"
_HELLO = struct.Struct("!8sH32s")
_OPENING = struct.Struct("!8s32s32s")
_NONCE_BYTES = 32
SEAL_BYTES = 16
HELLO_BYTES, OPENING_BYTES, ANSWER_BYTES = _HELLO.size, _OPENING.size, 32


class Denied(Exception):
    """The other side is none of ours, or knows another secret. The text is for people."""


class NoneOfOurs(Denied):
    """The other side has said hello, and is no agent of the job that is looked for."""


@dataclass(frozen=True)
class Keys:
    """The keys of the seals on what is sent, and on what is received."""

    send: bytes
    receive: bytes


class Answering:
    """The side that was connected to. `port`: of the endpoint of its job, so that who looks for another one can go on."""

    def __init__(self, key: bytes, port: int) -> None:
        self._key = key
        self.hello = _HELLO.pack(MAGIC, port, secrets.token_bytes(_NONCE_BYTES))

    def answer(self, opening: bytes) -> tuple[bytes, Keys]:
        """What to send back, and the keys from then on. Raises Denied."""
        magic, nonce, proof = _OPENING.unpack(opening)
        said = self.hello + magic + nonce
        if magic != MAGIC:
            raise Denied("it is no agent of Odyssey")
        if not hmac.compare_digest(proof, _mac(self._key, b"opens", said)):
            raise Denied("it knows another secret")
        return _mac(self._key, b"answers", said), Keys(_mac(self._key, b"down", said), _mac(self._key, b"up", said))


class Opening:
    """The side that connects. `port`: of the endpoint of its job."""

    def __init__(self, key: bytes, port: int) -> None:
        self._key = key
        self._port = port
        self._said = b""

    def open(self, hello: bytes) -> bytes:
        """What to send to who said this. Raises NoneOfOurs."""
        magic, port, _nonce = _HELLO.unpack(hello)
        if magic != MAGIC:
            raise NoneOfOurs("what listens there is no agent of this version of Odyssey")
        if port != self._port:
            raise NoneOfOurs(f"what listens there is an agent of another job, with its endpoint at port {port}")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._said = hello + MAGIC + nonce
        return _OPENING.pack(MAGIC, nonce, _mac(self._key, b"opens", self._said))

    def keys(self, answer: bytes) -> Keys:
        """The keys of the seals from then on. Raises Denied."""
        if not hmac.compare_digest(answer, _mac(self._key, b"answers", self._said)):
            raise Denied("what listens there knows another secret")
        return Keys(_mac(self._key, b"up", self._said), _mac(self._key, b"down", self._said))


def seal(key: bytes, number: int, body: bytes) -> bytes:
    """Seal the frame with this number, counted from 0 in its direction of a connection."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=SEAL_BYTES)
    digest.update(body)
    return digest.digest()


def _mac(key: bytes, purpose: bytes, said: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\x00" + said, "sha256")
