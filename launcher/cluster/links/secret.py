"""The secret that agents of one user share: who does not know it is not heard by any of them.

ODYSSEY_SECRET, else the file that --secret-file names, else ~/.odyssey/secret, which whoever needs it first makes. So agents of
hosts that share a home folder find it by themselves. It never leaves this process: not to ranks or any other process that it
starts, not over the network.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from odyssey.errors import UsageError

VARIABLE = "ODYSSEY_SECRET"
MIN_LENGTH = 16
MAX_BYTES = 4096
_HELP = f"make one with `openssl rand -hex 32`, and give all agents the same, by {VARIABLE} or --secret-file"


def key(environment: Mapping[str, str], file: Path | None) -> bytes:
    """32 bytes. Raises UsageError if the secret is too short, cannot be read, or can be read by others."""
    given = environment.get(VARIABLE, "")
    if given:
        return _key_of(os.fsencode(given), VARIABLE)
    if file is not None:
        return _key_of(_read(file), f"--secret-file {file}")
    try:
        path = Path(environment.get("HOME") or "~").expanduser() / ".odyssey" / "secret"
    except RuntimeError:
        raise UsageError("this user has no home for the secret of its jobs", _HELP) from None
    try:
        _make(path)
        return _key_of(_read(path), str(path))
    except OSError as error:
        raise UsageError(f"{path}: the secret of this user's jobs cannot be made: {error.strerror}", _HELP) from None


def _key_of(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if len(secret) < MIN_LENGTH:
        raise UsageError(f"{where}: a secret of {len(secret)} characters, and at least {MIN_LENGTH} are needed", _HELP)
    return hashlib.blake2b(secret, digest_size=32, person=b"odyssey agents").digest()


def _read(path: Path) -> bytes:
    """Raises UsageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"{path}: the secret cannot be read: {error.strerror}", _HELP) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: the secret is no file", _HELP)
        if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
            raise UsageError(f"{path}: others may read or change the secret", f"chmod 600 {path}, in a folder of your own")
        return os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)


def _make(path: Path) -> None:
    """Unless it is there. Whole, or not at all: agents of many hosts may be making it at once. Raises OSError."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_hex(32).encode() + b"\n")
            file.flush()
            os.fsync(fd)
        try:
            os.link(own, path)
        except FileExistsError:
            pass  # another agent was faster
    finally:
        own.unlink()
