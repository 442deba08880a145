"""Muon for matrices and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from amp_ext.optim.adam import AdamW
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import DESCRIPTIONS, OptimizerDescription, defaults_of, options_of
from amp_ext.sharding import is_dtensor

__all__ = ["Muon"]

Triple = tuple[float, float, float]


class Muon(FusedOptimizer):
    """Muon, a replacement for ``torch.optim.Muon`` that steps other parameters with AdamW.

    Muon updates a matrix by its momentum, whose singular values an iteration of matrix products
    has moved close to 1. A group with ``algorithm="adamw"`` has the options, states and bits of
    :class:`~amp_ext.optim.AdamW`; use it for embeddings, the output layer, norms and biases, as
    :func:`~amp_ext.optim.param_groups_for_muon` does. Clipping by the norm, a guard and a gradient
    scaler act on all groups together.

    Args:
        params: Parameters or groups of them; float32, float16 or bfloat16, of two dimensions unless
            ``flatten`` is set.
        lr: Learning rate; a tensor must have one element, and is read on its device at each step. A
            group with ``algorithm="adamw"`` must have its own.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate.
        momentum: Decay rate of the momentum buffer, per step.
        nesterov: Uses Nesterov momentum.
        ns_coefficients: The numbers a, b, c of the iteration ``X = aX + (bG + cGG)X`` with ``G``
            the product of ``X`` and its transpose. A list of triples has one for each step, and the
            last is repeated. "polar_express" stands for the triples of that method.
        eps: Smallest norm by which an update is divided before the iteration.
        ns_steps: Number of steps of the iteration.
        adjust_lr_fn: Factor of the learning rate of a matrix ``[out, in]``: "original" or None for
            ``sqrt(max(1, out / in))``, "match_rms_adamw" for ``0.2 * sqrt(max(out, in))``,
            "spectral_unclamped" for ``sqrt(out / in)``. Weight decay uses the rate without it.
        algorithm: "muon", or "adamw" for a group that AdamW steps.
        transposed: Whether weights are stored as ``[in, out]``, for ``adjust_lr_fn``.
        flatten: For parameters of more than two dimensions, such as kernels of convolutions: True
            for one matrix ``[size(0), rest]``, False for a batch of matrices in the last two
            dimensions. With None they are refused.
        scratch_bytes: Memory for the matrices of the iteration, in bytes. Matrices of one shape are
            taken together, as many as fit, and at least one.
        cautious_weight_decay: Shrinks only elements that the update does not move away from 0.
        master_weights: Keeps a float32 master of every 16-bit parameter; "split" stores it in fewer
            bytes.
        state_dtype: Dtype of the momentum and of AdamW's moments; None means the parameter's, but
            not for float16 matrices. "8bit" and "8bit-bf16" quantize moments to 8 bits.
        rounding: Rounding to 16 or 8 bits: "nearest" or "dither"; None lets ``state_dtype`` decide.
        max_grad_norm: Clips the norm of all unscaled gradients to this value; None does not clip.
        clip_value: Clips each unscaled gradient element to this magnitude, after clipping by norm.
        skip_nonfinite: Counts gradient elements that are inf or NaN as 0 in Muon's momentum; AdamW
            does not update these elements.
        track_grad_norms: Stores the norm of each gradient in ``grad_norms`` at every step.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips or clips outliers of the norm.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` describes the options of all optimizers
    in more detail.

    Raises:
        ValueError: If an option is out of range, a parameter is listed twice, a parameter is not a
            matrix, or a group of AdamW has no learning rate.
        TypeError: If an option is of a wrong type.

    Example:
        >>> groups = param_groups_for_muon(model, lr=0.02, adamw={"lr": 3e-4})
        >>> optimizer = Muon(groups)

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Liu et al.,
        "Muon is Scalable for LLM Training", arXiv 2502.16982. Amsel, Persson, Musco and Gower,
        "The Polar Express", arXiv 2505.16932. Chen et al., "Cautious Weight Decay", arXiv
        2510.12402.
    """

    _hyperparameters_class = "MuonHyperparameters"
    _state_formats: ClassVar = {"muon": ("q8m",)}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | Sequence[Triple] | Literal["polar_express"] = (
            3.4445,
            -4.775,
            2.0315,
        ),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        transposed: bool = False,
        flatten: bool | None = None,
        scratch_bytes: int = 256 * 2**20,
        cautious_weight_decay: bool = False,
        master_weights: bool | Literal["split"] = True,
        state_dtype: torch.dtype | Literal["8bit-bf16", "8bit"] | None = torch.float32,
        rounding: Literal["dither", "nearest"] | None = None,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        track_grad_norms: bool = False,
        norm_guard: NormGuard | None = None,
    ) -> None:
        """Checks the options, which the docstring of the class describes."""
        super().__init__(params, options_of(locals()), track_grad_norms, norm_guard)

    def description_of(self, group: Mapping[str, Any]) -> OptimizerDescription:
        """Returns the options and buffers of the algorithm of a group."""
        is_adamw = group.get("algorithm") == "adamw"
        return DESCRIPTIONS["AdamHyperparameters"] if is_adamw else self.description

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.Optimizer does.

        Args:
            param_group: ``params`` and the options that differ from the defaults. A group with
                ``algorithm="adamw"`` has the defaults of AdamW, but shares those of masters,
                states, clipping and cautious decay with the other groups.

        Raises:
            TypeError: If an option has the wrong type.
            ValueError: If a parameter is listed twice, an option can't be used, a parameter is not
                a matrix, or a group of AdamW has no learning rate.
        """
        if param_group.get("algorithm") != "adamw":
            super().add_param_group(param_group)
            return
        if "lr" not in param_group:
            raise ValueError(
                f"{type(self).__name__}: lr of group {len(self.param_groups)} must be present, "
                'because it has algorithm="adamw", which the learning rate of Muon does not suit'
            )
        of_adamw = defaults_of(AdamW) | AdamW._fixed_options
        only_muon = self.defaults.keys() - of_adamw.keys() - param_group.keys()
        kept = ("kept", "kept if missing")
        shared = [each.name for each in self.description.options if each.on_load in kept]
        for name, value in of_adamw.items():
            param_group.setdefault(name, self.defaults[name] if name in shared else value)
        super().add_param_group(param_group)
        for name in only_muon:
            del param_group[name]

    def check_options(self, options: dict[str, Any], where: str) -> None:
        """Adds missing options to a group, and checks all of its options and its parameters."""
        options.setdefault("algorithm", "muon")
        super().check_options(options, where)
        place = where.partition(": %s of ")[2]
        name, is_muon = type(self).__name__, options["algorithm"] == "muon"
        if is_muon and options["master_weights"] == "split8":
            raise ValueError(
                f"{where % 'master_weights'} must be True, 'split' or False for Muon, got 'split8'"
            )
        for index, param in enumerate(options["params"] or ()):
            param_of = f"{name}: param {index} of {place}"
            if is_dtensor(param):
                raise ValueError(
                    f"{param_of} must not be sharded, because a rank would have only a part of "
                    "each matrix, got a DTensor. Use DDP, or AdamW"
                )
            if not is_muon or is_lazy(param):
                continue
            if param.dtype == torch.float16 and options["state_dtype"] is None:
                raise ValueError(
                    f"{where % 'state_dtype'} must be torch.float32, torch.bfloat16, '8bit-bf16' "
                    "or '8bit' for parameters in torch.float16, got None"
                )
            if param.dim() < 2 or param.dtype == torch.float64:
                raise ValueError(
                    f"{param_of} must be a matrix in float32, float16 or bfloat16, got "
                    f"{param.dtype} of shape {tuple(param.shape)}. Put it into a group with "
                    'algorithm="adamw", as amp_ext.optim.param_groups_for_muon does'
                )
            if param.dim() > 2 and options["flatten"] is None:
                raise ValueError(
                    f"{param_of} must have two dimensions, got shape {tuple(param.shape)}. Set "
                    "flatten=True for one matrix [size(0), rest], or flatten=False for a batch of "
                    "matrices in the last two dimensions"
                )

    @property
    def skipped_matrices(self) -> Tensor | None:
        """How many matrices steps have left as they were, because the iteration was not finite.

        One int64 on the device of the first parameter, which later steps increase; None before the
        first step.
        """
        skipped: Tensor | None = self._stepper.compiled.skipped_matrices
        return skipped
