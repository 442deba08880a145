"""``param_groups_for_muon`` splits models as the table in docs/muon.md promises."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from amp_ext.optim import Muon, param_groups_for_muon


class ConvNet(nn.Module):
    """Like a network of torchvision: convolutions, norms and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.fc = nn.Linear(4, 10)


class Conv1D(nn.Module):
    """transformers' linear layer, which stores its weight as [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(nx, nf))
        self.bias = Parameter(torch.zeros(nf))


class GPT2(nn.Module):
    """GPT-2 of transformers: Conv1D, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.wpe = nn.Embedding(12, 16)
        self.c_attn = Conv1D(48, 16)
        self.ln_f = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.wte.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(width))


class Llama(nn.Module):
    """Like Llama: an output layer of its own, found by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 16)
        self.q_proj = nn.Linear(16, 16, bias=False)
        self.down_proj = nn.Linear(40, 16, bias=False)
        self.norm = RMSNorm(16)
        self.lm_head = nn.Linear(16, 50, bias=False)


class MoE(nn.Module):
    """A router, and experts in one tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.Module()
        self.experts.gate_up_proj = Parameter(torch.empty(4, 16, 32))


class LoRA(nn.Module):
    """A frozen layer with two trained factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(16, 24).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 24, bias=False)})


SPLITS: dict[type[nn.Module], dict[str, str]] = {
    ConvNet: {
        "stem.weight": "muon",
        "norm.weight": "adamw",
        "norm.bias": "adamw",
        "depthwise.weight": "adamw?",
        "depthwise.bias": "adamw",
        "up.weight": "muon",
        "up.bias": "adamw",
        "fc.weight": "muon",
        "fc.bias": "adamw",
    },
    GPT2: {
        "wte.weight": "adamw",
        "wpe.weight": "adamw",
        "c_attn.weight": "muon",
        "c_attn.bias": "adamw",
        "ln_f.weight": "adamw",
        "ln_f.bias": "adamw",
    },
    Llama: {
        "embed_tokens.weight": "adamw",
        "q_proj.weight": "muon",
        "down_proj.weight": "muon",
        "norm.weight": "adamw",
        "lm_head.weight": "adamw",
    },
    MoE: {"router.weight": "muon", "router.bias": "adamw", "experts.gate_up_proj": "adamw?"},
    LoRA: {"lora_A.default.weight": "muon", "lora_B.default.weight": "muon"},
}


def split(model: nn.Module, **options: Any) -> tuple[Any, list[str]]:
    """Returns the groups, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = param_groups_for_muon(model, lr=0.02, adamw={"lr": 1e-3}, **options)
    return groups, [str(each.message) for each in caught]


@pytest.mark.parametrize("model", SPLITS)
def test_each_kind_of_model_is_split_as_promised(model):
    made = model()
    groups, warned = split(made)
    assert {row.name: row.algorithm for row in groups.rows} == {
        name: algorithm.rstrip("?") for name, algorithm in SPLITS[model].items()
    }
    unknown = [name for name, algorithm in SPLITS[model].items() if algorithm.endswith("?")]
    assert len(warned) == bool(unknown)
    for name in unknown:
        assert name in warned[0]
    names = {param: name for name, param in made.named_parameters()}
    placed = {names[p]: group for group in groups for p in group["params"]}
    assert placed.keys() == SPLITS[model].keys()
    for name, group in placed.items():
        assert group.get("algorithm", "muon") == SPLITS[model][name].rstrip("?")
        is_decayed = group.get("weight_decay") != 0.0
        assert is_decayed == (made.get_parameter(name).dim() >= 2)
    optimizer = Muon(groups)
    for param in made.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    optimizer.step()


def test_convolutions_and_conv1d_are_stepped_by_their_layout():
    groups, _ = split(ConvNet())
    of_shape = {tuple(p.shape): group for group in groups for p in group["params"]}
    assert of_shape[8, 3, 3, 3]["flatten"] is True
    assert of_shape[8, 4, 2, 2]["transposed"] is True
    groups, _ = split(GPT2())
    assert next(g for g in groups if g.get("transposed"))["params"][0].shape == (16, 48)


def test_attention_recurrent_layers_and_parametrizations_are_named_in_one_warning():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "lstm": nn.LSTM(8, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        }
    )
    groups, (warned,) = split(model)
    for name in ("attention.in_proj_weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "original1"):
        assert name in warned
    muon = [row.name for row in groups.rows if row.algorithm == "muon"]
    assert muon == ["attention.out_proj.weight"]


def test_exclude_names_modules_parameters_and_patterns():
    for pattern in ("q_proj", "q_proj.weight", "q_*"):
        groups, warned = split(Llama(), exclude=[pattern])
        row = next(row for row in groups.rows if row.name == "q_proj.weight")
        assert (row.algorithm, row.why) == ("adamw", f"excluded by {pattern!r}")
        assert not warned
    _, warned = split(MoE(), exclude=["experts"])
    assert not warned
    with pytest.raises(ValueError, match=r"exclude must have names .* 'k_proj'"):
        split(Llama(), exclude=["k_proj"])
    with pytest.raises(ValueError, match="adamw must have 'lr'"):
        param_groups_for_muon(Llama(), lr=0.02, adamw={})
    for options in ({"adamw": {"lr": 0.1, "beta": 0.9}}, {"adamw": {"lr": 0.1}, "moment": 0.9}):
        with pytest.raises(TypeError, match=r"options must be among .*, got \['(beta|moment)'\]"):
            param_groups_for_muon(Llama(), lr=0.02, **options)


def test_the_groups_print_as_a_table():
    groups, _ = split(Llama())
    lines = str(groups).splitlines()
    assert lines[0].split() == ["parameter", "shape", "algorithm", "why"]
    assert lines[-1].split() == ["lm_head.weight", "[50,", "16]", "adamw", "output", "layer"]
