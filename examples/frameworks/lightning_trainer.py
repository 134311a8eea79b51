"""A LightningModule, as Lightning's own Trainer trains it: `torchrun --nproc-per-node 4 lightning_trainer.py`."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        max_steps=N_STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "module.pt")


if __name__ == "__main__":
    main()
