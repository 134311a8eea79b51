"""The attention and the feed-forward of a layer's blocks, found by the names that models give them, or that the script says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

ATTENTION = ("attention", "attn", "self_attn", "self_attention")
FEED_FORWARD = ("feed_forward", "mlp", "ffn", "fc1", "fc2", "linear1", "linear2")
"""Hugging Face's decoders, torch.nn.TransformerEncoderLayer and examples/train_gpt.py call them so."""


class Names(NamedTuple):
    """What the modules are called that are the attention, and the feed-forward, of whatever module contains them."""

    attention: tuple[str, ...] = ATTENTION
    feed_forward: tuple[str, ...] = FEED_FORWARD


class Sublayers(NamedTuple):
    """The modules of all blocks of a layer that are one or the other."""

    attention: tuple[nn.Module, ...]
    feed_forward: tuple[nn.Module, ...]


def sublayers(layer: nn.Module, names: Names) -> Sublayers:
    """Find those of each module in the layer that has both; nothing where none has."""
    attention: dict[nn.Module, None] = {}
    feed_forward: dict[nn.Module, None] = {}
    for module in layer.modules():
        of_attention, of_feed_forward = (list(_children(module, its)) for its in names)
        if of_attention and of_feed_forward:
            attention.update(dict.fromkeys(of_attention))
            feed_forward.update(dict.fromkeys(of_feed_forward))
    return Sublayers(tuple(attention), tuple(feed_forward))


def _children(module: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    for name in names:
        child = module._modules.get(name)
        if child is not None:
            yield child
