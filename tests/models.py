"""Small models and data for tests: a GPT in layers, in the variants that make an engine's life hard.

    gpt      embedding, blocks with a causal mask as buffer, norm and head
    tied     the head uses the embedding's own weight: the same Parameter object in the first and the last layer
    frozen   the embedding and one block's norms do not train: a layer without trainable parameters, and one with both
    prefix   the first three of the layers do not train at all: whole stages need no gradient
    nested   between layers travels (hidden, {"ids": int64, "weight": float that needs no gradient})
    shared   all blocks have one rotary module between them, with buffers of both kinds and a parameter, and one mask
    parts    attention and feed-forward are modules of their own, as in Hugging Face's models
    mlp      linear layers and nothing else

Everything is float64 unless told otherwise, so that exactness can be asked for to 1e-10.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

VARIANTS = ("gpt", "tied", "frozen", "prefix", "nested", "mlp", "shared", "parts")


class TokenData:
    """Deterministic token sequences that can be learned: each token follows from the one before by a rule of the sample."""

    def __init__(self, n_samples: int = 96, n_tokens: int = 17, context: int = 8) -> None:
        self.n_samples, self.n_tokens, self.context = n_samples, n_tokens, context

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target), both `[context]` of int64."""
        if not 0 <= index < self.n_samples:
            raise IndexError(index)
        tokens = [(index * 7 + 3) % self.n_tokens]
        for _ in range(self.context):
            tokens.append((tokens[-1] * (2 + index % 3) + 1) % self.n_tokens)
        return torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])


class VectorData:
    """Points and a smooth function of them, for the `mlp`."""

    def __init__(self, n_samples: int = 96, width: int = 16, dtype: torch.dtype = torch.float64) -> None:
        self.n_samples, self.width, self.dtype = n_samples, width, dtype

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target), both `[width]`."""
        if not 0 <= index < self.n_samples:
            raise IndexError(index)
        point = torch.sin(torch.arange(1, self.width + 1, dtype=torch.float64) * (index + 1) * 0.37)
        return point.to(self.dtype), point.roll(1).square().to(self.dtype)


class Embedding(nn.Module):
    def __init__(self, n_tokens: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(n_tokens, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, width]."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, with dropout behind both."""

    def __init__(self, width: int, n_heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(context, context).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.n_heads, width // self.n_heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (width // self.n_heads) ** -0.5
        scores = scores.masked_fill(~self.mask[:seq, :seq], float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm2(x)))))


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same, causal."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.n_heads, width // self.n_heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq, width))


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        return self.down(self.dropout(torch.tanh(self.up(x))))


class PartsBlock(nn.Module):
    """Dropout within the feed-forward, which a pass that computes it again has to draw alike."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, n_heads), FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Rotary(nn.Module):
    """Turns pairs of a vector's elements by angles of the position; as models have it once, for all their blocks."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        frequencies = 10.0 ** -torch.linspace(0, 2, width // 2, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("positions", torch.arange(context, dtype=torch.float64))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        angles = self.positions[: x.shape[1], None] * self.frequencies
        first, second = x.chunk(2, dim=-1)
        turned = [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()]
        return torch.cat(turned, dim=-1) * self.gain


class SharedBlock(Block):
    def __init__(self, width: int, n_heads: int, context: int, dropout: float, rotary: Rotary) -> None:
        super().__init__(width, n_heads, context, dropout)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.rotary(x))


class Head(nn.Module):
    def __init__(self, width: int, n_tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, n_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> logits [batch, seq, token]."""
        return self.linear(self.norm(x))


class NestedEmbedding(Embedding):
    """Passes the tokens on as integers, and a weight for each position that needs no gradient."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = super().forward(tokens)
        weight = torch.linspace(0.5, 1.0, tokens.shape[1], dtype=hidden.dtype, device=hidden.device)
        return hidden, {"ids": tokens, "weight": weight.expand(tokens.shape).contiguous()}


class NestedBlock(Block):
    """Uses everything that arrives: an embedding of the ids, and the weights on what the block adds."""

    def __init__(self, n_tokens: int, width: int, n_heads: int, context: int, dropout: float) -> None:
        super().__init__(width, n_heads, context, dropout)
        self.again = nn.Embedding(n_tokens, width)

    def forward(self, inputs: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, rest = inputs
        added = super().forward(hidden + self.again(rest["ids"])) - hidden
        return hidden + added * rest["weight"].unsqueeze(-1), rest


class NestedHead(Head):
    def forward(self, inputs: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return super().forward(inputs[0])


def build_layers(
    variant: str = "gpt",
    *,
    n_blocks: int = 4,
    width: int = 16,
    n_heads: int = 2,
    n_tokens: int = 17,
    context: int = 8,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> list[nn.Module]:
    """The layers of one of `VARIANTS`: `n_blocks` and one at either end."""
    layers: list[nn.Module]
    if variant == "mlp":
        ends = [nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, width)]
        middle = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(n_blocks)]
        layers = [ends[0], *middle, ends[1]]
    elif variant == "nested":
        blocks = [NestedBlock(n_tokens, width, n_heads, context, dropout) for _ in range(n_blocks)]
        layers = [NestedEmbedding(n_tokens, width, context), *blocks, NestedHead(width, n_tokens)]
    elif variant == "shared":
        rotary = Rotary(width, context)
        sharing = [SharedBlock(width, n_heads, context, dropout, rotary) for _ in range(n_blocks)]
        for block in sharing[1:]:
            block.mask = sharing[0].mask
        layers = [Embedding(n_tokens, width, context), *sharing, Head(width, n_tokens)]
    elif variant == "parts":
        parted = [PartsBlock(width, n_heads, dropout) for _ in range(n_blocks)]
        layers = [Embedding(n_tokens, width, context), *parted, Head(width, n_tokens)]
    elif variant in VARIANTS:
        plain = [Block(width, n_heads, context, dropout) for _ in range(n_blocks)]
        layers = [Embedding(n_tokens, width, context), *plain, Head(width, n_tokens)]
    else:
        raise ValueError(f"no variant {variant!r}, there are {', '.join(VARIANTS)}")
    layers = [layer.to(dtype) for layer in layers]
    if variant == "tied":
        layers[-1].linear.weight = layers[0].token.weight
    if variant == "frozen":
        layers[0].requires_grad_(False)
        layers[1].norm1.requires_grad_(False)
    if variant == "prefix":
        for layer in layers[:3]:
            layer.requires_grad_(False)
    return layers


def set_dropout(layers: Iterable[nn.Module], probability: float) -> None:
    """From now on."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Dropout):
                module.p = probability


def data_for(variant: str, n_samples: int = 96, dtype: torch.dtype = torch.float64) -> TokenData | VectorData:
    """The data set that the variant trains on."""
    return VectorData(n_samples, dtype=dtype) if variant == "mlp" else TokenData(n_samples)


def loss_for(variant: str):
    """Scalar mean over the samples (all have the same number of tokens)."""
    return nn.functional.mse_loss if variant == "mlp" else token_loss


def metrics_for(variant: str):
    """By name: means over the samples, a tensor and a number."""
    if variant == "mlp":
        return {"error": nn.functional.l1_loss, "largest": lambda output, target: output.amax(-1).mean().item()}
    return {"accuracy": accuracy, "largest": lambda output, target: output.amax(-1).mean().item()}


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(-1) == target).double().mean()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
