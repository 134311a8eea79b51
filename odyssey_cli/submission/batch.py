"""A batch script of SLURM that starts one agent on each node, and whose exit code is that of the training.

Pure: text from a BatchRequest. What each line is for is said beside it, and why in docs/slurm.md.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from odyssey.errors import UsageError
from odyssey_cli.command_line.typed_requests import BatchRequest
from odyssey_cli.command_line.values import duration_s

SRUN = ("--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none")
"""With the first three the end of a task, or of a node, is not the end of the others; with the last ranks of a node have all
of its processors, not those of one task."""
_NODES = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", re.ASCII)
_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(?::\d{2}){0,2}", re.ASCII)
_SIGNAL = re.compile(r"(?:[A-Z]+[0-9]?|\d{1,2})@\d{1,5}", re.ASCII)


def batch_script(request: BatchRequest, command: Sequence[str], script: str) -> str:
    """`command`: what stands behind `odyssey run`; `script` is in it. Raises UsageError for what SLURM would not take."""
    return "\n".join([*_head(request, script), "", *_body(request, command), ""])


def _head(request: BatchRequest, script: str) -> list[str]:
    options = {
        "job-name": request.job_name or _name_of(script),
        "nodes": _nodes(request)[0],
        "ntasks-per-node": "1",
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": str(request.cpus_per_task or ""),
        "time": _time(request.time),
        "partition": request.partition,
        "account": request.account,
        "output": request.output,
        "signal": _signal(request),
    }
    lines = [f"--{name}={_word(name, value)}" for name, value in options.items() if value]
    lines += ["--no-kill"]
    lines += ["--requeue", "--open-mode=append"] if request.requeue is not None else ["--no-requeue"]
    lines += [_word("sbatch", option) for option in request.sbatch or ()]
    return ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines)]


def _body(request: BatchRequest, command: Sequence[str]) -> list[str]:
    agents = []
    if request.elastic is not None:
        least = _nodes(request)[1]
        if not 1 <= request.elastic <= least:
            raise UsageError(
                f"--elastic {request.elastic}: expected 1 to {least}, the nodes that the job begins with",
                "for example --elastic 1",
            )
        agents = [f"--nnodes {request.elastic}:$SLURM_JOB_NUM_NODES"]
    lines = [
        "# One agent a node. SLURM tells each how many there are, where they meet, and how many GPUs it has.",
        "report=odyssey-logs/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.json",
        "mkdir -p odyssey-logs",
    ]
    if request.requeue is not None or request.signal:
        lines += ["trap : TERM USR1 USR2  # they are the ranks', and this script is to outlive them"]
    cpus = ("--cpus-per-task=$SLURM_CPUS_PER_TASK",) if request.cpus_per_task is not None else ()  # not inherited since 22.05
    lines += [
        "",
        "# A task or a node that is lost is not the end of the others.",
        f"srun {' '.join((*SRUN, *cpus))} \\",
        "    " + " ".join(["odyssey run", '--json-report "$report"', *agents, shlex.join(command)]),
        "code=$?",
        "",
        "# srun's exit code is the worst of all tasks, lost ones as well: what counts is how the training ended.",
        'grep -qs \'"status": "succeeded"\' "$report" && code=0',
    ]
    if request.requeue is not None:
        lines += [
            "",
            "# Ended by SIGTERM: the time is over, or the nodes are taken away. On to the next part, from the last checkpoint.",
            f'if [ "$code" -eq 143 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.requeue} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # SLURM ends this script',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _nodes(request: BatchRequest) -> tuple[str, int, int]:
    """As given, the least, the most."""
    found = _NODES.fullmatch(request.nodes)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--nodes: expected N or MIN-MAX, got {request.nodes!r}", "for example --nodes 4, or --nodes 2-4")
    return request.nodes, int(found[1]), int(found[2] or found[1])


def _time(text: str) -> str:
    """`1-12:00:00`; SLURM counts minutes where there is only a number, as do we."""
    if not text or _TIME.fullmatch(text):
        return text
    minutes = max(1, round(duration_s(text, "--time") / 60))
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes % 60:02d}:00"


def _signal(request: BatchRequest) -> str:
    if request.signal and not _SIGNAL.fullmatch(request.signal):
        raise UsageError(f"--signal: expected NAME@SECONDS, got {request.signal!r}", "for example --signal USR1@120")
    # To save a checkpoint, and to be put in the queue again, takes some of the time that is left.
    return request.signal or ("TERM@120" if request.requeue is not None and request.time else "")


def _name_of(script: str) -> str:
    return re.sub(r"\.py$", "", script.rstrip("/").rpartition("/")[2])


def _word(name: str, text: str) -> str:
    """On a line of #SBATCH a blank ends an option, and a line break all of them."""
    if any(character in text for character in "\n\r\0"):
        raise UsageError(f"--{name}: {text!r} does not fit on a line", "")
    return shlex.quote(text) if any(character in text for character in " \t\"'#") else text
