"""A tiny GPT-2 of transformers, trained by DDP, with all of Lightning imported: seconds of imports, milliseconds a step."""

from __future__ import annotations

import first_line
import gpt
import lightning
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

first_line.note()


def main() -> None:
    options = gpt.parse_arguments()
    dist.init_process_group("gloo")
    lightning.seed_everything(dist.get_rank(), verbose=False)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    marks = gpt.open_marks(options.marks)
    for step in range(options.steps):
        tokens = torch.randint(0, 256, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gpt.mark(marks, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
