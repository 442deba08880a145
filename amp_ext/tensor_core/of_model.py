"""Finds the dimensions of a model's matrix products.

Seen are the layers of torch.nn and classes derived from them. What a module of another kind
multiplies by hand is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from amp_ext.tensor_core.dimension import CountParameters, Dimension, growth


@dataclass(frozen=True)
class _Layer:
    """The sizes of a layer, by its attributes, and how many parameters belong to any sizes.

    Attributes:
        sizes: Every size that ``count`` takes.
        count: Counts the layer's own parameters.
        vocabulary: Which size may be the vocabulary.
        heads: How many heads share ``embed_dim``.
    """

    sizes: dict[str, int]
    count: CountParameters
    vocabulary: str = ""
    heads: int = 1


def dimensions(model: nn.Module) -> Iterator[Dimension]:
    """Yields the dimensions of all layers, each with its path in the model.

    Args:
        model: Of which only shapes are read.

    Raises:
        ValueError: If a parameter has no shape yet.
    """
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ValueError(
                f"tensor_core_advice: {name} must have a shape, got a lazy parameter: run the "
                "model once first"
            )
    total = sum(param.numel() for param in model.parameters())
    vocabulary = _vocabulary(model)
    heads: dict[int, int] = {}  # that share a width, which all layers around them have as well
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            width = module.embed_dim
            heads[width] = math.lcm(heads.get(width, 1), module.num_heads)
    weights: set[object] = set()
    parts_of_attention: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            parts_of_attention.update(module.children())
        make = next((make for kind, make in _KINDS.items() if isinstance(module, kind)), None)
        if make is None or module in parts_of_attention:
            continue
        # A weight that is computed anew at each access (weight norm) is not among the parameters.
        weight = dict(module.named_parameters(recurse=False)).get("weight", module)
        layer = make(module, weight not in weights)
        weights.add(weight)
        prefix = f"{path}." if path else ""
        for name, size in layer.sizes.items():
            is_vocabulary = name == layer.vocabulary and size == vocabulary
            if name == "num_embeddings" and not is_vocabulary:
                continue  # rows that are only looked up are in no product
            extra = growth(layer.count, layer.sizes, name)
            shared_by = 1 if is_vocabulary else heads.get(size, 1)
            yield Dimension(f"{prefix}{name}", size, extra, total, is_vocabulary, shared_by)
        if layer.heads > 1:
            extra = growth(layer.count, layer.sizes, "embed_dim", layer.heads)
            size = layer.sizes["embed_dim"] // layer.heads
            yield Dimension(f"{prefix}head_dim", size, extra, total)


def _vocabulary(model: nn.Module) -> int:
    """Returns the size of the vocabulary, or 0 if there is none.

    It is the largest number of embeddings that a linear layer gives out for their width; without
    such a layer (weights may be multiplied by hand) the largest number of embeddings. Few, or as
    many as they are wide, are of another kind: types of tokens, positions.
    """
    tables = {
        (m.embedding_dim, m.num_embeddings)
        for m in model.modules()
        if isinstance(m, _EMBEDDINGS)
        and m.num_embeddings >= _SMALLEST_VOCABULARY
        and m.num_embeddings != m.embedding_dim
    }
    outputs = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)}
    return max((number for _, number in tables & outputs or tables), default=0)


def _linear(module: nn.Linear, own_weight: bool) -> _Layer:
    biases = int(module.bias is not None)

    def count(in_features: int, out_features: int) -> int:
        return out_features * (own_weight * in_features + biases)

    sizes = {"in_features": module.in_features, "out_features": module.out_features}
    return _Layer(sizes, count, vocabulary="out_features")


def _embedding(module: nn.Embedding | nn.EmbeddingBag, own_weight: bool) -> _Layer:
    def count(num_embeddings: int, embedding_dim: int) -> int:
        return own_weight * num_embeddings * embedding_dim

    sizes = {"num_embeddings": module.num_embeddings, "embedding_dim": module.embedding_dim}
    return _Layer(sizes, count, vocabulary="num_embeddings")


def _convolution(module: Any, own_weight: bool) -> _Layer:
    groups, biases = module.groups, int(module.bias is not None)
    taps = own_weight * math.prod(module.kernel_size)
    ins, outs = module.in_channels // groups, module.out_channels // groups
    if groups > 1 and ins == 1:
        return _Layer({}, lambda: 0)  # depthwise: every channel is filtered alone
    names = ("in_channels", "out_channels")
    if groups > 1:
        names = ("in_channels / groups", "out_channels / groups")

    def count(**sizes: int) -> int:
        ins, outs = (sizes[name] for name in names)
        return groups * outs * (ins * taps + biases)

    return _Layer(dict(zip(names, (ins, outs), strict=True)), count)


def _attention(module: nn.MultiheadAttention, own_weight: bool) -> _Layer:
    biases = 4 * (module.in_proj_bias is not None) + 2 * (module.bias_k is not None)
    sizes = {"embed_dim": module.embed_dim}
    if {module.kdim, module.vdim} != {module.embed_dim}:
        sizes |= {"kdim": module.kdim, "vdim": module.vdim}

    def count(embed_dim: int, kdim: int | None = None, vdim: int | None = None) -> int:
        keys_and_values = 2 * embed_dim if kdim is None or vdim is None else kdim + vdim
        return embed_dim * (2 * embed_dim + keys_and_values + biases)

    return _Layer(sizes, count, heads=module.num_heads)


def _recurrent(module: nn.RNNBase, own_weight: bool) -> _Layer:
    gates = module.get_parameter("weight_ih_l0").shape[0] // module.hidden_size
    directions = 1 + module.bidirectional

    def count(input_size: int, hidden_size: int, proj_size: int = 0) -> int:
        output = proj_size or hidden_size
        inputs = input_size + (module.num_layers - 1) * output * directions
        each = gates * hidden_size * (output + 2 * module.bias) + proj_size * hidden_size
        return directions * (gates * hidden_size * inputs + module.num_layers * each)

    sizes = {"input_size": module.input_size, "hidden_size": module.hidden_size}
    return _Layer(sizes | ({"proj_size": module.proj_size} if module.proj_size else {}), count)


def _recurrent_cell(module: nn.RNNCellBase, own_weight: bool) -> _Layer:
    gates = module.get_parameter("weight_ih").shape[0] // module.hidden_size
    biases = 2 * bool(module.bias)

    def count(input_size: int, hidden_size: int) -> int:
        return gates * hidden_size * (input_size + hidden_size + biases)

    return _Layer({"input_size": module.input_size, "hidden_size": module.hidden_size}, count)


_SMALLEST_VOCABULARY = 64
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

# Each takes the layer and whether its weight was not met before in a layer that it is tied to.
_KINDS: dict[Any, Callable[[Any, bool], _Layer]] = {
    nn.Linear: _linear,
    _EMBEDDINGS: _embedding,
    _CONVOLUTIONS: _convolution,
    nn.MultiheadAttention: _attention,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _recurrent_cell,
}
