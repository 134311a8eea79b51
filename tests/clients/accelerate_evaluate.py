"""An Accelerate script under a launcher, which gathers only what it evaluates; rank 0 prints losses."""

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
    for _ in range(3):
        model.train()
        for x, y in data:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        for x, y in data:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics((model(x) - y).square()))
        accelerator.print(f"loss {torch.cat(losses).mean().item():.6f}")
    time.sleep(0.5)  # torch 2.13 hangs if a group's last holder goes while its thread still clears the last collective away
    accelerator.end_training()


if __name__ == "__main__":
    main()
