"""Trains a small Llama of transformers in layers, on sequences of which some are padded: `hugging_face.py OUT`."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import odyssey
from tests import models
from tests.jobs.brief import measure_briefly
from tests.jobs.resumed import write
from tests.jobs.train import make_optimizer

N_STEPS = 30
"""Enough for a drill at the fourth, whose agent may be late."""
GIVEN = {"global_batch": 12, "micro_batch": 2, "seed": 3, "clip_norm": 0.5}
SIZES = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


class PaddedData(models.TokenData):
    """Every third sequence ends with padding, which is no target."""

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        ids, target = super().__getitem__(index)
        mask = torch.ones_like(ids)
        if index % 3 == 0:
            mask[5:] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}, target.where(mask.bool(), -100)


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).double()


def main(out: Path) -> None:
    measure_briefly()
    job = odyssey.Job(lambda: odyssey.layers_of(llama()), models.token_loss, make_optimizer, PaddedData(), **GIVEN)
    losses = {}
    for step in job.steps(N_STEPS):
        losses[step.index] = step.loss
        if job.is_leader:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        time.sleep(0.05)  # for what a drill does at a step
    job.once_with_state(partial(write, out, losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
