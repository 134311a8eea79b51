"""`odyssey.layers_of`: a whole model as the list of layers that a Job wants, cut at its list of blocks.

A model's forward calls what embeds, then its blocks one after the other, then what is behind them. Every layer runs this very
forward, on a shallow copy of the model in which only its own modules are real. What stands for those before returns what the
layer before gave, so that nothing that the forward does until its block counts; where the next block is called the forward is
left. Masks, positions and flags are so made by the model's own code, in each layer anew, from the input, which travels along.

The order of calls is observed once, on a small example, and what the layers make of it has to be what the model does, bit for
bit: a residual from the embeddings to each block, say, is not, as a later layer does not have it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.errors import JobError
from odyssey.model.model import in_evaluation

_BY_HAND = "write the list of layers yourself, each called with what the one before returned (docs/models.md)"


def layers_of(model: nn.Module, example: Any = None) -> list[nn.Module]:
    """What embeds, each block, and what is behind the blocks, as layers for `odyssey.Job`. They are made of the model's own
    modules: let go of the model.

    `model`: an nn.Sequential; or one with a single nn.ModuleList (or nn.Sequential) of blocks, which are called one after
    the other, as in Hugging Face's decoders. Those take as input token ids or a dict, and give logits.
    `example`: a small input as the first layer gets it; default: token ids, for Hugging Face's also with a padding mask.

    Raises JobError, with the model's class, for what cannot be cut, or computes anything else when it is.
    """
    if type(model).forward is nn.Sequential.forward:
        return list(model.children())
    name = type(model).__name__
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise JobError(
            f"{name} is on the meta device, where nothing shows that its layers do what it does", "build it on the CPU"
        )
    path = _path_of_blocks(model)
    examples = [example] if example is not None else _examples(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _without_zeros(model):
        with in_evaluation(model):
            observed, first = _observe(model, path, examples[0], "example" if example is not None else "token ids [2, 8]")
        n_layers = len(observed.returned) + 2
        layers: list[nn.Module] = [ModelLayer(model, path, observed, number) for number in range(n_layers)]
        with in_evaluation(model, *layers):
            for each in examples:
                expected = first if each is examples[0] else _run(model, each)
                try:
                    found = each
                    for layer in layers:
                        found = layer(found)
                except Exception as error:
                    raise JobError(f"{name} does not run when it is cut at {path}: {_line(error)}", _BY_HAND) from error
                if not _are_equal(found, expected):
                    raise JobError(f"{name} computes something else when it is cut at {path}", _BY_HAND)
    return layers


# -- looking at the model -----------------------------------------------------------------------------------------------


def _path_of_blocks(model: nn.Module) -> str:
    """Where its only list with parameters is. Those within the items of a list do not count."""
    for kind in (nn.ModuleList, nn.Sequential):
        paths: list[str] = [
            path for path, module in model.named_modules() if path and isinstance(module, kind) and _is_trained(module)
        ]
        paths = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
        if len(paths) == 1:
            return paths[0]
        if paths:
            what = f"{type(model).__name__} has {len(paths)} lists of blocks: {', '.join(paths[:4])}"
            raise JobError(what, _BY_HAND)
    raise JobError(f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks", _BY_HAND)


class _Observed(NamedTuple):
    """What the forward of a model has called. `returned`: by each block, the length of a tuple, None for anything else."""

    before: frozenset[nn.Module]
    between: frozenset[nn.Module]
    behind: frozenset[nn.Module]
    returned: tuple[int | None, ...]


def _observe(model: nn.Module, path: str, example: Any, what: str) -> tuple[_Observed, Any]:
    """Run the model, and say also what it computed. Raises JobError unless each block, and each module beside them that has
    parameters, has its place in a chain. `what`: the example in words."""
    name = type(model).__name__
    blocks = [block for _, block in _children(model.get_submodule(path))]
    beside = _beside(model, path)
    calls: list[nn.Module] = []
    returned: list[int | None] = []
    with ExitStack() as hooks:
        for module in {*blocks, *beside.values()}:
            handle = module.register_forward_pre_hook(lambda module, args: calls.append(module))
            hooks.callback(handle.remove)
        for block in set(blocks):
            handle = block.register_forward_hook(
                lambda block, args, output: returned.append(len(output) if isinstance(output, tuple) else None)
            )
            hooks.callback(handle.remove)
        try:
            output = _run(model, example)
        except Exception as error:
            help = "give layers_of(model, example) a small input, as the first layer gets it"
            raise JobError(f"{name} does not take {what}: {_line(error)}", help) from error
    places = [place for place, module in enumerate(calls) if module in blocks]
    if [calls[place] for place in places] != blocks:
        raise JobError(f"{name} does not call its {len(blocks)} blocks at {path} once each, one after the other", _BY_HAND)
    before, between, behind = calls[: places[0]], calls[places[0] : places[-1]], calls[places[-1] + 1 :]
    for its, module in beside.items():
        if _is_trained(module) and module not in calls:
            raise JobError(f"{name} does not call {its}, which has parameters", f"remove it from the model, or {_BY_HAND}")
    return _Observed(frozenset(before), frozenset(between), frozenset(behind), tuple(returned)), output


def _beside(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """All modules beside the way to the blocks. Raises JobError for a parameter that no module but those on the way has."""
    found: dict[str, nn.Module] = {}
    on_the_way, prefix = model, ""
    for step in path.split("."):
        if outside := [f"{prefix}{name}" for name, _ in on_the_way.named_parameters(recurse=False)]:
            what = f"{type(model).__name__} has parameters outside of the modules that it calls: {', '.join(outside[:4])}"
            raise JobError(what, f"put them into modules, or {_BY_HAND}")
        found |= {f"{prefix}{name}": child for name, child in _children(on_the_way) if name != step}
        on_the_way, prefix = on_the_way.get_submodule(step), f"{prefix}{step}."
    return found


def _examples(model: nn.Module) -> list[Any]:
    """Token ids for the first embedding there is, which is a language model's of tokens."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        help = "give layers_of(model, example) a small input, as the first layer gets it"
        raise JobError(f"{type(model).__name__} has no nn.Embedding, so that it is not known what it takes", help)
    ids = torch.arange(16, device=embedding.weight.device).reshape(2, 8) * 7 % embedding.num_embeddings
    if not _is_hugging_face(model):
        return [ids]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return [{"input_ids": ids, "attention_mask": mask}, ids]


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Whatever is zero in its parameters is something else meanwhile: what a gate that begins with zero lets through would
    show in no value."""
    changed = []
    try:
        for parameter in model.parameters():
            is_zero = parameter == 0
            if parameter.is_floating_point() and is_zero.any():
                zeros = parameter[is_zero]
                changed.append((parameter, is_zero, zeros))
                parameter[is_zero] = torch.linspace(0.01, 0.1, len(zeros), device=zeros.device).to(zeros.dtype)
        yield
    finally:
        for parameter, is_zero, zeros in changed:
            parameter[is_zero] = zeros


def _run(model: nn.Module, given: Any) -> Any:
    """What it makes of the input of a Job: logits, or hidden states where Hugging Face's has no head."""
    if not _is_hugging_face(model):
        return model(given)
    without_cache = {"use_cache": False} if _takes_cache(type(model).forward) else {}
    output = model(**given, **without_cache) if isinstance(given, Mapping) else model(given, **without_cache)
    return output[0]


