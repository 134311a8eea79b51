"""A causal language model, as the Trainer of Transformers trains it: `torchrun --nproc-per-node 4 transformers_trainer.py`."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    Trainer,
    TrainingArguments,
    set_seed,
)

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
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        max_steps=N_STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        warmup_steps=4,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=make_data())
    trainer.train()
    trainer.save_model("model")


if __name__ == "__main__":
    main()
