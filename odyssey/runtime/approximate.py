"""The approximate backward of a worker that does two workers' work (MeCeFO, NeurIPS 2025, arXiv 2510.16415, section 3).

    attention      keeps nothing and has no backward: of y = x + A(norm(x)) goes dL/dx = dL/dy
    feed-forward   keeps its input alone; what lies within is computed again
    its weights    of y = W x: dL/dW = (dL/dy (x^T V)) V^T, with V the first right singular vectors of W

The forward is exact, and so are the gradients of all that is not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from odyssey.errors import JobError
from odyssey.model.model import Model
from odyssey.model.sublayers import Names, Sublayers, sublayers
from odyssey.plan.approximation import LowRank
from odyssey.plan.plan import Plan


class Approximately:
    """Passes through layers whose backward is to be approximate."""

    def __init__(self, names: Names, low_rank: LowRank, layers: frozenset[int] = frozenset()) -> None:
        """`layers`: those that it is to be of."""
        self.layers = layers
        self._names = names
        self._low_rank = low_rank
        self._vectors: dict[int, torch.Tensor] = {}
        """id of a weight -> its first right singular vectors, [inputs, rank]."""
        self._sublayers: dict[nn.Module, Sublayers] = {}

    def begin(self, n_steps: int) -> None:
        """A step, `n_steps` behind the first one."""
        if n_steps % self._low_rank.refresh_steps == 0:
            self._vectors = {}

    @contextmanager
    def passing(self, layer: nn.Module) -> Iterator[None]:
        """Around a layer's forward."""
        its = self._sublayers.get(layer)
        if its is None:
            its = self._sublayers[layer] = sublayers(layer, self._names)
        with ExitStack() as undo:
            for module in its.attention:
                undo.enter_context(_in_place_of_forward(module, _without_backward(module.forward)))
            for module in its.feed_forward:
                undo.enter_context(_in_place_of_forward(module, self._recomputed(module)))
            yield

    def _recomputed(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        weights = {id(weight) for weight in module.parameters() if weight.ndim == 2 and weight.requires_grad}

        def run(*args: Any, **kwargs: Any) -> Any:
            with _LowRankWeights(weights, self._vectors_of):
                return forward(*args, **kwargs)

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

        return recomputed

    def _vectors_of(self, weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
        """`is_transposed`: the weight is [inputs, outputs]."""
        found = self._vectors.get(id(weight))
        if found is None:
            matrix = weight.detach().T if is_transposed else weight.detach()
            rank = self._low_rank.rank or max(1, min(matrix.shape) // 4)
            found = self._vectors[id(weight)] = leading_vectors(matrix, rank)
        return found


def leading_vectors(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """The right singular vectors of [outputs, inputs] with the largest singular values, [inputs, rank].

    By the eigenvectors of the smaller one of W^T W and W W^T, in a fifth of the time of a singular value decomposition. That
    squares the condition number, which is no matter for the leading ones.
    """
    precise = weight if weight.dtype == torch.float64 else weight.float()
    n_outputs, n_inputs = precise.shape
    if n_outputs >= n_inputs:
        right: torch.Tensor = torch.linalg.eigh(precise.T @ precise)[1][:, -rank:]
        return right.contiguous()
    left: torch.Tensor = torch.linalg.eigh(precise @ precise.T)[1][:, -rank:]
    return functional.normalize(precise.T @ left, dim=0)


@contextmanager
def _in_place_of_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    had, before = "forward" in vars(module), module.forward
    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = before
        else:
            del module.forward


def _without_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    return run


class _LowRankWeights(TorchFunctionMode):
    """Products with these weights have a gradient of low rank: of `nn.Linear`, and of the `Conv1D` of Hugging Face's GPT-2."""

    def __init__(self, weights: Iterable[int], vectors: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self._weights = frozenset(weights)
        self._vectors = vectors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if id(bound["weight"]) in self._weights:
                weight = bound["weight"]
                vectors = self._vectors(weight, False)
                return _LowRankLinear.apply(bound["input"], weight, bound.get("bias"), vectors)  # type: ignore[no-untyped-call]
        elif func is torch.addmm and not kwargs and len(args) == 3 and id(args[2]) in self._weights:
            bias, value, weight = args
            return _LowRankLinear.apply(value, weight.T, bias, self._vectors(weight, True))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _LowRankLinear(torch.autograd.Function):
    """`functional.linear`, with `vectors` [inputs, rank] in whose span the gradient of the weight lies."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, vectors: torch.Tensor
    ) -> torch.Tensor:
        """[..., inputs], [outputs, inputs], [outputs] -> [..., outputs]."""
        ctx.save_for_backward(value, weight, vectors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """In the precision of the output, as under autocast."""
        value, weight, vectors = ctx.saved_tensors
        of_value = of_weight = of_bias = None
        dtype = gradient.dtype
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_value = (gradient @ weight.to(dtype)).to(value.dtype)
        if ctx.needs_input_grad[1]:
            basis = vectors.to(dtype)
            inputs = value.reshape(-1, value.shape[-1]).to(dtype)
            of_weight = ((rows.T @ (inputs @ basis)) @ basis.T).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_value, of_weight, of_bias, None


# -- what others make up for -------------------------------------------------------------------------------------------


class Healthy:
    """The parameters that an approximate backward gives no gradient, of those that a rank holds.
    The sums of samples that other workers ran stand for all. `left_out`: none of them ran any."""

    def __init__(self, plan: Plan, model: Model) -> None:
        self._scaled: list[tuple[nn.Parameter, float]] = []
        self.left_out: list[nn.Parameter] = []
        if plan.approximation is None:
            return
        n_approximate = approximate_samples(plan)
        for its in plan.approximation.without:
            for layer in model.held.intersection(range(its.first, its.stop)):
                n_healthy = plan.global_batch - n_approximate.get(layer, 0)
                parameters = [_parameter(model, layer, name) for name in its.names]
                if n_healthy == 0:
                    self.left_out += parameters
                elif n_healthy < plan.global_batch:
                    self._scaled += [(parameter, plan.global_batch / n_healthy) for parameter in parameters]

    def scale(self) -> None:
        """Put into gradients that have been summed the mean of the healthy samples in the place of that of all."""
        for parameter, factor in self._scaled:
            assert parameter.grad is not None, "summed in place"
            parameter.grad.mul_(factor)

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Around the optimizers' steps: parameters that nobody has a gradient of stay as they are, and so does what optimizers
        know of them."""
        gradients = [parameter.grad for parameter in self.left_out]
        for parameter in self.left_out:
            parameter.grad = None
        yield
        for parameter, gradient in zip(self.left_out, gradients, strict=True):
            parameter.grad = gradient


def _parameter(model: Model, layer: int, name: str) -> nn.Parameter:
    """Raises JobError where the profile, from which the plan has the name, knows one that there is not."""
    try:
        return model.layers[layer].get_parameter(name)
    except AttributeError:
        what = f"the profile says that the approximate backward of {model.specs[layer].name} lacks {name!r}, which it has not"
        raise JobError(what, "measure it again with `odyssey profile train.py`") from None


def approximate_samples(plan: Plan) -> dict[int, int]:
    """Layer -> samples of the plan's next step that workers run through it whose backward is approximate."""
    found: dict[int, int] = {}
    for k in plan.samples.in_step:
        for s, stage in enumerate(plan.pipelines[plan.home[k]].stages):
            if plan.runner(k, s) in plan.approximate:
                for layer in set(stage.layers) - plan.samples.summed(k):
                    found[layer] = found.get(layer, 0) + plan.samples.n_of(k)
    return found
