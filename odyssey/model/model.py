"""The layers that a rank holds: parameters, buffers, optimizers and schedulers, and what of it moves.

A rank knows every layer as a skeleton on the meta device and has the real tensors only of those it holds. State is cut
into *shards*: one for each layer (shard number = layer number), and one for each tie (number of layers + number of the
tie): parameters that several layers share, held by whoever holds any of these layers. Every shard has an optimizer and
a scheduler of its own, so that it can move by itself. A buffer that layers share belongs to the state of each, and is one
tensor for all of them that are held.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from odyssey.errors import JobError
from odyssey.model.blueprint import META, Blueprint, LayerFactory
from odyssey.model.dtensors import part_of
from odyssey.model.given import OptimizerFactory, SchedulerFactory, check_layer, check_state
from odyssey.model.loss_scale import LossScale
from odyssey.model.packing import digest
from odyssey.model.slots import Occurrence, find_shared, modules_of, parameter_at, parameter_like, replace, room_for, slot_of
from odyssey.model.state_shard import Stateful, StateShard
from odyssey.model.statistics import Statistics
from odyssey.model.strides import order_of
from odyssey.protocol.model_spec import LayerSpec


class Replay:
    """The script passes units that others did before this rank came: nothing, where it changes nothing between units."""

    def joining(self) -> None:
        """It will."""

    def replaying(self) -> None:
        """It passes one of them, or has come to the end of its loop."""

    def replayed(self) -> None:
        """It has passed all of them, if there were any, and begins one that it takes part in."""


class Peers:
    """The ranks that have one copy of a sharded model together. Any other model is not told who they are."""

    def among(self, groups: Any, workers: Sequence[Any]) -> None:
        """This rank computes with these workers, which are in the order of their shards; with none it has no work."""

    def begin(self) -> None:
        """A pass through the model begins."""

    def settle(self) -> None:
        """It is over, forward and back."""

    def interrupted(self) -> None:
        """An exception ends it in its midst. What the script objects to may be of no worth: raises Cut then."""


class Model:
    """All layers of the job, as far as this rank holds them: `held` is which, `shards` what they consist of."""

    changes_between_units = False
    """Whether the script may change what is held between units, and not only the units do."""
    statistics: Statistics | None = None
    """What a step changes beside what optimizers do."""
    loss_scale = LossScale()
    replay = Replay()
    """The replay of the units that others did before this rank came."""
    peers = Peers()
    n_shards = 0
    """See ModelSpec."""
    is_divided = False
    """Torch has divided its parameters among ranks, of which there may be one."""
    reading: Stateful | None = None
    """Where the reading of data stands, if these tell: it goes with the layers."""

    def __init__(
        self,
        build: Callable[[], Sequence[nn.Module | LayerFactory]],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        device: torch.device,
        seed: int,
    ) -> None:
        """`build()` under `seed` gives the layers: modules, or functions that make one and are called only where it is held."""
        self._blueprint = Blueprint(build, seed, device)
        self.layers = self._blueprint.skeletons()
        for i, layer in enumerate(self.layers):
            check_state(layer, f"layers()[{i}]")
        self.device = device
        self._optimizer = optimizer
        self._scheduler = scheduler
        if self.statistics is None:
            for i, layer in enumerate(self.layers):
                check_layer(layer, f"layers()[{i}]")
        self._shared = find_shared(layer.named_parameters(remove_duplicate=False) for layer in self.layers)
        self._shared_buffers = find_shared(layer.named_buffers(remove_duplicate=False) for layer in self.layers)
        self.ties = tuple(sorted({tuple(sorted({i for i, _ in shared})) for shared in self._shared}))
        self.specs = tuple(_spec(i, layer, self._shared) for i, layer in enumerate(self.layers))
        self.tie_bytes = tuple(
            sum(size_bytes(parameter_at(self.layers, shared[0])) for shared in _of_tie(tie, self._shared)) for tie in self.ties
        )
        self.held: frozenset[int] = frozenset()
        self.shards: dict[int, StateShard] = {}
        self.is_as_built = True

    def optimizers(self) -> tuple[str, ...]:
        """In words, what the script makes to train these layers, each only once. Raises JobError for what would not."""
        everything = frozenset(range(len(self.layers)))
        words: dict[str, None] = {}
        with torch.random.fork_rng(devices=[]):
            for number in self.shards_of(everything):
                named = {
                    name: parameter_like(p, torch.empty_like(p, device=self.device))
                    for name, p in self._named(number, everything).items()
                }
                words[StateShard(named, self._optimizer, self._scheduler).words()] = None
        return tuple(words)

    def values(self) -> tuple[str, ...]:
        """For each layer as built a digest of its values; empty for those that only who holds them builds."""
        return tuple(
            "" if i in self._blueprint.factories else digest([*layer.named_parameters(), *layer.named_buffers()])
            for i, layer in enumerate(self.layers)
        )

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the parameters that are numbers."""
        return {p.dtype for layer in self.layers for p in layer.parameters() if p.dtype.is_floating_point}

    @property
    def built_bytes(self) -> int:
        """The bytes of the parameters and buffers in memory now."""
        tensors = [part_of(t) for layer in self.layers for t in (*layer.parameters(), *layer.buffers()) if t.device != META]
        return sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in tensors}.values())

    def call(self, layer: int, value: Any) -> Any:
        """Run a layer. An exception that it raises says which one it was."""
        try:
            return self.layers[layer](value)
        except Exception as error:
            error.add_note(f"in layer {self.specs[layer].name}")
            raise

    def measured(self, metric: Callable[..., Any], batch: Any, output: Any, target: Any) -> Any:
        """Call a metric of an evaluation for a micro-batch. `batch`: its input, where the first layer is held as well."""
        return metric(output, target)

    def rates(self) -> set[float]:
        """Collect the different learning rates of what steps the held layers."""
        optimizers = (shard.optimizer for shard in self.shards.values() if shard.optimizer is not None)
        return {float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group}

    def in_evaluation(self) -> AbstractContextManager[None]:
        """The held layers; afterwards they are in the modes that a rank that joins and has not evaluated builds them in."""
        return in_evaluation(*(self.layers[layer] for layer in self.held))

    # -- holding ------------------------------------------------------------------------------------------------------

    def shards_of(self, layers: Iterable[int]) -> list[int]:
        """Shard numbers of `layers` and of the ties that they take part in."""
        wanted = set(layers)
        ties = [len(self.layers) + t for t, tie in enumerate(self.ties) if wanted & set(tie)]
        return [*sorted(wanted), *ties]

    def hold_built(self, layers: Iterable[int]) -> None:
        """Hold exactly `layers`, with the values that the script builds them with. Before the first unit only.

        Called again, because a rank was lost before the first step, it builds the layers again. Raises JobError if the script
        has them built once only.
        """
        if is_again := not self.is_as_built:
            self.layers = self._blueprint.skeletons()
            self.held, self.shards = frozenset(), {}
        self.is_as_built = False
        wanted = frozenset(layers)
        for i in wanted & set(self._blueprint.factories):
            self.layers[i] = self._blueprint.layer(i)
        for i in sorted(wanted) if is_again else ():
            if any(t.device == META for t in (*self.layers[i].parameters(), *self.layers[i].buffers())):
                what = f"layer {self.specs[i].name} is wanted again, and layers() returned modules that it has returned before"
                raise JobError(what, "let layers() build all modules anew each time that it is called")
        self._free(frozenset(range(len(self.layers))) - wanted, wanted)
        replace([self.layers[i] for i in sorted(wanted)], lambda t: t.detach().to(self.device))
        self._take(wanted)

    def begin_step(self) -> None:
        """A training step begins, perhaps anew. Raises JobError if the script has made it another model since the last."""

    def unchanged(self) -> AbstractContextManager[None]:
        """Around what is measured."""
        return nullcontext()

    def copy_of(self, layers: Iterable[int]) -> Model:
        """A model that holds copies of layers, with their values as built, for measuring: nothing done to it lasts."""
        wanted = frozenset(layers)
        other = copy.copy(self)
        other.layers, other.held, other.shards = list(self.layers), frozenset(), {}
        for i in wanted:
            # What a function builds may contain what others contain, too.
            layer = self._blueprint.layer(i) if i in self._blueprint.factories else self.layers[i]
            parameters = {id(p): parameter_like(p, p.detach().clone()) for p in layer.parameters()}
            layer = copy.deepcopy(layer, parameters)
            other.layers[i] = layer.to(self.device)
        other._take(wanted)
        return other

    def adopt(self, layer: int, state: dict[str, Any]) -> None:
        """Hold one layer, with the state that another rank exported. What this rank had of it before is let go whole:
        an optimizer that was kept would step parameters that no module has any more."""
        self.is_as_built = False
        self.read_on(state["reading"])
        if layer in self.held:
            self.keep_only(self.held - {layer})
        if layer in self._blueprint.factories:
            # Built as where it comes from: beside what moves a module may have tensors that are its own attributes.
            self.layers[layer] = self._blueprint.layer(layer)
            self._free(frozenset({layer}), self.held)
        module = self.layers[layer]
        replace([module], partial(room_for, self.device), modules_of(self.layers[i] for i in self.held))
        values = state["parameters"] | state["buffers"]
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(values[name])
        known = set(self.shards)
        self._take(self.held | {layer})
        for number, progress in state["progress"].items():
            if number not in known:
                self.shards[number].load_progress(progress)

    def read_on(self, state: Any) -> None:
        """From where the reading of data stood elsewhere."""
        if self.reading is not None and state is not None:
            self.reading.load_state_dict(state)

    def keep_only(self, layers: Iterable[int]) -> None:
        """Free all layers that are not among `layers`."""
        wanted = self.held & frozenset(layers)
        self._free(self.held - wanted, wanted)
        self._take(wanted)

    def _free(self, layers: frozenset[int], but: frozenset[int]) -> None:
        """Let go of the tensors of `layers`, but for modules that are also in one of `but`."""
        replace(
            [self.layers[i] for i in sorted(layers)], lambda t: t.detach().to(META), modules_of(self.layers[i] for i in but)
        )

    def export(self, layer: int) -> dict[str, Any]:
        """All state of a held layer, as `adopt` takes it: parameters, buffers (of both kinds), optimizer, scheduler; and where
        the reading of data stands."""
        module = self.layers[layer]
        return {
            "reading": self.reading and self.reading.state_dict(),
            "parameters": {name: p.detach() for name, p in module.named_parameters()},
            "buffers": dict(module.named_buffers()),
            "progress": {number: self.shards[number].progress() for number in self.shards_of([layer])},
        }

    def shard_state(self, number: int) -> dict[str, Any]:
        """Everything of a shard that ranks must agree on, as training will find it: the modules' own parameters and buffers,
        and what optimizer and scheduler keep for just these."""
        named = self.parameters_of(number)
        buffers = dict(self.layers[number].named_buffers()) if number < len(self.layers) else {}
        parameters = {name: parameter.detach() for name, parameter in named.items()}
        return {"parameters": parameters, "buffers": buffers, "progress": self.shards[number].state_by_name(named)}

    def problems(self) -> Iterator[str]:
        """Why training would not train the modules of the held layers; nothing if it would."""
        if set(self.shards) != set(self.shards_of(self.held)):
            yield f"shards {sorted(self.shards)} belong to layers {sorted(self.held)}"
        for number, shard in self.shards.items():
            for problem in shard.problems(self.parameters_of(number)):
                yield f"shard {number}: {problem}"
        for shared in self._shared:
            here = [parameter_at(self.layers, occurrence) for occurrence in shared if occurrence[0] in self.held]
            if any(parameter is not here[0] for parameter in here):
                yield f"layers {sorted({layer for layer, _ in shared})} do not share their parameter any more"

    def _take(self, layers: frozenset[int]) -> None:
        """Make `layers` the held ones: one object for what they share, and a shard for each layer and tie."""
        for shared in [*self._shared, *self._shared_buffers]:
            here = [occurrence for occurrence in shared if occurrence[0] in layers]
            if here:
                known = [occurrence for occurrence in here if occurrence[0] in self.held]
                slots = [slot_of(self.layers, occurrence) for occurrence in here]
                tensors, leaf = slot_of(self.layers, (known or here)[0])
                for its, name in slots:
                    its[name] = tensors[leaf]
        numbers = self.shards_of(layers)
        self.shards = {number: self.shards[number] for number in numbers if number in self.shards}
        for number in numbers:
            if number not in self.shards:
                self.shards[number] = self._shard(number, layers)
        self.held = layers

    def _shard(self, number: int, layers: frozenset[int]) -> StateShard:
        return StateShard(self._named(number, layers), self._optimizer, self._scheduler)

    def parameters_of(self, number: int) -> dict[str, nn.Parameter]:
        """The parameters of a shard, as the modules of the held layers have them now."""
        return self._named(number, self.held)

    def _named(self, number: int, layers: frozenset[int]) -> dict[str, nn.Parameter]:
        if number >= len(self.layers):
            result = {}
            for shared in _of_tie(self.ties[number - len(self.layers)], self._shared):
                here = next(occurrence for occurrence in shared if occurrence[0] in layers)
                result[full_name(*shared[0])] = parameter_at(self.layers, here)
            return result
        tied = {name for shared in self._shared for i, name in shared if i == number}
        named = self.layers[number].named_parameters()
        return {full_name(number, name): parameter for name, parameter in named if name not in tied}


