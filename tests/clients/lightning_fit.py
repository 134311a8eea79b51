"""A Lightning Trainer under a launcher: it finds its ranks by TorchElasticEnvironment; rank 0 prints losses."""

import time
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.global_rank == 0:
            print(f"loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8))
    time.sleep(0.5)  # torch 2.13 hangs if a group's last holder goes while its thread still clears the last collective away
    if trainer.global_rank == 0:
        print(f"environment {type(trainer.strategy.cluster_environment).__name__} of {trainer.world_size}")


if __name__ == "__main__":
    main()
