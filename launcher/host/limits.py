"""What to do about a limit of the system that is reached, by errno."""

from __future__ import annotations

import errno

from odyssey.errors import OdysseyError

HELP = {
    errno.EAGAIN: "raise the number of processes that you may have, `ulimit -u`, or start fewer ranks",
    errno.ENOMEM: "free memory of this host, or start fewer ranks",
    errno.EMFILE: "raise the number of open files, `ulimit -n`, or start fewer ranks",
    errno.ENFILE: "this host has too many open files: start fewer ranks",
}


def error_of(what: str, error: Exception) -> OdysseyError:
    """`what` could not be done, and why."""
    if not isinstance(error, OSError) or error.errno is None:
        return OdysseyError(f"{what}: {error}")
    return OdysseyError(f"{what}: {(error.strerror or str(error)).lower()}", HELP.get(error.errno, ""))