@contextmanager
def in_evaluation(*modules: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode; afterwards every one within them is in the mode that it was in."""
    modes = [(module, module.training) for each in modules for module in each.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()  # whatever it does beside the flags is undone
        for module, mode in modes:
            module.training = mode


def _spec(index: int, layer: nn.Module, all_shared: Sequence[tuple[Occurrence, ...]]) -> LayerSpec:
    tied = {name for shared in all_shared for i, name in shared if i == index}
    own = [p for name, p in layer.named_parameters() if name not in tied]
    tensors = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()]
    orders = [order_of(part_of(t)) if t.requires_grad else () for _, t in tensors]
    facts = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad, *order) for (name, t), order in zip(tensors, orders, strict=True)
    ]
    return LayerSpec(
        name=f"{index}.{type(layer).__name__}",
        digest=hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest(),
        parameter_bytes=sum(map(size_bytes, own)),
        trainable_bytes=sum(size_bytes(p) for p in own if p.requires_grad),
        buffer_bytes=sum(map(size_bytes, layer.buffers())),
    )


def _of_tie(tie: tuple[int, ...], all_shared: Sequence[tuple[Occurrence, ...]]) -> list[tuple[Occurrence, ...]]:
    return [shared for shared in all_shared if tuple(sorted({i for i, _ in shared})) == tie]


def full_name(layer: int, name: str) -> str:
    """The name of a parameter or buffer in a state dict: `layers.3.attention.weight`."""
    return f"layers.{layer}.{name}"


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()
