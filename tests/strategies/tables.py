"""Tables of searches in random situations, one line each: `python -m tests.strategies.tables FIRST STOP`.

The first line says whether the kernel is compiled. The lines of two processes are equal if all that their searches found is.
"""

from __future__ import annotations

import hashlib
import random
import sys

import msgspec

from odyssey import kernel
from odyssey.errors import StateLost
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Candidate, Objective
from tests.planning import situation


def drawn_layer(draw: random.Random, number: int, has_halves: bool) -> LayerProfile:
    backward = draw.uniform(0.01, 0.03)
    of_input = draw.uniform(0.3, 0.7) * backward if has_halves else backward
    return LayerProfile(
        name=f"layer {number}",
        digest=f"digest {number}",
        forward_s=draw.uniform(0.005, 0.015),
        input_gradient_s=0.0 if number == 0 and draw.random() < 0.5 else of_input,
        weight_gradient_s=backward - of_input,
        optimizer_s=0.001,
        parameter_bytes=draw.randrange(10**6, 10**8),
        gradient_bytes=draw.randrange(10**6, 10**8),
        optimizer_bytes=draw.randrange(10**6, 10**8),
        buffer_bytes=0,
        activation_bytes=draw.randrange(10**5, 10**8),
        output_bytes=draw.randrange(10**4, 10**7),
    )


def drawn_profile(draw: random.Random, n_workers: int) -> Profile:
    has_halves, micro_batch = draw.random() < 0.7, draw.choice((1, 2, 4))
    layers = tuple(drawn_layer(draw, i, has_halves) for i in range(draw.randint(3, 16)))
    whole = sum(layer.state_bytes + layer.gradient_bytes + 4 * layer.activation_bytes for layer in layers)
    between = Link(2e-5, draw.uniform(0.2, 5) * 1e9)
    return Profile(
        model="drawn",
        micro_batch=micro_batch,
        global_batch=draw.randint(n_workers, 4 * n_workers) * micro_batch - draw.randrange(micro_batch),
        layers=layers,
        ties=((0, len(layers) - 1),) if draw.random() < 0.3 else (),
        tie_bytes=(),
        loss_s=0.001,
        op_overhead_s=draw.choice((0.0, 5e-5)),
        commit_s=1e-4,
        runtime_bytes=10**8,
        cluster=Cluster(
            ranks_per_node=draw.choice((1, 2, 4, 8)),
            nodes_per_host=1,
            cores=draw.choice((None, None, None, None, 4)),
            memory_bytes=round(whole * draw.choice((0.5, 1.0, 3.0))) + 5 * 10**8,
            intra_host=draw.choice((between, Link(1e-5, 2e10))),
            inter_host=between,
            interface_bandwidth=draw.choice((None, between.bandwidth * 2)),
        ),
        recovery=Recovery(),
        halves_scale=draw.choice((1.0, 1.0, 1.1)),
        uncut=draw.choice(("", "the model draws")),
    )


def tables(seed: int) -> list[list[Candidate]]:
    """Tables of a first plan, and of up to two losses that follow each other."""
    draw = random.Random(seed)
    n_workers = draw.choice((4, 6, 8, 8, 12, 16, 24))
    of = drawn_profile(draw, n_workers)
    of = msgspec.structs.replace(of, tie_bytes=(10**6,) * len(of.ties))
    aim = Aim(draw.choice(tuple(Objective)))
    found = [initial_plan(situation(of, None, range(n_workers), aim=aim), "auto")]
    for _ in range(2):
        chosen = best(found[-1])
        if chosen is None or chosen.plan is None:
            break
        plan = chosen.plan
        everyone = sorted({*plan.workers, *plan.idle})
        alive = [
            worker for worker in everyone if worker not in draw.sample(everyone, min(draw.choice((1, 1, 2)), len(everyone)))
        ]
        try:
            found.append(search(situation(of, plan, alive, aim=aim)))
        except StateLost:
            break
    return found


if __name__ == "__main__":
    first, stop = map(int, sys.argv[1:])
    print(kernel.IS_COMPILED)
    for seed in range(first, stop):
        table = tables(seed)
        digest = hashlib.sha256(msgspec.json.encode(table)).hexdigest()
        print(seed, list(map(len, table)), digest[:32])
