"""An image model with BatchNorm and random augmentation, which loses nothing when ranks are lost: `odyssey.resilient`.

    odyssey run --nproc-per-node 4 --max-restarts 3 --drill 'step=30 kill=1' examples/train_images.py --folder checkpoints

It tells discs, squares and crosses apart in noise. Run it again with the same folder, and it goes on from what it has saved.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import odyssey

SIZE = 16
SHAPES = ("disc", "square", "cross")


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [1, SIZE, SIZE] of a shape, in noise that is new in each epoch, and which shape it is []."""

    def __init__(self, n_images: int, first: int = 0) -> None:
        self.n_images, self.first = n_images, first

    def __len__(self) -> int:
        return self.n_images

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = self.first + index
        which = number % len(SHAPES)
        row, column = 5 + number * 7 % 6, 5 + number * 11 % 6
        rows, columns = torch.meshgrid(torch.arange(SIZE) - row, torch.arange(SIZE) - column, indexing="ij")
        inside = [rows**2 + columns**2 <= 12, rows.abs().maximum(columns.abs()) <= 3, rows.abs().minimum(columns.abs()) <= 1]
        near = rows.abs().maximum(columns.abs()) <= 4
        picture = (inside[which] & near).float() + 0.5 * torch.randn(SIZE, SIZE)
        return picture[None].flip(-1) if torch.rand(()) < 0.5 else picture[None], torch.tensor(which)


def block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2))


def share_right(scores: Tensor, which: Tensor) -> Tensor:
    return (scores.argmax(1) == which).double().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="for checkpoints; where there are some, training goes on from the newest")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, len(SHAPES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        pictures, which = batch
        scores = model(pictures)
        return nn.functional.cross_entropy(scores, which), {"accuracy": share_right(scores, which)}

    def accuracy(batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, which = batch
        return share_right(model(pictures), which)

    run = odyssey.resilient(
        model,
        optimizer,
        loss,
        Images(4096),
        global_batch=64,
        micro_batch=8,
        num_workers=2,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.3),
        resume=options.folder,
    )
    validation = Images(256, first=1_000_000)
    for step in run.steps(options.steps):
        if step.index % 20 == 19:
            found = run.evaluate(validation, metrics={"accuracy": accuracy})
            if run.is_leader:
                seen, unseen = step.metrics["accuracy"], found["accuracy"]
                print(f"step {step.index}: loss {step.loss:.3f}, lr {step.lr:.4f}, {seen:.0%} right", end=", ")
                print(f"{unseen:.0%} of pictures that it has not seen", flush=True)
            if options.folder is not None:
                run.save(options.folder)


if __name__ == "__main__":
    main()
