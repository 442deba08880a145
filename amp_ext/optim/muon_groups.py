"""Splits the parameters of a model into groups for Muon and for AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from amp_ext.optim.options import DESCRIPTIONS
from amp_ext.text_table import format_table

__all__ = ["MuonGroups", "MuonRow", "param_groups_for_muon"]

# How a parameter is stepped: the options that its group has besides those of the caller.
_MATRIX: Mapping[str, Any] = {}
_TRANSPOSED: Mapping[str, Any] = {"transposed": True}
_KERNEL: Mapping[str, Any] = {"flatten": True}
_TRANSPOSED_KERNEL: Mapping[str, Any] = {"flatten": True, "transposed": True}
_ADAMW: Mapping[str, Any] = {"algorithm": "adamw"}
_ADAMW_WITHOUT_DECAY: Mapping[str, Any] = {"algorithm": "adamw", "weight_decay": 0.0}


class MuonRow(NamedTuple):
    """A parameter: its name and shape, "muon" or "adamw", and the reason."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    why: str


class MuonGroups(list[dict[str, Any]]):
    """Groups for :class:`~amp_ext.optim.Muon`. As a string, a table of all parameters.

    Attributes:
        rows: For each parameter its name, shape, algorithm ("muon" or "adamw"), and the reason.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], rows: Sequence[MuonRow]) -> None:
        """Stores the groups and the reasons for them."""
        super().__init__(groups)
        self.rows = list(rows)

    def __str__(self) -> str:
        """Returns the table."""
        cells = [[row.name, str([*row.shape]), row.algorithm, row.why] for row in self.rows]
        headings = ["parameter", "shape", "algorithm", "why"]
        return format_table([headings, *cells], left=range(len(headings)))


def param_groups_for_muon(
    model: nn.Module,
    *,
    adamw: Mapping[str, Any],
    exclude: Sequence[str] = (),
    **options: Any,
) -> MuonGroups:
    """Returns the parameters of a model in groups for :class:`~amp_ext.optim.Muon`.

    Weights of linear layers and of convolutions are stepped by Muon. Embeddings, the output layer,
    norms, biases and all parameters of fewer than two dimensions are stepped by AdamW, those of
    fewer than two dimensions without weight decay. The output layer is the model's
    ``get_output_embeddings()``, a linear layer that shares its weight with an embedding, or one
    with as many outputs as an embedding has entries. Parameters of any other kind, such as experts
    of three dimensions or recurrent layers, are stepped by AdamW, with one warning. Frozen
    parameters are left out.

    Args:
        model: The model, before it is wrapped or compiled.
        adamw: Options of the groups that AdamW steps; ``lr`` is required.
        exclude: Names of modules or parameters that AdamW steps instead of Muon, or patterns such
            as "decoder.*.proj".
        **options: Options of the groups that Muon steps, such as ``lr``.

    Returns:
        A list of groups, which prints as a table of all parameters.

    Raises:
        ValueError: If ``adamw`` has no learning rate, or ``exclude`` has a name that fits nothing.
        TypeError: If an option is unknown.

    Example:
        >>> groups = param_groups_for_muon(model, lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
        >>> print(groups)
        >>> optimizer = amp_ext.optim.Muon(groups)
    """
    if "lr" not in adamw:
        raise ValueError(
            "param_groups_for_muon: adamw must have 'lr', because the learning rate of Muon does "
            f"not suit AdamW, got {dict(adamw)}"
        )
    for formula, given in (("MuonHyperparameters", options), ("AdamHyperparameters", adamw)):
        known = [each.name for each in DESCRIPTIONS[formula].options]
        if unknown_names := [name for name in given if name not in known]:
            raise TypeError(
                f"param_groups_for_muon: options must be among {known}, got {unknown_names}"
            )
    params: dict[Tensor, tuple[str, nn.Module]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(module_name, recurse=False):
            if param.requires_grad:
                params.setdefault(param, (name, module))
    of_adamw = _embeddings(model) | _output_layer(model) | _excluded(model, exclude)
    groups: dict[str, dict[str, Any]] = {}
    rows = []
    unknown = []
    for param, (name, module) in params.items():
        kind, why = _kind_of(param, name.rpartition(".")[2], module)
        if param in of_adamw and param.dim() >= 2:
            kind, why = _ADAMW, of_adamw[param]
        elif kind is _ADAMW:
            unknown.append(name)
        algorithm = kind.get("algorithm", "muon")
        group = {**(options if algorithm == "muon" else adamw), **kind}
        groups.setdefault(repr(kind), {"params": [], **group})["params"].append(param)
        rows.append(MuonRow(name, tuple(param.shape), algorithm, why))
    if unknown:
        warnings.warn(
            f"param_groups_for_muon: AdamW will step {', '.join(unknown)}, because Muon is made "
            "for the weights of linear layers and convolutions. Name them in exclude if this is "
            "right.",
            stacklevel=2,
        )
    return MuonGroups([*groups.values()], rows)


def _kind_of(param: Tensor, name: str, module: nn.Module) -> tuple[Mapping[str, Any], str]:
    """Returns the options of a parameter's group, and why, by the kind of its module.

    The options are _ADAMW if Muon may be wrong for the kind.
    """
    kind = type(module).__name__
    if param.dim() < 2:
        return _ADAMW_WITHOUT_DECAY, "fewer than two dimensions"
    if name == "weight" and isinstance(module, nn.Linear):
        return _MATRIX, kind
    if name == "weight" and isinstance(module, _ConvNd) and module.groups == 1:
        is_transposed = isinstance(module, _ConvTransposeNd)
        return (_TRANSPOSED_KERNEL if is_transposed else _KERNEL), kind
    # transformers' layer of this name stores [in, out].
    if name == "weight" and kind == "Conv1D" and param.dim() == 2:
        return _TRANSPOSED, kind
    return _ADAMW, f"unknown kind: {kind}"


def _embeddings(model: nn.Module) -> dict[Tensor, str]:
    return {
        module.weight: "embedding"
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }


def _output_layer(model: nn.Module) -> dict[Tensor, str]:
    sizes = {param.shape[0] for param in _embeddings(model)}
    found = {
        module.weight: "output layer"
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features in sizes
    }
    for module in model.modules():  # the model may be a part of another one
        method = getattr(module, "get_output_embeddings", None)
        weight = getattr(method(), "weight", None) if callable(method) else None
        if isinstance(weight, Tensor):
            found[weight] = "output layer"
    return found


def _excluded(model: nn.Module, patterns: Sequence[str]) -> dict[Tensor, str]:
    found: dict[Tensor, str] = {}
    for pattern in patterns:
        named: list[Tensor] = []
        for name, module in model.named_modules():
            if name and fnmatchcase(name, pattern):
                named += module.parameters()
        for name, param in model.named_parameters(remove_duplicate=False):
            if fnmatchcase(name, pattern):
                named.append(param)
        if not named:
            raise ValueError(
                f"param_groups_for_muon: exclude must have names of modules or parameters, got "
                f"{pattern!r}, which fits none of them"
            )
        found |= dict.fromkeys(named, f"excluded by {pattern!r}")
    return found