@cache
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def _is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model_prefix")


def _is_trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Also one that occurs twice, twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _are_equal(found: Any, expected: Any) -> bool:
    """Bit for bit, and NaN is as NaN."""
    (left, its), (right, others) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    return its == others and all(_is_equal(one, other) for one, other in zip(left, right, strict=True))


def _is_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


# -- a layer ------------------------------------------------------------------------------------------------------------


class _Left(BaseException):
    """The forward is left: no error, and nothing that a model may catch."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class _Passage:
    """What a layer got, while its forward runs, and whether its own block has got it. `name`: the model's class.

    A checkpoint around the block calls it again in the backward, with what the forward had called it with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.got: Any = None
        self.is_open = self.has_entered = False
        self._is_trained = False

    @contextmanager
    def opened(self, got: Any) -> Iterator[None]:
        """While the layer's forward runs."""
        self.got, self.is_open, self.has_entered = got, True, False
        self._is_trained = torch.is_grad_enabled()
        try:
            yield
        finally:
            self.got, self.is_open = None, False

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the layer's own block is called: with what came from the layer before, whatever the forward has. Raises
        JobError where gradients would get lost."""
        self.has_entered = True
        is_cut_off = self.is_open and self._is_trained and not torch.is_grad_enabled()
        if is_cut_off and any(map(_needs_gradient, (self.got, *block.parameters()))):
            what = f"{self._name} calls a block, {type(block).__name__}, without gradients, as a reentrant checkpoint does"
            raise JobError(what, "give checkpoint(...) use_reentrant=False; freeze what is not to be trained")
        got = self.in_place_of(_first(args, kwargs))
        if args:
            return (got, *args[1:]), kwargs
        return (), kwargs | {next(iter(kwargs)): got}

    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Behind the last block."""
        if self.is_open:
            raise _Left(output[0] if isinstance(output, tuple) else output)

    def in_place_of(self, its: Any) -> Any:
        """What this layer got, for a module that is called with `its`, which is marked: a checkpoint keeps that alone. Raises
        JobError where it has no mark."""
        if self.is_open:
            is_got = its is self.got
            if isinstance(its, torch.Tensor) and (is_got or its.grad_fn is not None):  # nothing that micro-batches share
                its.in_its_place = _ITSELF if is_got else self.got  # type: ignore[attr-defined]
            return self.got
        if (got := getattr(its, "in_its_place", None)) is None:
            what = f"{self._name} has a checkpoint around a block that cannot be computed again with what it was called with"
            raise JobError(what, "let the block's own forward checkpoint what is within it")
        return its if got is _ITSELF else got


