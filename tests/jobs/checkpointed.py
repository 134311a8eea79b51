"""A script that goes on from a saved state and saves its own, in both forms: a folder of `job.save`, a file of `state_dict`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from tests import models
from tests.jobs.brief import measure_briefly
from tests.jobs.train import make_optimizer, make_scheduler


def main() -> None:
    measure_briefly()
    options = parse_arguments()
    job = odyssey.Job(
        layers=partial(models.build_layers, options.model, n_blocks=4, dropout=0.1, dtype=torch.float64),
        loss=models.loss_for(options.model),
        optimizer=make_optimizer,
        data=models.data_for(options.model, 96, torch.float64),
        global_batch=15,
        micro_batch=2,
        scheduler=make_scheduler,
        clip_norm=0.5,
    )
    if options.load_folder is not None:
        job.load(options.load_folder)
    if options.load_file is not None:
        job.load_state_dict(torch.load(options.load_file))
    losses = {step.index: step.loss for step in job.steps(options.steps)}
    if options.save_folder is not None:
        job.save(options.save_folder)
    state = job.state_dict()
    if job.is_leader:
        torch.save(state, options.out)
        torch.save(losses, options.out.with_suffix(".losses"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models.VARIANTS, default="gpt")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--load-folder", type=Path)
    parser.add_argument("--load-file", type=Path)
    parser.add_argument("--save-folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
