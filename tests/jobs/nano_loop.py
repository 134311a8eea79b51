"""A loop as nanoGPT has it, with a model of a few thousand parameters: `nano_loop.py FOLDER RANK:STEP:MICRO_STEP`.

Accumulation by `require_backward_grad_sync`, a compiled model, a scaler, clipping, a rate that warms up and decays, batches
that each rank draws, evaluation and checkpoints by the first rank alone. It knows nothing of Odyssey, but for where a rank
ends itself. Each rank writes its model into FOLDER/RANK.pt at the end, with how many ranks made each step.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

N_STEPS, N_ACCUMULATED, BATCH, BLOCK, WIDTH, N_TOKENS = 12, 2, 3, 8, 16, 11
WARM_UP, RATE, MIN_RATE, CLIP = 3, 0.5, 0.05, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in self.qkv(self.first(hidden)).chunk(3, -1)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


class Net(nn.Module):
    """Its embedding is its head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(N_TOKENS, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def model() -> Net:
    torch.manual_seed(1337)
    return Net().double()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """With SGD a wrong divisor shows."""
    return torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=0.01)


def rate_at(step: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    return MIN_RATE + 0.5 * (RATE - MIN_RATE) * (1 + math.cos(math.pi * (step - WARM_UP) / (N_STEPS - WARM_UP)))


def generator_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1337 + rank)


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of a text that repeats itself."""
    starts = torch.randint(100, (BATCH, 1), generator=generator)
    places = starts + torch.arange(BLOCK + 1)
    ids = (places * places + 3 * places) % N_TOKENS
    return ids[:, :-1], ids[:, 1:]


def main() -> None:
    folder, kill = Path(sys.argv[1]), tuple(map(int, sys.argv[2].split(":"))) if sys.argv[2:] else None
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    is_master = rank == 0
    generator = generator_of(rank)
    raw_model = model()
    steps = optimizer(raw_model)
    net = DistributedDataParallel(torch.compile(raw_model, backend="aot_eager"))
    scaler = torch.amp.GradScaler("cpu", 2.0**8, growth_interval=4)
    made_by = []
    ids, targets = batch(generator)
    for step in range(N_STEPS):
        for group in steps.param_groups:
            group["lr"] = rate_at(step)
        if is_master and step % 4 == 0:
            raw_model.eval()
            with torch.no_grad():
                loss = raw_model(*batch(torch.Generator().manual_seed(0)))
            raw_model.train()
            print(f"step {step}: val loss {loss.item():.4f}", flush=True)
            torch.save({"model": raw_model.state_dict(), "optimizer": steps.state_dict(), "iter_num": step}, folder / "ckpt.pt")
        for micro_step in range(N_ACCUMULATED):
            if kill == (rank, step, micro_step):
                os.kill(os.getpid(), signal.SIGKILL)
            net.require_backward_grad_sync = micro_step == N_ACCUMULATED - 1
            loss = net(ids, targets) / N_ACCUMULATED
            ids, targets = batch(generator)  # the next one, while the model computes
            scaler.scale(loss).backward()
        made_by.append(dist.get_world_size())
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad(set_to_none=True)
    torch.save({"model": raw_model.state_dict(), "by": made_by}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
