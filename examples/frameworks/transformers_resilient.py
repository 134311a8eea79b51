"""A causal language model, trained by ranks that may be lost: `odyssey run --nproc-per-node 4 transformers_resilient.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    get_linear_schedule_with_warmup,
    set_seed,
)

import odyssey

N_STEPS = 40
DOCS = Path(__file__).resolve().parents[2] / "docs"

tokenizer = ByT5Tokenizer(extra_ids=0)  # a token for each byte; it needs no files


def make_data() -> list[BatchEncoding]:
    lines = [line for line in (DOCS / "internals" / "recovery.md").read_text().splitlines() if len(line) > 20]
    return [tokenizer(line, truncation=True, max_length=40) for line in lines]


def build_model() -> nn.Module:
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, **ends)
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    set_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, N_STEPS)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    given = {"global_batch": 16, "micro_batch": 4, "collate": collator, "scheduler": scheduler, "clip_norm": 1.0}
    run = odyssey.resilient(model, optimizer, lambda batch: model(**batch).loss, make_data(), **given)
    for step in run.steps(N_STEPS):
        if run.is_leader:
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
    run.once(lambda: model.save_pretrained("model"))


if __name__ == "__main__":
    main()
