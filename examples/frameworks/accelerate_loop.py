"""A classifier of texts in Accelerate's loop, as its nlp_example: `torchrun --nproc-per-node 4 accelerate_loop.py`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig, get_linear_schedule_with_warmup

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
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_loader = DataLoader(Texts(480), shuffle=True, collate_fn=pad, batch_size=8)
    eval_loader = DataLoader(Texts(96, first=1_000_000), collate_fn=pad, batch_size=8)
    scheduler = get_linear_schedule_with_warmup(optimizer, 16, N_EPOCHS * len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(N_EPOCHS):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                losses.append(accelerator.gather(model(**batch).loss.reshape(1)))
        accelerator.print(f"epoch {epoch}: validation loss {torch.cat(losses).mean():.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
