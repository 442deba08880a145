"""The state dicts of an optimizer: written, loaded, and in float32 for other programs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._compile import _disable_dynamo

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.checkpoints import (
    check_states_have_groups,
    in_one_dtype,
    operation_of,
    read_state_dict,
)
from amp_ext.optim.described_optimizer import DescribedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import defaults_of, with_plain_options
from amp_ext.optim.state_store import PlacedParam, float32_state
from amp_ext.optim.step_plan import StepPlan
from amp_ext.saved_dicts import check_is_dict
from amp_ext.sharding import is_flat, is_flattened

__all__ = ["SavedOptimizer", "float32_state_dict"]


class SavedOptimizer(DescribedOptimizer):
    """An optimizer whose state dict, pickle and copy say all that the next one goes on from."""

    _plan: StepPlan
    track_grad_norms: bool
    norm_guard: NormGuard | None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle or a copy has, which refuses to step if this one does."""
        self._plan.compiled.check_not_swapped_in("__getstate__")
        state: dict[str, Any] = super().__getstate__()
        if self._plan.compiled.failure:
            state["_progress"] = self._plan.compiled.failure
        if self.track_grad_norms:
            state["track_grad_norms"] = True
        if self.norm_guard is not None:
            state["norm_guard"] = self.norm_guard
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an optimizer from a pickle, a copy or a checkpoint; fills in what it lacks."""
        defaults = state.get("defaults", vars(self).get("defaults", {}))
        otherwise = defaults_of(type(self))
        for name in ops.configured_options():  # which an earlier release may not have had
            if name in otherwise:
                defaults.setdefault(name, otherwise[name])
        for group in state["param_groups"]:
            for name, value in defaults.items():
                group.setdefault(name, value)
        state = dict(state)
        failure = state.pop("_progress", None) or ""
        tracks = state.pop("track_grad_norms", False)
        guard = state.pop("norm_guard", None)
        plan = vars(self).get("_plan")
        if plan is None:
            plan = state["_plan"] = StepPlan(type(self).__name__, self.description, failure)
        else:
            plan.begin_anew()
        # torch takes all of it in one assignment, which no interrupt divides.
        super().__setstate__(state)
        if plan.compiled.failure != failure:
            plan.begin_anew(failure)
        if tracks:
            self.track_grad_norms = True
        if guard is not None:  # of a shallow copy it is that of another optimizer
            self.norm_guard = guard if guard.is_free_for(self) else copy.deepcopy(guard)

    def written_by_load(self) -> list[dict[str, Any]]:
        """Returns the dicts that :meth:`load_state_dict` writes, for who may put them back."""
        return [vars(self), vars(self._plan)]

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the states and the groups in torch's layout, as of torch.optim.Optimizer.

        Groups have numbers of Python, also where a schedule wrote numbers of numpy into them, which
        ``weights_only=True`` refuses.

        Parameters that FullyShardedDataParallel flattens with ``use_orig_params=True`` have all
        16-bit states as float32 in it, since FSDP saves the tensors of a state in one dtype. A load
        restores their bits.

        Raises:
            TypeError, ValueError: If the params of a group can't be read again, or there is a state
                of a parameter that is in no group.
        """
        self._plan.compiled.check_not_swapped_in("state_dict")
        self._check_params("state_dict")
        try:
            state_dict = super().state_dict()
        except KeyError:
            check_states_have_groups(self)
            raise
        for group in state_dict["param_groups"]:
            group.update(with_plain_options(self.description, group))
        for key, param in enumerate(params_of(self)):
            if is_flattened(param) and not is_flat(param) and key in state_dict["state"]:
                state_dict["state"][key] = in_one_dtype(state_dict["state"][key])
        return state_dict

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of its namesake in torch.optim.

        Tensors are copied, to the parameter's device and layout. Buffers get the configured
        dtype, whatever the file's; options that torch does not have stay as configured.
        Masters that the file lacks are taken from the parameters: load the model first.
        Files of the FusedAdam of apex and of TransformerEngine, which count their steps once for a
        group, are taken as well. Options that torch has and the file lacks are what torch takes
        them for; those of another optimizer are refused by its name.

        Args:
            state_dict: From ``state_dict()``.

        Raises:
            KeyError: If the dict is not one of an optimizer.
            TypeError: If it is no dict, or an option is of a wrong type.
            ValueError: If it does not fit the groups, another class wrote it, or a part is missing.
                Nothing has been changed then. After an interrupt the optimizer has either all of
                the file or nothing.
        """
        self._plan.compiled.check_not_swapped_in("load_state_dict")
        check_is_dict(operation_of(self), state_dict)
        # As in torch, whose code would cast every state to its parameter's dtype.
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        state = read_state_dict(self, state_dict)
        self.__setstate__(state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _float32_state_dict(self) -> dict[str, Any]:
        """Returns what :func:`float32_state_dict` does."""
        self._check_params("state_dict")
        self._check_groups()
        state_dict: dict[str, Any] = self.state_dict()
        states = dict(state_dict["state"])
        groups = []
        for index, (saved, group) in enumerate(
            zip(state_dict["param_groups"], self.param_groups, strict=True)
        ):
            has_masters = bool(saved["master_weights"])
            groups.append({**saved, "state_dtype": "float32", "master_weights": has_masters})
            spec = self.state_spec_of(group)
            for param_index, (param, key) in enumerate(
                zip(group["params"], saved["params"], strict=True)
            ):
                if key in states:
                    states[key] = float32_state(
                        PlacedParam(spec, param, index, param_index), states[key]
                    )
        return {**state_dict, "state": states, "param_groups": groups}


@outside_inference_mode()
def float32_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state dict of an optimizer with all its masters and moments as float32 numbers.

    It loads into torch's optimizer of the same name and into ours with any options, where what is
    narrow again is rounded to nearest. float64 states stay as they are. ``state_dict()`` has the
    small states themselves, and is what to resume from. The weights in float32 are in
    ``optimizer.master_params()``.

    Args:
        optimizer: One of :mod:`amp_ext.optim`.

    Returns:
        ``state`` and ``param_groups``, whose ``state_dtype`` is "float32" and whose
        ``master_weights`` are True where there are masters. All tensors are copies, since torch's
        ``load_state_dict`` makes none; DTensors stay DTensors.

    Raises:
        TypeError: If it is another optimizer.

    Example:
        >>> reference = torch.optim.AdamW(model.parameters())
        >>> reference.load_state_dict(amp_ext.optim.float32_state_dict(optimizer))
    """
    if not isinstance(optimizer, SavedOptimizer):
        raise TypeError(
            "float32_state_dict: optimizer must be one of amp_ext.optim, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer._float32_state_dict()
