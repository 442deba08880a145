"""One dimension of a matrix product, and what padding it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Counts the parameters that belong to some sizes, which are its keyword arguments.
CountParameters = Callable[..., int]


@dataclass(frozen=True)
class Dimension:
    """A dimension that Tensor Cores have to deal with.

    Attributes:
        name: Where it is.
        size: In elements.
        extra_parameters: Takes the padded size and returns how many parameters it adds; None where
            that is unknown.
        all_parameters: Of the whole model; None where that is unknown.
        vocabulary: Whether it is the vocabulary.
        heads: How many heads share it; each share is to be a multiple.
    """

    name: str
    size: int
    extra_parameters: Callable[[int], int] | None
    all_parameters: int | None
    vocabulary: bool = False
    heads: int = 1


def growth(
    count: CountParameters, sizes: Mapping[str, int], name: str, factor: int = 1
) -> Callable[[int], int]:
    """Returns the function that tells how many parameters come with a padded size.

    Args:
        count: Counts the parameters that belong to some sizes.
        sizes: As they are.
        name: Which one is padded.
        factor: How often the padded size is contained in that one.
    """
    return lambda padded: count(**{**sizes, name: factor * padded}) - count(**sizes)
