"""Finds the dimensions of a transformer in its configuration, by the names that Hugging Face uses.

Parameters are estimated from the matrices of a decoder or encoder: embeddings, attention and two
matrices in each feed-forward network, three where RMS norms or the name tell that it is gated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from amp_ext.plain_numbers import is_count, plain
from amp_ext.tensor_core.dimension import CountParameters, Dimension, growth

# What each name stands for.
_ROLES = {
    "vocab_size": "vocabulary",
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), "width"),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim"), "inner"),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), "inner"),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), "heads"),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), "heads"),
    "num_key_value_heads": "key_value_heads",
    **dict.fromkeys(("head_dim", "d_kv"), "head_width"),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), "layers"),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "moe_intermediate_size"), "other"),
}
_IN_A_PRODUCT = ("vocabulary", "width", "inner", "head_width", "other")

# They only change the number of parameters.
_HINTS = ("tie_word_embeddings", "is_encoder_decoder", "rms_norm_eps", "feed_forward_proj")

#: Every name that is understood.
NAMES = (*_ROLES, *_HINTS)


def dimensions(config: Mapping[str, Any], prefix: str = "") -> Iterator[Dimension]:
    """Yields the dimensions that a configuration and those inside it name.

    Args:
        config: Names that are not understood are passed over, and so are values of None.
        prefix: Path of a configuration that is inside another.

    Raises:
        ValueError: If a value is no positive int, or the width is not divisible by the heads.
    """
    named = {name: plain(config[name]) for name in _ROLES if config.get(name) is not None}
    for name, size in named.items():
        if not is_count(size):
            raise ValueError(
                f"tensor_core_advice: {prefix}{name} must be a positive int, got {size!r}"
            )
    names: dict[str, list[str]] = {}
    for name in named:
        names.setdefault(_ROLES[name], []).append(name)
    sizes = {role: named[same[0]] for role, same in names.items() if role != "other"}
    clear = all(len({named[name] for name in names[role]}) == 1 for role in sizes)
    enough = {"vocabulary", "width", "layers"} <= sizes.keys()
    count = _counting(config) if clear and enough else None
    total = count(**sizes) if count else None

    def make(name: str, size: int, role: str, factor: int = 1, heads: int = 1) -> Dimension:
        extra = growth(count, sizes, role, factor) if count and role in sizes else None
        return Dimension(f"{prefix}{name}", size, extra, total, role == "vocabulary", heads)

    heads = {} if "head_width" in sizes else {name: named[name] for name in names.get("heads", [])}
    for name, size in named.items():
        role = _ROLES[name]
        shared = math.lcm(*heads.values()) if role == "width" else 1
        if role in _IN_A_PRODUCT:
            yield make(name, size, role, heads=shared)
        for heads_name, number in heads.items() if role == "width" else ():
            if size % number:
                raise ValueError(
                    f"tensor_core_advice: {prefix}{name} must be a multiple of {heads_name}, or "
                    f"head_dim be given, got {size} and {number}"
                )
            yield make(f"{name} / {heads_name}", size // number, role, factor=number)
    for name, inner in config.items():
        if isinstance(inner, Mapping):
            yield from dimensions(inner, f"{prefix}{name}.")


def _counting(config: Mapping[str, Any]) -> CountParameters | None:
    """Returns what counts the parameters, or None for models that are built in another way."""
    experts = any("expert" in name and value for name, value in config.items())
    if experts or config.get("is_encoder_decoder") or config.get("kv_lora_rank"):
        return None
    gated = "rms_norm_eps" in config or "gated" in str(config.get("feed_forward_proj"))
    tables = 1 if config.get("tie_word_embeddings", True) else 2

    def count(
        vocabulary: int,
        width: int,
        layers: int,
        inner: int | None = None,
        heads: int = 1,
        key_value_heads: int | None = None,
        head_width: int | None = None,
    ) -> int:
        per_head = head_width or width // heads
        attention = 2 * width * per_head * (heads + (key_value_heads or heads))
        feed_forward = (3 if gated else 2) * width * (inner or 4 * width)
        return tables * vocabulary * width + layers * (attention + feed_forward)

    return count
