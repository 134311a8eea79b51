"""A LightningModule, trained by ranks that may be lost: `odyssey run --nproc-per-node 4 lightning_resilient.py`."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import odyssey

N_STEPS = 48


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, which = batch
        loss = nn.functional.cross_entropy(self.net(points), which)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, N_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(240, 6, generator=generator)
    return TensorDataset(points, points[:, :3].argmax(1))


def main() -> None:
    lightning.seed_everything(0)
    module = Classifier()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    given = {"global_batch": 32, "micro_batch": 8, "scheduler": scheduler, "clip_norm": 1.0}
    run = odyssey.resilient(module, optimizer, lambda batch: module.training_step(batch, 0), make_data(), **given)
    for step in run.steps(N_STEPS):
        if run.is_leader:
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
    run.once(lambda: torch.save(module.state_dict(), "module.pt"))


if __name__ == "__main__":
    main()
