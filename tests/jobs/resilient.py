"""A script with its own model, optimizer and loop: `resilient.py FOLDER VARIANT [--hold FILE STEP] [KILL ...]`.

    plain      momentum, a scheduler, clipping, dropout
    batchnorm  running statistics
    average    an average of the weights, which the loop updates
    plateau    a scheduler that the loop steps with the loss
    clamped    the loop clamps the weights, and sets gradients to None as plain loops do
    frozen     the loop ends dropout behind step 4
    eased      the loop has dropout leave out less behind step 4
    padded     samples of different lengths, by a `collate` of the script's own
    tokens     the same, with a loss that is a mean over the points that are no padding, each of which counts alike in a step
    scaled     gradients that pass through float16, of a loss whose scale is too large at first
    weighted   samples that a sampler of the script's own draws
    several    an optimizer for matrices, with a scheduler, and another for the rest
    compiled   the model is compiled in place
    unlike     as `average`, of models that ranks have built with other values
    saved      saves every SAVE_EVERY steps, ends in the midst of the first run, and goes on from there when it is run again

Not among VARIANTS are those that evaluate the average behind each step:

    evaluated  as `average`; the evaluation is given the weights
    stale      as `evaluated`, by the tensors that there are when it is called
    swapped    as `average`; the loop swaps them in by hand, for an evaluation and two more calls

And those whose model

    strict     objects to a first layer whose two halves are alike, as they are where nobody has sent the other shard

With `/N` behind it the model is sharded by torch over N ranks (odyssey.shard_mesh).
With `+KIND` or `+KIND+N` behind that its data can only be iterated over (tests/streams.py), by N worker processes.
A KILL is RANK:STEP:POINT; with -1 and `built` it comes before the job, and with `--hold FILE -1` once FILE is free. Each rank
writes at the end what its own objects have come to, if it has work then.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.utils.data import WeightedRandomSampler

from tests.streams import Stream

N_STEPS = int(os.environ.get("RESILIENT_STEPS", "12"))
PAUSE_S = float(os.environ.get("RESILIENT_PAUSE_S", "0"))
"""Behind each step, so that who is lost comes back before the end."""
SAVE_EVERY = int(os.environ.get("RESILIENT_SAVE_EVERY", "4"))
DEVICE = os.environ.get("RESILIENT_DEVICE", "cpu")
GLOBAL_BATCH, MICRO_BATCH, SEED = 14, 4, 7
VARIANTS = (
    "plain",
    "batchnorm",
    "average",
    "plateau",
    "clamped",
    "frozen",
    "eased",
    "padded",
    "tokens",
    "scaled",
    "weighted",
    "several",
    "compiled",
    "unlike",
    "saved",
)
EVALUATED = ("evaluated", "stale", "swapped")
AVERAGED = ("average", "unlike", "saved", *EVALUATED)
POINTS = ("forward", "backward", "at_commit", "after_commit", "optimizer", "loop")


class Points:
    """Points `[6]` and a smooth function of them; of the variants `padded` and `tokens` rows of 1 to 3 points."""

    def __init__(self, variant: str) -> None:
        self.is_padded = variant in ("padded", "tokens")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        shape = (i % 3 + 1, 6) if self.is_padded else (6,)
        points = torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return points, points.sin().sum().reshape(1)


def data_of(variant: str, how: list[str]) -> Points | Stream:
    return Stream(Points(variant), how[0]) if how else Points(variant)


def sampler_of(variant: str) -> Any:
    """Give the variant's own sampler: its 17 samples of an epoch are no multiple of a step."""
    return WeightedRandomSampler([1.0 + i % 3 for i in range(40)], 17) if variant == "weighted" else None


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    points = [points for points, _ in samples]
    return {
        "points": nn.utils.rnn.pad_sequence(points, batch_first=True),
        "lengths": torch.tensor([len(each) for each in points]),
        "target": torch.stack([target for _, target in samples]),
    }


class Average:
    """An average of the weights, which are looked up when it is updated. They are an OrderedDict, as a module's are."""

    def __init__(self, net: nn.Module) -> None:
        self.values = OrderedDict((name, parameter.detach().clone()) for name, parameter in net.named_parameters())
        self.n = 0

    def update(self, net: nn.Module) -> None:
        self.n += 1
        for name, parameter in net.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.n = state["values"], state["n"]


def model(variant: str) -> nn.Module:
    torch.manual_seed(3 + int(os.environ.get("RANK", "0")) if variant == "unlike" else 3)
    middle: nn.Module = nn.Dropout(0.2) if variant in ("plain", "frozen", "eased") else nn.Identity()
    if variant == "batchnorm":
        middle = nn.BatchNorm1d(16, eps=0.1)
    return nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Linear(16, 1)).double().to(DEVICE)


