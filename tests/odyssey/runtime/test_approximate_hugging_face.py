"""The approximate backward of Hugging Face's blocks: their parts are found, and gradients are those of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from odyssey.model.sublayers import Names, sublayers
from odyssey.plan.approximation import ApproximateCost, LowRank
from odyssey.profiling.approximate_cost import approximate_cost
from odyssey.runtime.approximate import Approximately
from odyssey.runtime.job_spec import JobSpec

pytest.importorskip("transformers", reason="`make soak` installs it")
pytestmark = pytest.mark.soak

WIDTH, CONTEXT, RANK = 64, 16, 8
SPEC = JobSpec(None, None, None, None, None, 0, None)


class Layer(nn.Module):
    """A block as a layer of a Job: from hidden states to hidden states."""

    def __init__(self, block: nn.Module, **given: Any) -> None:
        super().__init__()
        self.block, self._given = block, given

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x, **self._given)
        return output[0] if isinstance(output, tuple) else output


def gpt2() -> Layer:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    its = GPT2Config(n_embd=WIDTH, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa")
    return Layer(GPT2Block(its))


def llama() -> Layer:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
    its = LlamaConfig(**sizes, attn_implementation="sdpa")
    rotary = LlamaRotaryEmbedding(its)
    return Layer(LlamaDecoderLayer(its, 0), position_embeddings=rotary(torch.zeros(1), torch.arange(CONTEXT)[None]))


def opt() -> Layer:
    from transformers.models.opt.modeling_opt import OPTConfig, OPTDecoderLayer

    its = OPTConfig(hidden_size=WIDTH, ffn_dim=2 * WIDTH, num_attention_heads=4, dropout=0.0, attn_implementation="sdpa")
    return Layer(OPTDecoderLayer(its, 0))


def neox() -> Layer:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXConfig, GPTNeoXLayer, GPTNeoXRotaryEmbedding

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    its = GPTNeoXConfig(**sizes, hidden_dropout=0.0, attn_implementation="sdpa")
    rotary = GPTNeoXRotaryEmbedding(its)
    at = rotary(torch.zeros(1), torch.arange(CONTEXT)[None])
    return Layer(GPTNeoXLayer(its, 0), attention_mask=None, position_embeddings=at)


NORM = {gpt2: "ln_1", llama: "input_layernorm", opt: "self_attn_layer_norm", neox: "input_layernorm"}


@pytest.mark.parametrize("build", NORM, ids=lambda build: build.__name__)
def test_it_goes_back_as_the_formulas_say(build: Any) -> None:
    torch.manual_seed(0)
    layer = build()
    value = torch.randn(2, CONTEXT, WIDTH, requires_grad=True)
    gradient = torch.randn(2, CONTEXT, WIDTH)
    cost = approximate_cost(layer, value, LowRank(RANK), SPEC)
    assert isinstance(cost, ApproximateCost), cost
    (attention,) = sublayers(layer, Names()).attention
    of_attention = {id(weight) for weight in attention.parameters()}
    named = dict(layer.named_parameters())
    its = {name for name, weight in named.items() if id(weight) in of_attention or f".{NORM[build]}." in name}
    assert set(cost.without) == its

    with Approximately(Names(), LowRank(RANK)).passing(layer):
        output = layer(value)
    found = torch.autograd.grad(output, [value, *named.values()], gradient, allow_unused=True)
    expected = _expected(layer, attention, value, gradient, list(named.values()))
    for (name, weight), one, exact in zip((("value", value), *named.items()), found, expected, strict=True):
        if exact is None or name in its:
            assert one is None
            continue
        if weight.ndim == 2 and name != "value":
            matrix = weight.detach().T if build is gpt2 else weight.detach()
            span = torch.linalg.svd(matrix.double())[2][:RANK].float()
            exact = (exact.T @ span.T @ span).T if build is gpt2 else exact @ span.T @ span
        torch.testing.assert_close(one, exact, rtol=1e-3, atol=1e-4, msg=name)


def _expected(
    layer: Layer, attention: nn.Module, value: Tensor, gradient: Tensor, weights: list[nn.Parameter]
) -> tuple[Tensor | None, ...]:
    """Exact gradients with the output of attention taken for a constant."""

    def constant(module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.detach, output)

    handle = attention.register_forward_hook(constant)
    output = layer(value)
    handle.remove()
    return torch.autograd.grad(output, [value, *weights], gradient, allow_unused=True)
