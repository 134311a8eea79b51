"""A causal language model of Hugging Face, fine-tuned on local text, which loses nothing when ranks are lost.

    python examples/fine_tune.py
    odyssey run --nproc-per-node 4 --max-restarts 3 --drill 'step=20 kill=2' examples/fine_tune.py --output model

It needs `transformers`, and no network. `--model model` goes on with what an earlier run has written there. Every rank has the
whole model, by `odyssey.resilient`; `--pipeline` cuts it into layers instead, of which each rank holds some.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup

import odyssey

N_BYTES = 256  # the vocabulary
DOCS = Path(__file__).resolve().parents[1] / "docs"


class Text:
    """Windows of `context` bytes, without overlap, over the files of a folder and of those in it."""

    def __init__(self, folder: Path, context: int, *, validation: bool) -> None:
        """`validation`: every tenth file, which training never sees; otherwise all the others."""
        files = sorted(folder.rglob("*.md")) + sorted(folder.rglob("*.txt"))
        text = b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 10 == 9) == validation)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.bytes) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """What the model is called with: `[context]` each. It moves the labels by one itself."""
        window = self.bytes[index * self.context : (index + 1) * self.context].long()
        return {"input_ids": window, "labels": window}


def build_model(folder: Path | None) -> nn.Module:
    """The model in a folder, or a small one that has learnt nothing."""
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        return model.train()  # it comes in evaluation mode
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": N_BYTES, "n_positions": 512, "n_embd": 96, "n_layer": 4, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # there is little text, and little time
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config)


def whole(options: argparse.Namespace, given: dict[str, Any]) -> tuple[odyssey.Job, Callable[[], None]]:
    """Every rank holds the whole model. Also what writes it into the folder `--output`."""
    model = build_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    run = odyssey.resilient(model, optimizer, lambda batch: model(**batch).loss, scheduler=scheduler, **given)
    return run, lambda: run.once(lambda: model.save_pretrained(options.output))


def in_pipelines(options: argparse.Namespace, given: dict[str, Any]) -> tuple[odyssey.Job, Callable[[], None]]:
    """Each rank holds some of the layers. As the labels are in the input, the last layer gives the model's own loss."""
    job = odyssey.Job(
        layers=lambda: odyssey.layers_of(build_model(options.model)),
        loss=lambda loss, labels: loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.lr),
        scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps),
        collate=input_and_labels,
        **given,
    )

    def write(state: dict[str, Any]) -> None:
        model = build_model(options.model)
        model.load_state_dict({name.split(".", 3)[3]: value for name, value in state["model"].items()})
        model.save_pretrained(options.output)

    return job, lambda: job.once_with_state(write)


def input_and_labels(samples: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    batch = default_collate(samples)
    return batch, batch["labels"]


def main() -> None:
    options = parse_arguments()
    given = {
        "data": Text(options.text, options.context, validation=False),
        "global_batch": options.global_batch,
        "micro_batch": options.micro_batch,
        "clip_norm": 1.0,
        "autocast": torch.bfloat16 if options.bf16 else None,
        "resume": options.save,
    }
    run, write = in_pipelines(options, given) if options.pipeline else whole(options, given)
    validation = Text(options.text, options.context, validation=True)
    for step in run.steps(options.steps):
        if run.is_leader:
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
        if (step.index + 1) % options.eval_every == 0 or step.index + 1 == options.steps:
            loss = run.evaluate(validation)
            if run.is_leader:
                print(f"step {step.index}: validation loss {loss:.4f}", flush=True)
            if options.save is not None:
                run.save(options.save)
    if options.output is not None:
        write()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="fine-tune the model there, which has a token for each byte")
    parser.add_argument("--text", type=Path, default=DOCS, metavar="DIR", help="of .md and .txt files (default: these docs)")
    parser.add_argument("--pipeline", action="store_true", help="cut the model into layers, of which each rank holds some")
    parser.add_argument("--bf16", action="store_true", help="compute in mixed precision")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=128, help="bytes a sample (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=20, help="steps between validations and saves (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save checkpoints there, and go on from the newest one")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the model there at the end, for from_pretrained")
    return parser.parse_args()


if __name__ == "__main__":
    main()