def ready(net: nn.Module, variant: str) -> nn.Module:
    """Have the model computed as the variant says; what it is stays the same."""
    if variant == "compiled":
        net.compile(backend="aot_eager")
    return net


def optimizers(net: nn.Module, variant: str) -> list[torch.optim.Optimizer]:
    """What steps the model."""
    if variant == "several":
        matrices, rest = ([p for p in net.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        first = torch.optim.SGD(matrices, lr=0.003, momentum=0.9)
        return [first, torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1)]
    return [optimizer(net, variant)]


def optimizer(net: nn.Module, variant: str) -> torch.optim.Optimizer:
    if variant in AVERAGED:
        return torch.optim.AdamW(net.parameters(), lr=0.02)
    return torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9)  # with more, rounding errors would grow


def total_of(net: nn.Module, batch: Any, variant: str) -> tuple[Tensor, int]:
    """A sum of errors, and of how many: of samples, or of the points that are no padding."""
    if isinstance(batch, dict):
        mask = torch.arange(batch["points"].shape[1]) < batch["lengths"][:, None]
        if variant == "tokens":
            errors = (net(batch["points"])[..., 0] - batch["points"].sin().sum(-1)) ** 2
            return (errors * mask).sum(), int(mask.sum())
        found = (net(batch["points"])[..., 0] * mask).sum(1, keepdim=True)
        return nn.functional.mse_loss(found, batch["target"], reduction="sum"), len(found)
    points, target = (tensor.to(DEVICE) for tensor in batch)
    found = net(points)
    if variant == "scaled":
        found = found.half().double()
    return nn.functional.mse_loss(found, target, reduction="sum"), len(points)


class Loop:
    """What the script does behind each step, apart from what trains."""

    def __init__(self, net: nn.Module, its_optimizer: torch.optim.Optimizer, variant: str) -> None:
        self._net = net
        self._variant = variant
        self._optimizer = its_optimizer
        self.average = Average(net)
        self.scaler = torch.amp.GradScaler(DEVICE, 2.0**14, growth_interval=2, enabled=variant == "scaled")
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(its_optimizer, factor=0.5, patience=0)

    @property
    def extra(self) -> list[Any]:
        if self._variant == "plateau":
            return [self.plateau]
        return [self.average] if self._variant in AVERAGED else []

    def behind(self, step: int, loss: float) -> None:
        if self._variant in AVERAGED:
            self.average.update(self._net)
        if self._variant == "plateau":
            self.plateau.step(loss)
        if self._variant == "clamped":
            with torch.no_grad():
                for parameter in self._net.parameters():
                    parameter.clamp_(-0.3, 0.3)
            self._optimizer.zero_grad()
        if self._variant == "frozen" and step == 4:
            self._net[1].eval()
        if self._variant == "eased" and step == 4:
            self._net[1].p = 0.05


def scheduler(its_optimizer: torch.optim.Optimizer, variant: str) -> Any:
    return torch.optim.lr_scheduler.StepLR(its_optimizer, 4, 0.5) if variant in ("plain", "scaled", "several") else None


def state(net: nn.Module, its_optimizers: list[torch.optim.Optimizer], loop: Loop) -> dict[str, Tensor]:
    """All that training has made, from the script's own objects."""
    found = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        values = {key: value for its in its_optimizers for key, value in its.state.get(parameter, {}).items()}
        found |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    found |= {f"average.{name}": value for name, value in loop.average.values.items()}
    found["scale"] = torch.tensor(loop.scaler.get_scale())
    found["rate"] = torch.tensor(its_optimizers[0].param_groups[0]["lr"], dtype=torch.float64)
    return {name: getattr(tensor, "_local_tensor", tensor).detach().clone() for name, tensor in found.items()}


