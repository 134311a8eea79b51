"""An Accelerate script under a launcher; rank 0 prints losses, gathered over all ranks."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"loss {mean.item():.6f}")
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}")
    time.sleep(0.5)  # torch 2.13 hangs if a group's last holder goes while its thread still clears the last collective away
    accelerator.end_training()


if __name__ == "__main__":
    main()
