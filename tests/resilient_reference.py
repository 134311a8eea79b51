"""What one process in plain torch makes of the model of tests/jobs/resilient.py: the oracle of jobs of a script's own model.

Everything is written a second time, as dumb as it can be: the order of samples, the mean over the global batch, running
statistics, what the loop does. Of ours only `layer_seed` is used, which says what dropout's generator is seeded with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.data import default_collate

from odyssey.runtime.data import layer_seed
from tests.jobs import resilient as job
from tests.reference import step_sample_ids
from tests.streams import Stream, steps_of


@cache
def trained(variant: str, n_steps: int = job.N_STEPS) -> dict[str, Any]:
    """Losses, state and validation loss, as the job writes them. Once in a process: of streams it may take minutes."""
    torch.set_num_threads(1)
    variant, *how = variant.split("+")
    net = job.model(variant)
    optimizers = job.optimizers(net, variant)
    scheduler = job.scheduler(optimizers[0], variant)
    loop = job.Loop(net, optimizers[0], variant)
    data = job.Points(variant)
    streamed = how and steps_of(Stream(data, how[0]), job.GLOBAL_BATCH, job.MICRO_BATCH, job.SEED, n_steps)
    collate = job.padded if variant in ("padded", "tokens") else default_collate
    losses, averaged = {}, {}
    for step in range(n_steps):
        ids = drawn_ids(step) if variant == "weighted" else step_sample_ids(step, job.GLOBAL_BATCH, len(data), job.SEED)
        samples = streamed[step] if streamed else [data[i] for i in ids]
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        after = []
        net.zero_grad()
        total, n = 0.0, 0
        for number, start in enumerate(range(0, len(samples), job.MICRO_BATCH)):
            chosen = samples[start : start + job.MICRO_BATCH]
            net.load_state_dict(before, strict=False)
            torch.manual_seed(layer_seed(job.SEED, step, number, 0))
            its_total, its_n = job.total_of(net, collate(chosen), variant)
            loop.scaler.scale(its_total).backward()
            total, n = total + its_total.item(), n + its_n
            after.append({name: buffer.clone() for name, buffer in net.named_buffers()})
        for name, buffer in net.named_buffers():
            values = torch.stack([its[name] for its in after])
            buffer.copy_(values.mean(0) if values.is_floating_point() else values[0])
        for optimizer in optimizers:
            loop.scaler.unscale_(optimizer)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= n
        if variant in ("plain", "scaled"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scale = loop.scaler.get_scale()
        for optimizer in optimizers:
            loop.scaler.step(optimizer)
        loop.scaler.update()
        if scheduler is not None and loop.scaler.get_scale() >= scale:
            scheduler.step()
        losses[step] = total / n
        loop.behind(step, losses[step])
        if variant in job.EVALUATED:
            averaged[step] = validated(partial(functional_call, net, loop.average.values), variant)
    net.eval()
    validation = validated(net, variant)
    return {"losses": losses, "averaged": averaged, "state": job.state(net, optimizers, loop), "validation": validation}


def validated(net: Callable[[torch.Tensor], torch.Tensor], variant: str) -> float:
    """The mean loss over all data, in which nothing is random."""
    data, collate = job.Points(variant), job.padded if variant in ("padded", "tokens") else default_collate
    with torch.no_grad():
        chunks = [range(start, min(start + job.MICRO_BATCH, len(data))) for start in range(0, len(data), job.MICRO_BATCH)]
        found = [job.total_of(net, collate([data[i] for i in chunk]), variant) for chunk in chunks]
    return sum(total.item() for total, _ in found) / sum(n for _, n in found)


def drawn_ids(step: int) -> list[int]:
    """Those of a step, of what the sampler gives in one epoch after the other."""
    ids: list[int] = []
    epoch = 0
    while len(ids) < (step + 1) * job.GLOBAL_BATCH:
        torch.manual_seed(job.SEED * 1_000_003 + epoch)
        ids += job.sampler_of("weighted")
        epoch += 1
    return ids[step * job.GLOBAL_BATCH : (step + 1) * job.GLOBAL_BATCH]


def differences(variant: str, found: dict[int, dict[str, Any]], n_steps: int = job.N_STEPS) -> dict[int, float]:
    """rank -> the largest, over all that it has written; infinite for what it has not, or should not have. Of a model that is
    sharded over n ranks each has the part that torch.chunk gives the rank of its number, round n."""
    base, *how = variant.split("+")
    base, _, n_shards = base.partition("/")
    expected = trained("+".join([base, *how[:1]]), n_steps)  # however many processes read
    n = int(n_shards or 1)
    return {rank: _difference(one, expected, rank % n, n) for rank, one in found.items()}


def _difference(found: dict[str, Any], expected: dict[str, Any], shard: int, n: int) -> float:
    if found["state"].keys() != expected["state"].keys() or not found["losses"].keys() <= expected["losses"].keys():
        return float("inf")
    parts = {name: _part(value, shard, n) if is_sharded(name) else value for name, value in expected["state"].items()}
    if any(value.shape != parts[name].shape for name, value in found["state"].items()):
        return float("inf")
    pairs = [(value, parts[name]) for name, value in found["state"].items() if value.numel()]
    pairs += [(torch.tensor(loss), torch.tensor(expected["losses"][step])) for step, loss in found["losses"].items()]
    pairs += [(torch.tensor(its), torch.tensor(expected["averaged"][step])) for step, its in found.get("averaged", {}).items()]
    pairs += [(torch.tensor(found["validation"]), torch.tensor(expected["validation"]))]
    return max((mine.double() - its.double()).abs().max().item() for mine, its in pairs)


def is_sharded(name: str) -> bool:
    """Whether it has the form of a parameter: buffers, counts of steps and rates are whole on each rank."""
    return not any(each in name for each in ("running", "num_batches", ".step", "rate", "scale"))


def _part(value: torch.Tensor, shard: int, n: int) -> torch.Tensor:
    chunks = value.chunk(n)
    return chunks[shard] if shard < len(chunks) else value[:0]
