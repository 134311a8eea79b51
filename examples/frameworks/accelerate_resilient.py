"""A classifier of texts by ranks that may be lost: `odyssey run --nproc-per-node 4 accelerate_resilient.py`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, get_linear_schedule_with_warmup

import odyssey

N_EPOCHS = 3


class Texts:
    """Tokens of 4 to 11, and whether there are more of the upper half of the vocabulary."""

    def __init__(self, n_texts: int, first: int = 0) -> None:
        self.n_texts, self.first = n_texts, first

    def __len__(self) -> int:
        return self.n_texts

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(1, 64, (4 + index % 8,), generator=generator)
        return tokens, (tokens >= 32).float().mean().round().long()


def pad(texts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([each for each, _ in texts], batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": torch.stack([label for _, label in texts])}


def build_model() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=64, **sizes))


def main() -> None:
    set_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, N_EPOCHS * 15)
    given = {"global_batch": 32, "micro_batch": 8, "collate": pad, "scheduler": scheduler}
    run = odyssey.resilient(model, optimizer, lambda batch: model(**batch).loss, Texts(480), **given)
    for step in run.steps(N_EPOCHS * 15):
        if run.is_leader:
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
        if (step.index + 1) % 15 == 0:
            loss = run.evaluate(Texts(96, first=1_000_000))
            if run.is_leader:
                print(f"epoch {step.index // 15}: validation loss {loss:.4f}", flush=True)
    run.once(lambda: torch.save(model.state_dict(), "model.pt"))


if __name__ == "__main__":
    main()
