"""Whether SLURM lets a job outlive a lost task or node: what can be seen of it from inside a step.

By default a lost node ends the step and then the job; srun may be told, on its command line, by a variable or by the cluster's
configuration, to end the others with a lost task too. `odyssey slurm` prints a script that has it right.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from launcher.host import proc
from odyssey_cli.slurm.step import Step

ASK_S = 10.0
"""For `scontrol` to answer."""


def flaws(arguments: Sequence[str] | None, environment: Mapping[str, str], config: Mapping[str, str]) -> tuple[str, ...]:
    """What would end a job of several agents with the first that is lost, each with its remedy.

    `arguments`: srun's own, None if they are not known. They win over its variables, and these over the configuration.
    """
    given = _given(arguments or ())
    found = []
    kill = given.get("kill-on-bad-exit") or environment.get("SLURM_KILL_BAD_EXIT") or config.get("KillOnBadExit", "0")
    if kill != "0":
        found.append("the first task that is lost ends all others (srun --kill-on-bad-exit=0 avoids it)")
    wait = given.get("wait") or environment.get("SLURM_WAIT") or config.get("WaitTime", "0").removesuffix(" sec")
    if wait != "0":
        found.append(f"all tasks end {wait} s after the first (srun --wait=0 avoids it)")
    if arguments is not None and "no-kill" not in given and "SLURM_NO_KILL" not in environment:
        found.append("a lost node ends the step (--no-kill, for sbatch and for srun, avoids it)")
    return tuple(found)


_OPTION = re.compile(
    r"-K(?P<K>[01]?)|--kill-on-bad-exit(?:=(?P<kill>[01]))?|-W(?P<W>\d+)|--wait=(?P<wait>\d+)|-k|--no-kill(?:=set)?"
)


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """Those of srun's options that matter here: the last one of each counts."""
    found: dict[str, str] = {}
    for at, argument in enumerate(arguments):
        if argument in ("-W", "--wait"):
            found["wait"] = arguments[at + 1] if at + 1 < len(arguments) else ""
        elif (option := _OPTION.fullmatch(argument)) is None:
            continue
        elif argument.startswith(("-K", "--kill")):
            found["kill-on-bad-exit"] = option["K"] or option["kill"] or "1"
        elif argument.startswith(("-W", "--wait")):
            found["wait"] = option["W"] or option["wait"]
        else:
            found["no-kill"] = "set"
    return found


def seen(step: Step, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The flaws of this step, as far as this host knows of them."""
    return flaws(_srun_of(step), environment, _configuration())


def _srun_of(step: Step) -> tuple[str, ...] | None:
    """The options of the srun that runs this step, where it is the only one of the job on this host: its child has the same."""
    mark = f"SLURM_JOB_ID={step.job_id}".encode()
    found = set()
    for pid, _ in proc.processes():
        words = tuple(word.decode(errors="replace") for word in proc.read(pid, "cmdline").split(b"\0")[:-1])
        if words and words[0].rpartition("/")[2] == "srun" and mark in proc.read(pid, "environ").split(b"\0"):
            at = next((at for at, word in enumerate(words) if word.rpartition("/")[2].startswith(("odyssey", "python"))), None)
            found.add(words[1:at])
    return found.pop() if len(found) == 1 else None


def _configuration() -> dict[str, str]:
    """`scontrol show config`; empty where it cannot be asked."""
    try:
        done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def too_few_processors(n_usable: int, environment: Mapping[str, str]) -> str:
    """For people, if an agent and its ranks are bound to fewer processors than the step has here; else empty."""
    text = environment.get("SLURM_CPUS_ON_NODE", "")
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or n_usable >= int(text):
        return ""
    return f"all ranks of this node share {n_usable} of the {text} processors that the step has here: give srun --cpu-bind=none"
