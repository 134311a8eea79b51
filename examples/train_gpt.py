"""A small GPT that learns to write Python from the standard library's own source, byte by byte.

    python examples/train_gpt.py                               one process
    odyssey run --nodes 4 examples/train_gpt.py                four, and any of them may be killed at any time

What a script has to do for that is in `main`: hand its layers, its data and its optimizer to `odyssey.Job`, and loop.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

import odyssey

N_BYTES = 256  # the vocabulary


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(N_BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, width]."""
        return self.token(tokens) + self.position[: tokens.shape[1]]


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, n_heads), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Head(nn.Module):
    def __init__(self, width: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = weight  # the embedding's own: the two layers may well live on different ranks

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> logits [batch, seq, byte]."""
        return functional.linear(self.norm(x), self.weight)


def build_layers(n_blocks: int, width: int, n_heads: int, context: int) -> list[nn.Module]:
    embedding = Embedding(width, context)
    return [embedding, *(Block(width, n_heads) for _ in range(n_blocks)), Head(width, embedding.token.weight)]


class SourceCode:
    """Windows of `context` bytes, without overlap, over the standard library's files (the tests left out)."""

    def __init__(self, context: int, *, validation: bool) -> None:
        """`validation`: every tenth file, which training never sees; otherwise all the others."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 10 == 9) == validation)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target), both `[context]`: the target is the next byte."""
        start = index * self.context
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy, nats a byte."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def warm_up_then_cosine(step: int, n_steps: int) -> float:
    """Factor of the learning rate: linear over a tenth of the steps, then half a cosine down to a tenth."""
    n_warm_up = max(1, n_steps // 10)
    if step < n_warm_up:
        return (step + 1) / n_warm_up
    done = (step - n_warm_up) / max(1, n_steps - n_warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def main() -> None:
    options = parse_arguments()
    unseen = SourceCode(options.context, validation=True)
    validation = Subset(unseen, range(0, len(unseen), len(unseen) // 256))  # enough to see it fall
    factor = partial(warm_up_then_cosine, n_steps=options.steps)
    job = odyssey.Job(
        layers=lambda: build_layers(options.layers, options.width, options.heads, options.context),
        loss=loss_fn,
        optimizer=lambda params: torch.optim.AdamW(params, lr=options.lr, weight_decay=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        data=SourceCode(options.context, validation=False),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        clip_norm=1.0,
        resume=options.save,
    )
    losses: dict[int, float] = {}
    started = time.perf_counter()
    for step in job.steps(options.steps):
        losses[step.index] = step.loss
        seconds, started = time.perf_counter() - started, time.perf_counter()
        if job.is_leader:
            print(f"step {step.index}  loss {step.loss:.4f}  {step.n_samples / seconds:.0f} samples/s", flush=True)
        if (step.index + 1) % options.eval_every == 0 or step.index + 1 == options.steps:
            loss = job.evaluate(validation)
            if job.is_leader:
                print(f"step {step.index}  validation loss {loss:.4f}", flush=True)
            if options.save is not None:
                job.save(options.save)
            started = time.perf_counter()
    if options.out is not None:
        job.once(lambda: write_losses(options.out, losses))  # by one rank, whoever is lost: the file is there afterwards


def write_losses(path: Path, losses: dict[int, float]) -> None:
    """Beside, and then in its place: a rank that is lost while it writes leaves no half of a file."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps({"losses": losses}) + "\n")
    beside.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (default %(default)s)")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes a sample (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=30, help="steps between validations and saves (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save checkpoints there, and go on from the newest one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all losses there as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
