"""Every collective of torch.distributed, with what must come of it: `collectives.py FOLDER RANK:NAME ...`.

Each RANK ends itself before it calls NAME in the second of three rounds. Ranks gather who is there before a collective and
behind it; what the collective gives must be right for the ranks of before or for those of behind. A rank that ends itself waits
until each has told by a file in FOLDER that it knows who is there: else nobody may be left who does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ME = int(os.environ["RANK"])
Ranks = list[int]


def own(rank: int) -> torch.Tensor:
    """What a rank gives."""
    return torch.tensor([rank + 1.0, 10.0 * rank], dtype=torch.float64)


def there() -> Ranks:
    """The ranks that are there, by the numbers that they had at first."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ME)
    return list(found[: dist.get_world_size()])


def stacked(ranks: Ranks) -> torch.Tensor:
    return torch.stack([own(rank) for rank in ranks])


def all_reduce(n: int) -> torch.Tensor:
    tensor = own(ME)
    dist.all_reduce(tensor)
    return tensor


def all_reduce_max(n: int) -> torch.Tensor:
    tensor = own(ME)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    return tensor


def reduce(n: int) -> torch.Tensor | None:
    tensor = own(ME)
    dist.reduce(tensor, dst=0)
    return tensor if dist.get_rank() == 0 else None


def reduce_scatter(n: int) -> torch.Tensor:
    output = torch.zeros(2, dtype=torch.float64)
    dist.reduce_scatter(output, [own(ME) * (place + 1) for place in range(n)])
    return output


def reduce_scatter_tensor(n: int) -> torch.Tensor:
    output = torch.zeros(2, dtype=torch.float64)
    dist.reduce_scatter_tensor(output, torch.cat([own(ME) * (place + 1) for place in range(n)]))
    return output


def broadcast(n: int) -> torch.Tensor:
    tensor = own(ME)
    dist.broadcast(tensor, src=0)
    return tensor


def all_gather(n: int) -> torch.Tensor:
    found = [torch.zeros(2, dtype=torch.float64) for _ in range(n)]
    dist.all_gather(found, own(ME))
    return torch.stack(found)


def all_gather_into_tensor(n: int) -> torch.Tensor:
    found = torch.zeros(2 * n, dtype=torch.float64)
    dist.all_gather_into_tensor(found, own(ME))
    return found.view(n, 2)


def all_gather_coalesced(n: int) -> torch.Tensor:
    found = [[torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)] for _ in range(n)]
    dist.all_gather_coalesced(found, [own(ME), own(ME).view(1, 2)])
    assert all(torch.equal(flat, row[0]) for flat, row in found)
    return torch.stack([flat for flat, _ in found])


def gather(n: int) -> torch.Tensor | None:
    found = [torch.zeros(2, dtype=torch.float64) for _ in range(n)] if dist.get_rank() == 0 else None
    dist.gather(own(ME), found, dst=0)
    return None if found is None else torch.stack(found)


def scatter(n: int) -> torch.Tensor:
    tensor = torch.zeros(2, dtype=torch.float64)
    dist.scatter(tensor, [own(place) for place in range(n)] if dist.get_rank() == 0 else None, src=0)
    return tensor


def broadcast_object_list(n: int) -> torch.Tensor:
    objects = [own(ME) if dist.get_rank() == 0 else None, "more"]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def scatter_object_list(n: int) -> torch.Tensor:
    found: list[Any] = [None]
    dist.scatter_object_list(found, [own(place) for place in range(n)] if dist.get_rank() == 0 else None, src=0)
    return found[0]


def barrier(n: int) -> None:
    dist.barrier()


def total(ranks: Ranks, before: Ranks) -> torch.Tensor:
    return stacked(ranks).sum(0)


def most(ranks: Ranks, before: Ranks) -> torch.Tensor:
    return stacked(ranks).max(0).values


def first(ranks: Ranks, before: Ranks) -> torch.Tensor:
    return own(0)


def gathered(ranks: Ranks, before: Ranks) -> torch.Tensor:
    """In the places of before; the first one's once more where one is gone."""
    return stacked([rank if rank in ranks else ranks[0] for rank in before])


def scattered_sum(ranks: Ranks, before: Ranks) -> torch.Tensor:
    return total(ranks, before) * (before.index(ME) + 1)


def scattered(ranks: Ranks, before: Ranks) -> torch.Tensor:
    return own(before.index(ME))


COLLECTIVES: dict[str, tuple[Callable[[int], torch.Tensor | None], Callable[[Ranks, Ranks], torch.Tensor] | None]] = {
    "all_reduce": (all_reduce, total),
    "all_reduce_max": (all_reduce_max, most),
    "reduce": (reduce, total),
    "reduce_scatter": (reduce_scatter, scattered_sum),
    "reduce_scatter_tensor": (reduce_scatter_tensor, scattered_sum),
    "broadcast": (broadcast, first),
    "all_gather": (all_gather, gathered),
    "all_gather_into_tensor": (all_gather_into_tensor, gathered),
    "all_gather_coalesced": (all_gather_coalesced, gathered),
    "gather": (gather, gathered),
    "scatter": (scatter, scattered),
    "broadcast_object_list": (broadcast_object_list, first),
    "scatter_object_list": (scatter_object_list, scattered),
    "barrier": (barrier, None),
}


def main() -> None:
    folder = Path(sys.argv[1])
    ends = {(int(rank), name) for rank, name in (text.split(":") for text in sys.argv[2:])}
    names = {name for _, name in ends}
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(nn.Linear(1, 1)).eval()  # who trains by what is gathered starts again
    for round_ in range(3):
        for name, (call, expected) in COLLECTIVES.items():
            before = there()
            assert before[dist.get_rank()] == ME
            if round_ == 1 and name in names:
                (folder / f"{name}-{ME}").touch()
            if round_ == 1 and (ME, name) in ends:
                while not all((folder / f"{name}-{rank}").exists() for rank in before):
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(len(before))
            after = there()
            if expected is not None and result is not None:
                right = [expected(before, before), expected(after, before)]
                assert any(torch.equal(result, each) for each in right), (name, before, after, result, right)
    del replica
    print("right to the end with", there(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
