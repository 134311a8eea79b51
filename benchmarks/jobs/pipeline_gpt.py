"""The benchmarks' model in pipelines, written plainly on torch.distributed: the ops of each stage in a given order, one
all-reduce for each bucket of gradients.

What one would write by hand for such a schedule and nothing else: no plan, no interruption, no commit, no checks. It is
what our engine's cost is measured against. Ranks of a pipeline follow each other.
"""

from __future__ import annotations

import argparse

import gpt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.data import default_collate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", required=True, help="layers at which the second, third, … stage begin: 1,3")
    parser.add_argument("--orders", required=True, help="ops of each stage: 'F0 F1 B0 B1,F0 B0 F1 B1'")
    options = gpt.parse_arguments(parser)
    dist.init_process_group("gloo")
    cuts = [0, *(int(cut) for cut in options.cuts.split(",")), options.blocks + 2]
    orders = [[(op[0], int(op[1:])) for op in order.split()] for order in options.orders.split(",")]
    n_pipelines = dist.get_world_size() // len(orders)
    pipeline, number = divmod(dist.get_rank(), len(orders))
    replicas = [dist.new_group(list(range(s, dist.get_world_size(), len(orders)))) for s in range(len(orders))][number]
    torch.manual_seed(0)
    stage = Stage(gpt.build_layers(options)[cuts[number] : cuts[number + 1]], number, len(orders), replicas, options)
    optimizer = gpt.make_optimizer(stage.model.parameters())
    data = gpt.make_data(options)
    marks = gpt.open_marks(options.marks)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    n_own = options.global_batch // options.micro_batch // n_pipelines
    for step in range(options.steps):
        start = step * options.global_batch + pipeline * n_own * options.micro_batch
        batches = [
            [order[i % len(order)] for i in range(start + k * options.micro_batch, start + (k + 1) * options.micro_batch)]
            for k in range(n_own)
        ]
        loss = stage.run(orders[number], [default_collate([data[i] for i in batch]) for batch in batches])
        finish_step(stage, optimizer, n_pipelines, options, loss)
        gpt.mark(marks, step)
    dist.destroy_process_group()


class Stage:
    """Layers of the model, and the flat buffer that their gradients are summed in, from the last layer down."""

    def __init__(
        self, layers: list[nn.Module], number: int, n_stages: int, replicas: dist.ProcessGroup, options: argparse.Namespace
    ) -> None:
        self.model = nn.Sequential(*layers)
        self.is_first, self.is_last = number == 0, number == n_stages - 1
        self.shape = (options.micro_batch, options.context, options.width)
        self.parameters = list(self.model.parameters())
        self.buckets = Buckets(layers, replicas, options.bucket_bytes)

    def run(self, order: list[tuple[str, int]], batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """All micro-batches forward and backward, and the sums over the replicas; returns the sum of losses."""
        above, below = dist.get_rank() - 1, dist.get_rank() + 1
        inputs = [batch[0] if self.is_first else torch.empty(self.shape) for batch in batches]
        gradients = [None if self.is_last else torch.empty(self.shape) for _ in batches]
        arrivals = {} if self.is_first else {("F", k): dist.irecv(each, above, tag=k) for k, each in enumerate(inputs)}
        arrivals |= {} if self.is_last else {("B", k): dist.irecv(each, below, tag=k) for k, each in enumerate(gradients)}
        outputs: dict[int, Tensor] = {}
        halves: dict[int, list] = {}
        sends: list[dist.Work] = []
        total = torch.zeros(())
        for position, (kind, k) in enumerate(order):
            if kind == "F":
                if not self.is_first:
                    arrivals["F", k].wait()
                    inputs[k].requires_grad_()
                output = self.model(inputs[k])
                if self.is_last:
                    output = gpt.loss_fn(output, batches[k][1]) * len(batches[k][1])
                    total += output.detach()
                else:
                    sends.append(dist.isend(output.detach(), below, tag=k))
                outputs[k] = output
                continue
            if position == len(order) - 1:
                self.buckets.are_last = True
            if kind in ("B", "I") and not self.is_last:
                arrivals["B", k].wait()
            if kind == "I" and not self.is_first:
                given = None if self.is_last else [gradients[k]]
                _, halves[k] = stage_backward_input([outputs.pop(k)], given, [inputs[k]], iter(self.parameters))
            elif kind == "B" or (kind == "W" and self.is_first):  # the model's own input has no gradient
                outputs.pop(k).backward(gradients[k])
            elif kind == "W":
                stage_backward_weight(iter(self.parameters), halves.pop(k))
            if kind in ("B", "I") and not self.is_first:
                sends.append(dist.isend(inputs[k].grad, above, tag=k))
        self.buckets.finish()
        for send in sends:
            send.wait()
        return total


class Buckets:
    """Gradients in one flat buffer, summed over the replicas bucket by bucket as a last backward completes them.

    `are_last`: what is added to gradients now is the last of the step.
    """

    def __init__(self, layers: list[nn.Module], replicas: dist.ProcessGroup, bucket_bytes: int) -> None:
        parameters = [list(layer.parameters()) for layer in reversed(layers)]
        self.flat = torch.zeros(sum(p.numel() for its in parameters for p in its))
        self.are_last = False
        self._replicas = replicas
        self._works: list[dist.Work] = []
        self._parts: list[Tensor] = []
        self._sizes: list[int] = []
        start = at = size = 0
        for i, its in enumerate(parameters):
            for parameter in its:
                parameter.grad = self.flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                bucket = len(self._parts)
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._complete(bucket))
            size += len(its)
            if (at - start) * self.flat.element_size() >= bucket_bytes or i == len(parameters) - 1:
                self._parts.append(self.flat[start:at])
                self._sizes.append(size)
                start, size = at, 0
        self.begin()

    def begin(self) -> None:
        self.flat.zero_()
        self.are_last = False
        self._missing = list(self._sizes)

    def finish(self) -> None:
        """Start what is left, and wait for all."""
        while len(self._works) < len(self._parts):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works = []

    def _complete(self, bucket: int) -> None:
        """One more parameter of a bucket has its whole gradient."""
        if self.are_last:
            self._missing[bucket] -= 1
            while len(self._works) < len(self._parts) and self._missing[len(self._works)] == 0:
                self._start_next()

    def _start_next(self) -> None:
        part = self._parts[len(self._works)]
        self._works.append(dist.all_reduce(part, group=self._replicas, async_op=True))


def finish_step(
    stage: Stage, optimizer: torch.optim.Optimizer, n_pipelines: int, options: argparse.Namespace, loss: Tensor
) -> None:
    """Clip the summed gradients by the norm over all stages, step."""
    flat = stage.buckets.flat
    flat /= options.global_batch
    totals = torch.stack([flat.square().sum() / n_pipelines, loss])  # each stage's squares arrive once from each replica
    dist.all_reduce(totals)
    norm = totals[0].sqrt().item()
    flat *= min(1.0, gpt.CLIP_NORM / (norm + 1e-6))
    optimizer.step()
    stage.buckets.begin()


if __name__ == "__main__":
    main()
