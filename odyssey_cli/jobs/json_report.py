"""`--json-report FILE`: how a job ended, for tools; docs/failures.md says what each key holds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from launcher.failures.history import FailureHistory, failure_of
from launcher.failures.root_cause import RankEnd
from odyssey.text import all_as_unicode


def report(history: FailureHistory, code: int) -> dict[str, Any]:
    """What is to be written. `code`: the launcher's exit code."""
    job, ended, failure = history.job, history.ended, failure_of(history)
    status = "succeeded" if code == 0 else "stopped" if code > 128 else "failed"
    cause = None
    if failure is not None and failure.cause is not None:
        cause = {
            "local_rank": failure.local_rank,
            "host": failure.host,
            "pid": failure.pid,
            "step": failure.step,
            "last_lines": failure.cause.diagnostics.last_lines,
            "log": failure.cause.diagnostics.log or (job.folder if job is not None else ""),
            **_end(failure.cause),
        }
    return {
        "status": status,
        "exitcode": code,
        "reason": ended.reason if ended is not None and code != 0 else "",
        "help": failure.help if failure is not None else "",
        "job": {
            "script": job.script if job is not None else "",
            "arguments": list(job.arguments) if job is not None else [],
            "n_ranks": len(history.started),
            "run_id": job.run_id if job is not None else "",
            "folder": job.folder if job is not None else "",
            "version": job.version if job is not None else "",
            "started_at": history.started_at,
            "ended_at": history.ended_at,
            "max_restarts": job.max_restarts if job is not None else 0,
            "n_restarts": history.n_restarts,
        },
        "attempt": history.attempt,
        "cause": cause,
        "same_on": list(failure.alike) if failure is not None else [],
        "victims": list(failure.victims) if failure is not None else [],
        "others": [_end(end) for end in failure.others] if failure is not None else [],
        "attempts": [
            {
                "attempt": attempt.number,
                "failure": attempt.failure,
                "rank": attempt.cause.rank if attempt.cause is not None else None,
                "kind": attempt.cause.kind if attempt.cause is not None else None,
                "exitcode": attempt.cause.status if attempt.cause is not None else None,
                "seconds": attempt.ran_s,
            }
            for attempt in history.attempts
        ],
    }


def _end(end: RankEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "kind": end.kind,
        "text": end.text,
        "exitcode": end.status,
        "signal": _signal(end.status),
        "exception": end.error,
        "traceback": end.traceback,
        "time": end.time,
    }


def _signal(status: int | None) -> str | None:
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def write(path: Path, history: FailureHistory, code: int) -> None:
    """The whole file or nothing: whoever waits for it finds it complete. Raises OSError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(all_as_unicode(report(history, code)), indent=2) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