_ITSELF = "itself"


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _StandIn(nn.Module):
    """For a module that another layer has: gives what this layer got. A forward may look at the plain attributes."""

    def __init__(self, module: nn.Module, passage: _Passage, returns: int | None = None) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        vars(self).update(
            {name: value for name, value in plain.items() if not callable(value) and not isinstance(value, torch.Tensor)}
        )
        self._passage, self._returns = passage, returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        got = self._passage.in_place_of(_first(args, kwargs))
        return got if self._returns is None else (got, *[None] * (self._returns - 1))


class _Exit(_StandIn):
    """For a block of a later layer: what it is called with is what this layer gives."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _first(args, kwargs)
        if self._passage.is_open:
            raise _Left(hidden)
        return hidden


class ModelLayer(nn.Module):
    """The model's forward from one of its blocks to the next: layer 0 goes until the first, the last one from behind the last.
    Between layers travels what the next block is called with, and the model's own input."""

    def __init__(self, model: nn.Module, path: str, observed: _Observed, number: int) -> None:
        super().__init__()
        n_blocks = len(observed.returned)
        self._is_first, self._is_last = number == 0, number == n_blocks + 1
        self._passage = _Passage(type(model).__name__)
        everywhere = observed.before | observed.between | observed.behind
        if self._is_first or self._is_last:
            here = observed.before if self._is_first else observed.behind
        else:
            here = observed.between if number < n_blocks else frozenset()
        self.training = model.training
        self.model = on_the_way = _copied(model)
        for step in path.split("."):
            for name, child in _children(on_the_way):
                if child in everywhere - here and (_is_trained(child) or isinstance(child, nn.Dropout)):
                    on_the_way._modules[name] = _StandIn(child, self._passage)
            further = _copied(on_the_way.get_submodule(step))
            on_the_way._modules[step] = further
            on_the_way = further
        for index, (name, block) in enumerate(_children(on_the_way)):
            on_the_way._modules[name] = self._block(block, index, number, observed.returned)

    def _block(self, block: nn.Module, index: int, number: int, returned: tuple[int | None, ...]) -> nn.Module:
        """What is in the place of a block: itself if it is this layer's."""
        if index != number - 1:
            return (_StandIn if index < number else _Exit)(block, self._passage, returned[index])
        own = _copied(block)
        own.register_forward_pre_hook(self._passage.enter, with_kwargs=True)
        if index == len(returned) - 1:
            own.register_forward_hook(self._passage.leave)
        return own

    def forward(self, value: Any) -> Any:
        """The model's own input for the first layer, what the model gives from the last one."""
        given, got = (value, None) if self._is_first else (value["input"], value["hidden"])
        try:
            with self._passage.opened(got):
                output = _run(self.model, given)
        except _Left as left:
            if self._is_first or self._passage.has_entered:
                return {"hidden": left.hidden, "input": given}
        if self._is_last:
            return output
        what = f"{type(self.model).__name__} has left out a block"
        raise JobError(what, "set its probability of leaving blocks out in training (layerdrop) to 0")


def _copied(module: nn.Module) -> nn.Module:
    """One with the same children and parameters and tables of its own, in which others may be put."""
    its = copy.copy(module)
    vars(its).update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return its
