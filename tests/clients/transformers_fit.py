"""A small transformers model built from its configuration, trained by DistributedDataParallel; rank 0 prints losses."""

import time

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = torch.nn.parallel.DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 64, (4, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.5f}")
    time.sleep(0.5)  # torch 2.13 hangs if a group's last holder goes while its thread still clears the last collective away
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
