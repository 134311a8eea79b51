"""The benchmarks' model on `odyssey.Job`."""

from __future__ import annotations

import gpt

import odyssey
from odyssey import buckets


def main() -> None:
    options = gpt.parse_arguments()
    buckets.BUCKET_BYTES = options.bucket_bytes
    job = odyssey.Job(
        layers=lambda: gpt.build_layers(options),
        loss=gpt.loss_fn,
        optimizer=gpt.make_optimizer,
        data=gpt.make_data(options),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        clip_norm=gpt.CLIP_NORM,
    )
    marks = gpt.open_marks(options.marks)
    for step in job.steps(options.steps):
        gpt.mark(marks, step.index)


if __name__ == "__main__":
    main()
