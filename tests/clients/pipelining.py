"""torch.distributed.pipelining: one stage a rank, GPipe; the last rank's losses are printed by rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    device = torch.device("cpu")
    stage = PipelineStage(stage_module, rank, n_ranks, device)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
    torch.manual_seed(100)
    for _ in range(3):
        x, target = torch.randn(16, 8), torch.randn(16, 8)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == n_ranks - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(mean, n_ranks - 1)
        if rank == 0:
            print(f"loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
