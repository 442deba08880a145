"""The lists of tensors that are timed, from the public dimensions of the models they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

Size = tuple[int, ...]

LLAMA_LAYERS = 32
#: Below this many elements the figures are those of caches and calls, not of memory.
LARGE = 16_000_000


@dataclass(frozen=True)
class ShapeList:
    """The parameters of a model, without values.

    Attributes:
        name: As the tables show it.
        sizes: Shape of each tensor.
        many_small: Whether the time is the host's, not the memory's.
        cold: Whether the caches are emptied before each step, as a backward pass does it.
    """

    name: str
    sizes: tuple[Size, ...]
    many_small: bool = False
    cold: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(size) for size in self.sizes)

    def shrunk(self, divisor: int) -> ShapeList:
        """Returns as many tensors, flat and with a share of the elements, at least one each."""
        if divisor == 1:
            return self
        sizes = tuple((max(1, math.prod(size) // divisor),) for size in self.sizes)
        return replace(self, name=f"{self.name} (1/{divisor})", sizes=sizes)

    def with_cold_caches(self) -> ShapeList:
        """Returns the same tensors, met by each step with empty caches."""
        return replace(self, name=f"{self.name}, cold caches", cold=True)


def uniform(count: int, size: int) -> ShapeList:
    """Returns tensors of one size, with rows of 32 where that divides it.

    States in 8 bits have a scale for 32 neighbours in a row.
    """
    short = f"{size // 10**6}M" if size >= 10**6 else f"{size // 1000}k" if size >= 1000 else size
    shape = (size // 32, 32) if size % 32 == 0 else (size,)
    return ShapeList(f"{count:,} × {short}", (shape,) * count, size < 1000)


def small_model(layers: int, width: int) -> ShapeList:
    """Returns some linear layers of one width, each with a weight and a bias."""
    sizes: tuple[Size, ...] = ((width, width), (width,)) * layers
    return ShapeList(f"{layers} layers of {width}", sizes, many_small=True)


def resnet50() -> ShapeList:
    """Returns the 25.6M parameters of ResNet-50.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", 2016, table 1.
    """

    def convolution(inputs: int, outputs: int, kernel: int) -> list[Size]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # and its batch norm

    sizes = convolution(3, 64, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += convolution(channels, width, 1)
            sizes += convolution(width, width, 3)
            sizes += convolution(width, 4 * width, 1)
            if block == 0:
                sizes += convolution(channels, 4 * width, 1)
            channels = 4 * width
    return ShapeList("ResNet-50", (*sizes, (1000, channels), (1000,)))


def gpt2() -> ShapeList:
    """Returns the 124M parameters of the smallest GPT-2; its head is its token embedding.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2.
    """
    width = 768
    layer: list[Size] = [(width,), (width,)]
    layer += [(width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ShapeList("GPT-2", ((50257, width), (1024, width), *layer * 12, (width,), (width,)))


def llama3_8b(layers: int = LLAMA_LAYERS) -> ShapeList:
    """Returns Llama-3-8B's 8.03B parameters, or some of its layers without embedding and head.

    Args:
        layers: Up to 32. With fewer, the name says how many.

    Reference:
        Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3.
    """
    width, hidden, key_value, vocabulary = 4096, 14336, 1024, 128256
    layer: Iterable[Size] = (
        *((width, width), (key_value, width), (key_value, width), (width, width)),
        *((hidden, width), (hidden, width), (width, hidden)),
        *((width,), (width,)),
    )
    if layers < LLAMA_LAYERS:
        return ShapeList(f"Llama-3-8B, {layers} of {LLAMA_LAYERS} layers", (*layer,) * layers)
    embedding = (vocabulary, width)
    return ShapeList("Llama-3-8B", (embedding, *(*layer,) * layers, (width,), embedding))


def for_device(device_type: str, room: int) -> list[ShapeList]:
    """Returns what is timed on a device.

    Args:
        device_type: "cpu" or "cuda".
        room: Number of elements that fit there.
    """
    fits = room // llama3_8b(1).elements
    models = [resnet50(), gpt2()]
    small = [uniform(1_000, 64), uniform(10_000, 64)]
    if device_type == "cpu":
        large = [uniform(4, 8_000_000), uniform(300, 100_000), uniform(1, 64_000_000)]
        return [*large, *models, llama3_8b(1), *small]
    whole = room >= llama3_8b().elements
    llama = llama3_8b(LLAMA_LAYERS if whole else max(1, min(LLAMA_LAYERS - 1, fits)))
    large = [uniform(4, 64_000_000), uniform(300, 100_000), uniform(600, 100_000)]
    return [*large, uniform(1, 256_000_000), *models, llama, *small]


def beside_peers() -> list[ShapeList]:
    """Returns what is timed beside the peers: large lists, then models that fit into caches."""
    small = [small_model(3, 128), small_model(10, 256)]
    large = [uniform(4, 8_000_000), uniform(300, 100_000)]
    return [*large, *small, *(shapes.with_cold_caches() for shapes in small)]
