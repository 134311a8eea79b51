"""The benchmarks' model as two pipelines of two stages, written plainly on torch.distributed: 1F1B, one all-reduce a stage.

What one would write by hand for this layout and nothing else: no plan, no interruption, no commit, no checks. It is
what our engine's cost is measured against. Ranks 0 and 1 are the first pipeline, 2 and 3 the second.
"""

from __future__ import annotations

import argparse

import gpt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

N_RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--split", type=int, required=True, help="number of layers in the first stage")
    options = gpt.parse_arguments(parser)
    dist.init_process_group("gloo")
    if dist.get_world_size() != N_RANKS:
        raise SystemExit(f"needs {N_RANKS} ranks, got {dist.get_world_size()}")
    pipeline, stage = divmod(dist.get_rank(), 2)
    replicas = [dist.new_group([stage_of, stage_of + 2]) for stage_of in range(2)][stage]
    torch.manual_seed(0)
    layers = gpt.build_layers(options)
    model = nn.Sequential(*(layers[: options.split] if stage == 0 else layers[options.split :]))
    optimizer = gpt.make_optimizer(model.parameters())
    data = gpt.make_data(options)
    generator = torch.Generator()
    marks = gpt.open_marks(options.marks)
    order = torch.randperm(len(data), generator=generator.manual_seed(0)).tolist()
    n_own = options.global_batch // options.micro_batch // 2
    run_stage = first_stage if stage == 0 else last_stage
    for step in range(options.steps):
        start = step * options.global_batch + pipeline * n_own * options.micro_batch
        batches = [
            [order[i % len(order)] for i in range(start + k * options.micro_batch, start + (k + 1) * options.micro_batch)]
            for k in range(n_own)
        ]
        loss = run_stage(model, [default_collate([data[i] for i in batch]) for batch in batches], options)
        finish_step(model, optimizer, replicas, options, loss)
        gpt.mark(marks, step)
    dist.destroy_process_group()


def first_stage(model: nn.Module, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> Tensor:
    """One forward of warm-up, then one forward and one backward in turn."""
    peer = dist.get_rank() + 1
    shape = (options.micro_batch, options.context, options.width)
    outputs: list[Tensor] = []
    sends: list[dist.Work] = []

    def forward(k: int) -> None:
        outputs.append(model(batches[k][0]))
        sends.append(dist.isend(outputs[k].detach(), peer))

    def backward(k: int) -> None:
        arrivals[k].wait()
        outputs[k].backward(gradients[k])

    gradients = [torch.empty(shape) for _ in batches]
    arrivals = [dist.irecv(gradient, peer) for gradient in gradients]
    forward(0)
    for k in range(1, len(batches)):
        forward(k)
        backward(k - 1)
    backward(len(batches) - 1)
    for send in sends:
        send.wait()
    return torch.zeros(())


def last_stage(model: nn.Module, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> Tensor:
    """No warm-up: the backward of a micro-batch follows its forward."""
    peer = dist.get_rank() - 1
    shape = (options.micro_batch, options.context, options.width)
    inputs = [torch.empty(shape) for _ in batches]
    arrivals = [dist.irecv(each, peer) for each in inputs]
    sends: list[dist.Work] = []
    total = torch.zeros(())
    for k, (_, target) in enumerate(batches):
        arrivals[k].wait()
        inputs[k].requires_grad_()
        loss = gpt.loss_fn(model(inputs[k]), target) * len(target)
        loss.backward()
        sends.append(dist.isend(inputs[k].grad, peer))
        total += loss.detach()
    for send in sends:
        send.wait()
    return total


def finish_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, replicas: dist.ProcessGroup, options: argparse.Namespace, loss: Tensor
) -> None:
    """Sum gradients over the two replicas of the stage, clip by the norm over both stages, step."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=replicas)
    flat /= options.global_batch
    totals = torch.stack([flat.square().sum() / 2, loss])  # each stage's squares arrive twice, once from each replica
    dist.all_reduce(totals)
    norm = totals[0].sqrt().item()
    flat *= min(1.0, gpt.CLIP_NORM / (norm + 1e-6))
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