def main() -> None:
    folder, variant, *rest = sys.argv[1:]
    variant, *how = variant.split("+")
    variant, _, n_shards = variant.partition("/")
    held = (rest[1], int(rest[2])) if rest[:1] == ["--hold"] else None
    kills = [tuple(kill.split(":")) for kill in rest[3 if held else 0 :]]
    out = Path(folder)
    rank = os.environ.get("RANK", "0")
    net = model(variant)
    if variant == "strict":
        net[0].register_forward_hook(object_to_halves_that_are_alike)
    if n_shards:
        shard(net, int(n_shards))
    ready(net, variant)
    its_optimizers = optimizers(net, variant)
    loop = Loop(net, its_optimizers[0], variant)
    now = -1

    def at(point: str) -> None:
        for victim, step, where in kills:
            mark = out / f"killed-{victim}-{step}-{where}"
            if (victim, int(step), where) == (rank, now, point) and not mark.exists():
                if where == "built" and held is not None:
                    wait_for(held[0])
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def loss(batch: Any) -> Tensor:
        at("forward" if torch.is_grad_enabled() else "evaluation")
        total, n = total_of(net, batch, variant)
        return total / n

    if kills:
        disturb(net, its_optimizers[-1], at)

    import odyssey
    from tests.jobs.brief import measure_briefly

    measure_briefly()
    at("built")
    run = odyssey.resilient(
        net,
        its_optimizers if len(its_optimizers) > 1 else its_optimizers[0],
        loss,
        data_of(variant, how),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        scheduler=scheduler(its_optimizers[0], variant),
        extra=loop.extra,
        collate=padded if variant in ("padded", "tokens") else None,
        weight=(lambda batch: batch["lengths"].sum()) if variant == "tokens" else None,
        num_workers=int(how[1]) if how[1:] else 0,
        seed=SEED,
        clip_norm=0.5 if variant in ("plain", "scaled") else None,
        scaler=loop.scaler,
        sampler=sampler_of(variant),
        resume=out / "checkpoints" if variant == "saved" else None,
    )
    now = run.next_step
    ends_early = variant == "saved" and not (out / "ended-early").exists()
    losses, averaged = {}, {}
    for step in run.steps(N_STEPS):
        losses[step.index] = step.loss
        at("loop")
        loop.behind(step.index, step.loss)
        if run.is_leader:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        if variant in EVALUATED:
            averaged[step.index] = swapped(run, net, loop) if variant == "swapped" else evaluated(run, loop, variant)
        if held is not None and step.index == held[1]:
            wait_for(held[0])
        if variant == "saved" and step.index % SAVE_EVERY == SAVE_EVERY - 1:
            run.save(out / "checkpoints")
            run.once(lambda: print("saved", flush=True))
        if ends_early and step.index == N_STEPS // 2 - 1:
            run.once((out / "ended-early").touch)
            sys.exit(0)
        time.sleep(PAUSE_S)
        now = step.index + 1
    found = {
        "losses": losses,
        "averaged": averaged,
        "state": state(net, its_optimizers, loop),
        "validation": run.evaluate(Points(variant)),
    }
    if run.rank in run.plan.workers:  # of a sharded model some may wait for others
        torch.save(found, out / f"{rank}.pt")


def wait_for(path: str) -> None:
    """Wait until the test lets go of the file, which it holds exclusively."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def evaluated(run: Any, loop: Loop, variant: str) -> float:
    return run.evaluate(Points(variant), weights=loop.average.values if variant == "stale" else lambda: loop.average.values)


@torch.no_grad()
def swapped(run: Any, net: nn.Module, loop: Loop) -> float:
    own = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter, value in zip(net.parameters(), loop.average.values.values(), strict=True):
        parameter.copy_(value)
    found = run.evaluate(Points("average"))
    for _ in range(2):
        run.once(lambda: None)
    for parameter, value in zip(net.parameters(), own, strict=True):
        parameter.copy_(value)
    return found


def shard(net: nn.Module, n: int) -> None:
    """Over so many ranks, in two groups of parameters."""
    from torch.distributed.fsdp import fully_shard

    import odyssey

    mesh = odyssey.shard_mesh(n)
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def object_to_halves_that_are_alike(layer: nn.Module, *_: Any) -> None:
    first, second = layer.weight.chunk(2)
    if torch.equal(first, second):
        raise ValueError("the halves are alike")


def disturb(net: nn.Module, its_optimizer: torch.optim.Optimizer, at: Callable[[str], None]) -> None:
    """Ends this rank where `at` says so."""
    from odyssey.runtime import session
    from odyssey.runtime.session import Session

    agree, take = session.agree, Session._take
    first = next(iter(net.parameters()))
    if hasattr(first, "placements"):  # a sharded parameter has no gradient before a sum over ranks
        net[2].register_full_backward_hook(lambda *_: at("backward"))
    else:
        first.register_hook(lambda gradient: at("backward"))

    def agreeing(runner, unit, place, values):
        if place == "commit":
            at("at_commit")
        return agree(runner, unit, place, values)

    def taking(self, transaction, result):
        if result.kind == "step":
            at("after_commit")
        take(self, transaction, result)

    session.agree, Session._take = agreeing, taking
    its_optimizer.register_step_post_hook(lambda *_: at("optimizer"))


if __name__ == "__main__":
    main()
