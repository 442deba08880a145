"""The advice on Tensor Cores: every kind of layer, with padded sizes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from amp_ext.tensor_core import tensor_core_advice


def sizes(model: Any) -> dict[str, tuple[int, int]]:
    """Returns every dimension that is to be padded, as it is and padded."""
    return {row.dimension: (row.size, row.padded) for row in tensor_core_advice(model)}


class Text(nn.Module):
    """A model of text with a table of positions, and perhaps an output layer."""

    def __init__(
        self, vocabulary: int = 50257, width: int = 16, output: bool = True, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(1001, width)
        self.kinds = nn.Embedding(2, width)
        self.is_next = nn.Linear(width, 2)
        if output:
            self.output = nn.Linear(width, vocabulary)
        if tied:
            self.output.weight = self.tokens.weight


# Sizes that need padding, and the sizes to pad to.
LINEAR = {"in_features": (30, 32), "out_features": (17, 24)}
CHANNELS = {"in_channels": (3, 8), "out_channels": (20, 24)}
TABLE = {"num_embeddings": (100, 128), "embedding_dim": (6, 8)}
RECURRENT = {"input_size": (7, 8), "hidden_size": (12, 16)}
LAYERS = {
    "linear": (nn.Linear, LINEAR),
    "conv2d": (partial(nn.Conv2d, kernel_size=(3, 5)), CHANNELS),
    "conv1d": (partial(nn.Conv1d, kernel_size=3), CHANNELS),
    "transposed-conv": (partial(nn.ConvTranspose2d, kernel_size=2), CHANNELS),
    "embedding": (nn.Embedding, TABLE),
    "embedding-bag": (nn.EmbeddingBag, TABLE),
    "attention": (partial(nn.MultiheadAttention, num_heads=3), {"embed_dim": (30, 48)}),
    "lstm": (partial(nn.LSTM, num_layers=3, bidirectional=True), RECURRENT),
    "rnn": (nn.RNN, RECURRENT),
    "lstm-cell": (nn.LSTMCell, RECURRENT),
}


@pytest.mark.parametrize(("build", "expected"), LAYERS.values(), ids=LAYERS)
def test_each_size_of_a_layer_is_padded(build, expected):
    given, padded = ({name: pair[i] for name, pair in expected.items()} for i in (0, 1))
    assert sizes(build(**given)) == expected
    assert tensor_core_advice(build(**padded)) == []


def output_and_table(*padding: int) -> dict[str, tuple[int, ...]]:
    """Returns what is to be padded of a Text with this vocabulary."""
    return dict.fromkeys(["tokens.num_embeddings", "output.out_features"], padding) | IS_NEXT


IS_NEXT = {"is_next.out_features": (2, 8)}  # and no rows of the other tables
MODELS = {
    # 1000 is a multiple of 8, 125 is not.
    "heads-share": (lambda: nn.MultiheadAttention(1000, 8), {"embed_dim": (1000, 1024)}),
    "layers-around-attention": (
        lambda: nn.TransformerEncoderLayer(300, nhead=6, dim_feedforward=1201),
        {
            "self_attn.embed_dim": (300, 336),
            "linear1.in_features": (300, 336),
            "linear1.out_features": (1201, 1208),
            "linear2.in_features": (1201, 1208),
            "linear2.out_features": (300, 336),
        },
    ),
    "groups": (
        lambda: nn.Conv2d(24, 40, 3, groups=4),
        {"in_channels / groups": (6, 8), "out_channels / groups": (10, 16)},
    ),
    "depthwise": (lambda: nn.Conv2d(12, 12, 3, groups=12), {}),
    "vocabulary": (Text, output_and_table(50257, 50304)),
    "tied": (lambda: Text(tied=True), output_and_table(50257, 50304)),
    "no-output-layer": (
        lambda: Text(output=False),
        {"tokens.num_embeddings": (50257, 50304)} | IS_NEXT,
    ),
    "smaller-than-positions": (lambda: Text(65), output_and_table(65, 128)),
    "as-long-as-wide": (
        lambda: nn.Sequential(nn.Embedding(1000, 72), nn.Embedding(72, 72), nn.Linear(72, 72)),
        {"0.num_embeddings": (1000, 1024)},
    ),
}


@pytest.mark.parametrize(("build", "expected"), MODELS.values(), ids=MODELS)
def test_dimensions_of_models(build, expected):
    with torch.device("meta"):
        model = build()
    assert sizes(model) == expected


def test_layers_that_are_alike_are_joined():
    model = nn.Sequential(*(nn.Linear(10, 16) for _ in range(3)), nn.Linear(12, 16))
    three, one = tensor_core_advice(model)
    assert (three.dimension, three.layers, three.size) == ("*.in_features", 3, 10)
    assert (one.dimension, one.layers, one.size) == ("3.in_features", 1, 12)


def test_what_is_not_a_model_is_refused():
    words = "tensor_core_advice: model must be a torch.nn.Module, got dict. Build"
    with pytest.raises(TypeError, match=re.escape(words)):
        tensor_core_advice({"vocab_size": 50257})
