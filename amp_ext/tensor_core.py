"""Finds dimensions of a model that keep fp16 and bf16 matrix products from full Tensor Core speed.

Tensor Cores read matrices in pieces of 16 bytes, so a dimension should be a multiple of 8 elements
of 16 bits. The vocabulary is usually the largest dimension and the easiest to pad. It should be a
multiple of 64 elements (128 bytes), which is the most efficient on an A100.

Reference:
    NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001), part of the Deep
    Learning Performance documentation, 2023, section 2.2, "Tensor Core Requirements".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["MULTIPLE", "VOCABULARY_MULTIPLE", "Advice", "tensor_core_advice"]

MULTIPLE = 16 // 2  # bytes of an access / bytes of an element
VOCABULARY_MULTIPLE = 128 // 2

# Layer classes that compute matrix products or look up embeddings, and their size attributes.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_SIZES: dict[Any, tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    _EMBEDDINGS: ("num_embeddings", "embedding_dim"),
    _CONVOLUTIONS: ("in_channels", "out_channels"),
    nn.MultiheadAttention: ("embed_dim",),
    (nn.RNNBase, nn.RNNCellBase): ("input_size", "hidden_size"),
}


@dataclass(frozen=True)
class Advice:
    """A dimension that should be padded.

    Attributes:
        dimension: The name of the dimension, such as ``layers.*.up.out_features``. ``*`` replaces
            the index of the layer if several layers have the same advice.
        layers: The number of these layers.
        size: The present size.
        multiple: The number that the size should be a multiple of.
        padded: The next larger multiple.
    """

    dimension: str
    layers: int
    size: int
    multiple: int
    padded: int


def tensor_core_advice(model: nn.Module) -> list[Advice]:
    """Returns the dimensions of matrix products that should be padded, with their padded sizes.

    The checked dimensions are the sizes of linear layers, convolutions (per group), embeddings,
    attention and recurrent layers. The vocabulary is the largest ``num_embeddings``, of
    at least 64, for which a linear layer maps the embedding's width back to that size. If no linear
    layer does, it is the largest of all. The size of another embedding table needs no padding,
    because its rows are only looked up.

    If heads of ``nn.MultiheadAttention`` share a width, the width of each head must be a multiple,
    too. This applies to every dimension of the same size as the attention's width.

    Args:
        model: A model, which is not changed and may be on the meta device.

    Raises:
        TypeError: If ``model`` is not a module.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Embedding(50257, 768)
        >>> for advice in amp_ext.tensor_core.tensor_core_advice(model):
        ...     print(advice.dimension, advice.size, "->", advice.padded)
        num_embeddings 50257 -> 50304
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"tensor_core_advice: model must be a torch.nn.Module, got {type(model).__name__}. "
            "Build the model of a configuration under torch.device('meta')."
        )
    # The vocabulary. Embedding tables that are small or square hold token types or positions.
    tables = {
        (each.embedding_dim, each.num_embeddings)
        for each in model.modules()
        if isinstance(each, _EMBEDDINGS)
        and each.num_embeddings >= VOCABULARY_MULTIPLE
        and each.num_embeddings != each.embedding_dim
    }
    outputs = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)}
    vocabulary = max((number for _, number in tables & outputs or tables), default=0)
    # Maps the width of attention layers to the least common multiple of their numbers of heads.
    heads: dict[int, int] = {}
    parts: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            heads[module.embed_dim] = math.lcm(heads.get(module.embed_dim, 1), module.num_heads)
            parts.update(module.children())
    # Dimensions by their pattern, with * for the index of a layer, their size and its multiple.
    found: dict[tuple[str, int, int], list[str]] = {}
    for path, module in model.named_modules():
        names = next((names for kind, names in _SIZES.items() if isinstance(module, kind)), ())
        groups = module.groups if isinstance(module, _CONVOLUTIONS) else 1
        if module in parts or (groups > 1 and groups == module.in_channels):
            continue  # checked with its attention layer, or depthwise: no matrix product
        for name in names:
            size = getattr(module, name) // groups
            is_vocabulary = size == vocabulary and name in ("num_embeddings", "out_features")
            multiple = VOCABULARY_MULTIPLE if is_vocabulary else MULTIPLE * heads.get(size, 1)
            if (name == "num_embeddings" and not is_vocabulary) or size % multiple == 0:
                continue  # a lookup, which is no matrix product, or a size that fits
            dimension = f"{path}.{name}".lstrip(".") + " / groups" * (groups > 1)
            key = re.sub(r"(?<![^.])\d+(?![^.])", "*", dimension), size, multiple
            found.setdefault(key, []).append(dimension)
    return [
        Advice(all_of[0] if len(all_of) == 1 else name, len(all_of), size, n, size + -size % n)
        for (name, size, n), all_of in found.items()
    ]
