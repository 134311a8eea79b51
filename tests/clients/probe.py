"""Writes what a rank finds around it to $PROBES/RANK.ATTEMPT.json, and with `--ready` a line to $READY.

Without torch, so that it costs milliseconds; other arguments are only written down.
"""

import json
import os
import random
import socket
import sys


def status(name):
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)[name]


def signals():
    """What the kernel has for this process: the numbers of ignored, blocked and caught signals."""
    masks = {name: int(status(name), 16) for name in ("SigIgn", "SigBlk", "SigCgt")}
    return {name: [bit + 1 for bit in range(64) if mask >> bit & 1] for name, mask in masks.items()}


def store_answers():
    """Whether anything listens at MASTER_ADDR:MASTER_PORT."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=20):
            return True
    except OSError:
        return False


def facts():
    main = sys.modules["__main__"]
    with open("/proc/self/cmdline", "rb") as file:
        command = [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    return {
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": command,
        "executable": sys.executable,
        "cwd": os.getcwd(),
        "path0": sys.path[0],
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "has_spec": main.__spec__ is not None,
        "cached": getattr(main, "__cached__", None),
        "is_main": main.__dict__ is globals(),
        "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "isatty": [os.isatty(number) for number in range(3)],
        "extra_fds": [
            os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if int(number) > 2 and os.path.exists(f"/proc/self/fd/{number}")
        ],
        "write_through": sys.stdout.write_through,
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "sid": os.getsid(0),
        "pgid": os.getpgid(0),
        "umask": status("Umask"),
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "flags": str(sys.flags),
        "recursion": sys.getrecursionlimit(),
        "threads": len(os.listdir("/proc/self/task")),
        "random": random.random(),
        "store_answers": store_answers(),
        "torch_threads_variable": os.environ.get("OMP_NUM_THREADS"),
        **signals(),
    }


def main():
    found = facts()
    attempt = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    name = os.path.join(os.environ["PROBES"], attempt)
    with open(name + ".part", "w") as file:
        json.dump(found, file)
    os.rename(name + ".part", name + ".json")
    if "--ready" in sys.argv:
        with open(os.environ["READY"], "w") as ready:
            ready.write(f"{attempt}\n")


if __name__ == "__main__":
    main()
