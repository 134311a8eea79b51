"""Binds a rank to the processors near its GPU (`--numa-binding`), as torch.numa finds them; numactl is not needed.

    python -m odyssey.zygote.numa MODE LOCAL_RANK COMMAND …

binds itself and becomes COMMAND, for what is no fork of the zygote.

To ask for a GPU's place initialises CUDA, so a child process asks: the rank starts untouched.
"""

from __future__ import annotations

import os
import sys
from inspect import signature


def bind(mode: str, local_rank: int) -> None:
    """Bind this process and what it starts. Ends it with exit code 1 and one line on stderr where that is impossible."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write_end, ",".join(map(str, sorted(_processors(mode, local_rank)))).encode())
            code = 0
        except Exception as error:
            print(f"error: --numa-binding={mode}: no processors for GPU {local_rank}: {error}", file=sys.stderr)
        os._exit(code)
    os.close(write_end)
    with open(read_end) as file:
        processors = file.read()
    os.waitpid(child, 0)  # it has written or failed: it is about to end
    if not processors:
        os._exit(1)
    os.sched_setaffinity(0, {int(number) for number in processors.split(",")})


def _processors(mode: str, local_rank: int) -> set[int]:
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    find = binding._get_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in signature(find).parameters else "gpu_index"  # before torch 2.15
    processors: set[int] = find(**{index: local_rank}, numa_options=options)
    if not processors:
        raise RuntimeError("torch.numa names none")
    return processors


if __name__ == "__main__":
    bind(sys.argv[1], int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
