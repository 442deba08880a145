"""An average of an optimizer's weights, updated on the device after each step."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.checkpoints import without_wrappers
from amp_ext.optim.formats import RESIDUAL_KEYS
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.state_store import masters_in
from amp_ext.params import params_of
from amp_ext.plain_numbers import is_count, is_number, plain
from amp_ext.saved_dicts import check_is_dict, check_keys
from amp_ext.sharding import (
    any_dtensors,
    global_offset,
    is_dtensor,
    is_flattened,
    laid_out_as,
    local_tensor,
)

_DTYPE_OF = operator.attrgetter("dtype")
_NO_RESIDUAL = torch.empty(0)
Lists = dict[torch.device, tuple[list[Tensor], list[Tensor]]]  # parameters and their averages


class WeightAverage:
    """Averages the float32 masters of an optimizer's parameters, in one launch after each step.

    If a parameter has a float32 master, the master is averaged; a split master is joined first.
    Other parameters are averaged themselves, float64 ones in float32. Parameters without a gradient
    are averaged, too. Steps count unless they were skipped by an overflow or had no gradients at
    all. This count stays on the device and the host does not wait, so that steps can be
    captured in CUDA graphs.

    A hook updates the average after each step of the optimizer. Keep a reference to the average:
    the optimizer does not hold one, and without a reference the average is deleted. The first
    average is a copy of the weights; until then ``averages`` are the weights at construction. The
    average of a parameter that is added later starts with the weight after the next step, even if
    this step is skipped. Averages in bfloat16 are dithered, so that changes of less than half a
    unit in the last place are not lost.

    ::

        average = amp_ext.optim.WeightAverage(optimizer, decay=0.999)
        for x, y in data:
            train_step(x, y)  # ends in optimizer.step(), or in scaler.step and update
        with average.swap():
            validate(model)

    The arguments are attributes. ``decay``, ``every`` and ``warmup`` may be set between steps.

    Reference:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; with
        ``decay="equal"`` Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
        Generalization", 2018. The decay warms up as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        decay: float | str = 0.999,
        every: int = 1,
        dtype: torch.dtype = torch.float32,
        model: nn.Module | None = None,
        *,
        warmup: bool = False,
    ) -> None:
        """Starts averages with the present weights.

        Args:
            optimizer: An optimizer of ``amp_ext.optim``. It may have several averages.
            decay: Factor of the old average in the new average, from 0 to 1. With "equal", the
                average is the plain mean: the n-th weights enter it with the factor 1 / n.
            every: Takes an average once in this many steps, not counting skipped ones.
            dtype: Dtype of the averages: torch.float32, or torch.bfloat16 for 2 bytes per
                parameter.
            model: The model with the parameters, or None. It provides their names, and the buffers
                and frozen parameters, for :meth:`copy_to` and files of torch's ``AveragedModel``.
                :meth:`swap` needs it to reach parameters that ``fully_shard`` has gathered.
            warmup: Limits the decay of the n-th average to n / (9 + n), so that it grows.

        Raises:
            TypeError: If the optimizer is not one of ``amp_ext.optim``.
            ValueError: If another argument can't be used, or the model lacks a parameter.
            RuntimeError: If a parameter is lazy, or on a device or of a dtype that no kernel
                supports.
        """
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                "WeightAverage: optimizer must be one of amp_ext.optim, such as AdamW, got "
                f"{type(optimizer)}. If this is a wrapper, pass the optimizer inside."
            )
        decay, every = plain(decay), plain(every)
        is_decay = decay == "equal" or (is_number(decay) and 0 <= decay <= 1)  # type: ignore[operator]
        for name, value, fits, wanted in (
            ("decay", decay, is_decay, 'a number from 0 to 1 or "equal"'),
            ("every", every, is_count(every), "an int of at least 1"),
            ("dtype", dtype, dtype in (torch.float32, torch.bfloat16), "torch.float32 or bfloat16"),
            ("model", model, isinstance(model, nn.Module | None), "a torch.nn.Module or None"),
            ("warmup", warmup, not (warmup and decay == "equal"), 'False where decay is "equal"'),
        ):
            if not fits:
                raise ValueError(f"WeightAverage: {name} must be {wanted}, got {value!r}")
        optimizer.check_weights_are_in("WeightAverage")
        self.optimizer, self.decay, self.every = optimizer, decay, every
        self.dtype, self.model, self.warmup = dtype, model, warmup
        self._averages: dict[Tensor, Tensor] = {}  # this rank's shards, by parameter
        with outside_inference_mode():
            # The numbers of applied steps and of averages.
            self._counts = torch.zeros(2, dtype=torch.float64, device=optimizer._first_device())
        self._begin()
        self._joined: set[Tensor] = set()  # parameters whose averages start again after a step
        if model is not None:
            self._by_name("WeightAverage")
        optimizer.track_step_applied()
        self._hook = optimizer.register_step_post_hook(_hook_of(weakref.ref(self)))
        optimizer._stepper.weight_averages.add(self)

    def remove(self) -> None:
        """Stops the updates of the average."""
        self._hook.remove()
        self.optimizer._stepper.weight_averages.discard(self)

    # Updates.

    @outside_inference_mode()
    def _begin(self, restarted: Collection[Tensor] = ()) -> None:
        """Starts the averages of new and of restarted parameters, and drops those that left."""
        averages, begun = {}, {}
        if self.optimizer.offload is not None:
            self.optimizer.offload.synchronize()
        for param in params_of(self.optimizer):
            average, part = self._averages.get(param), self._local(param)
            if average is None or param in restarted:
                if average is None or average.shape != part.shape or average.device != part.device:
                    average = torch.empty_like(part, dtype=self.dtype, requires_grad=False)
                begun[param] = average
            averages[param] = average
        one = torch.ones((), dtype=torch.float64)
        self._move(_by_device(begun), one, one, begins=True)
        self._averages, self._joined = averages, set(begun)
        self._lists = _by_device(averages)

    def _local(self, param: Tensor) -> Tensor:
        """Returns this rank's shard of a parameter, or of its host copy if states are offloaded."""
        return local_tensor(self.optimizer._stored_beside(param))

    def move_to_states(self) -> None:
        """Moves the averages to the device of the states, after these were moved."""
        self._averages = {
            param: average.to(self._local(param).device)
            for param, average in self._averages.items()
        }
        self._lists = _by_device(self._averages)

    def _begin_if_changed(self) -> None:
        params = params_of(self.optimizer)
        known = self._averages
        if len(params) != len(known) or not all(map(operator.is_, params, known)):
            self._begin(self._joined)

    def _update(self) -> None:
        """Moves the averages towards the weights after a step, unless it was skipped."""
        self._begin_if_changed()
        if self._joined:
            self._begin(self._joined)
            self._joined = set()
        applied = self.optimizer.step_applied  # 1 or 0, on the device
        if applied is None:  # there are no parameters
            return
        self._counts = self._counts.to(applied.device)
        if self.every == 1:
            self._counts += applied
        else:
            self._counts[0] += applied
            applied = applied * (self._counts[0] % self.every == 0)
            self._counts[1] += applied
        number = self._counts[1]
        decay: Any = self.decay
        if decay == "equal":
            weight = applied.double() / number.clamp(min=1)
        elif self.warmup:
            weight = applied.double() * (1 - (number / (9 + number)).clamp(max=decay))
        else:
            weight = applied.double() * max(1 - decay, 1e-300)  # 0 would be a skipped step
        self._move(self._lists, weight, number)

    def _move(self, lists: Lists, weight: Tensor, number: Tensor, begins: bool = False) -> None:
        """Moves averages towards the weights of their parameters."""
        states, is_released = self.optimizer.state, self.optimizer.gradient_release is not None
        for device, (params, averages) in lists.items():
            are_sharded = any_dtensors(params)
            weights, offsets = params.copy(), None
            if are_sharded or self.optimizer.offload is not None:
                weights = [self._local(param) for param in params]
            if are_sharded:
                offsets = [global_offset(param) if is_dtensor(param) else 0 for param in params]
            residuals: list[Tensor] | None = None
            entries: Any = ()  # where no parameter can have a master
            if not RESIDUAL_KEYS.keys().isdisjoint(map(_DTYPE_OF, params)):
                # States usually have the order of the parameters; a lookup of each costs more.
                entries = itertools.chain(states.items(), itertools.repeat((None, None)))
            for index, (param, (owner, state)) in enumerate(zip(params, entries, strict=False)):
                if owner is not param:
                    state = states.get(param)
                if not state or param.dtype not in RESIDUAL_KEYS:
                    continue
                master, part = state.get("master_param"), weights[index]
                if master is None:
                    low, low8 = RESIDUAL_KEYS[param.dtype]
                    residual = state.get(low, state.get(low8))
                    if residual is not None:
                        residuals = residuals or [_NO_RESIDUAL] * len(params)
                        residuals[index] = local_tensor(residual) if are_sharded else residual
                    continue
                weights[index] = master = local_tensor(master) if are_sharded else master
                # A step with a gradient leaves an up-to-date master. Otherwise the parameter may
                # have been written since, and then replaces it, as it would in its next step.
                if begins or (param.grad is None and not is_released):
                    is_current = master.to(part.dtype) == part
                    weights[index] = torch.where(is_current, master, part.detach())
            ops.average_params_(
                averages,
                weights,
                weight.to(device),
                number.to(device),
                residuals=residuals,
                global_offsets=offsets,
            )

    @property
    def averages(self) -> list[Tensor]:
        """The averages in the order of the optimizer's parameters. Later steps overwrite them."""
        self._begin_if_changed()
        return [laid_out_as(param, average) for param, average in self._averages.items()]

    @property
    def n_averaged(self) -> Tensor:
        """Number of averages taken so far, one int64 on the device."""
        return self._counts[1].long()

    def restart(self) -> None:
        """Restarts the averages with the present weights; the next average is a copy again.

        Call this also after parameters have changed their shape or device. Until you do, each step
        updates the parameters, but then the hook of the average raises an error.

        Raises:
            RuntimeError: If averages of this optimizer are in its parameters.
        """
        self.optimizer.check_weights_are_in("WeightAverage.restart")
        self._begin({*params_of(self.optimizer)})
        self._joined = set()
        self._counts.zero_()

    # Uses.

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Puts the averages into the parameters for a ``with`` block; restores them at its end.

        After the block, also after an exception, parameters and masters have their old bits, and
        the next step does not mistake the swap for a change of the parameters. Inside the block, a
        split master has the value of its parameter. The block needs memory for a copy of the
        parameters. For autograd the parameters were written in place: graphs made before or inside
        the block can't be differentiated after it. (``fully_shard`` does not detect this and
        computes wrong gradients.) If the average has a ``model``, ``fully_shard`` gathers its
        parameters again.

        Raises:
            RuntimeError: If averages of this optimizer are already in its parameters, or if
                FullyShardedDataParallel flattens the parameters, because its modules compute with
                copies. Inside the block, steps and scans of the optimizer, ``state_dict`` of the
                optimizer and the average, ``refresh_masters`` and ``restart`` raise this error,
                too. At the end of the block, if a parameter has got another shape; all other
                parameters are restored then.
        """
        optimizer, averages = self.optimizer, self.averages
        optimizer.check_weights_are_in("WeightAverage.swap")
        params = [*self._averages]
        if any(map(is_flattened, params)):
            raise RuntimeError(
                "WeightAverage.swap: FullyShardedDataParallel has flattened the parameters. Use "
                "fully_shard instead."
            )
        parts = [local_tensor(param) for param in params]
        masters = [masters_in(optimizer.state.get(param, {})) for param in params]
        low = [each for found in masters for key, each in found.items() if key != "master_param"]
        residuals = [local_tensor(residual) for residual in low]
        with outside_inference_mode():
            saved = [(each, each.clone()) for each in (*parts, *residuals)]
        optimizer._stepper.averages_are_in = True
        try:
            with torch.no_grad():
                for part, average in zip(parts, averages, strict=True):
                    part.copy_(local_tensor(average))
                for residual in residuals:
                    residual.zero_()  # the master equals the parameter
            _forget_copies(self.model)
            yield
        finally:
            changed = [each.shape != before.shape for each, before in saved]
            with torch.no_grad():
                for (each, before), is_changed in zip(saved, changed, strict=True):
                    if not is_changed:
                        each.copy_(before)
            optimizer._stepper.averages_are_in = False
            _forget_copies(self.model)
            if any(changed):
                raise RuntimeError(
                    f"WeightAverage.swap: param {changed.index(True)} got another shape, so it was "
                    "not restored. Convert the model outside the swap."
                )

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copies the averages, and all buffers and frozen parameters, into another model.

        Other parameters of ``self.model``, such as those of another optimizer, are not copied, so
        that the averages of several optimizers can be copied one after the other.

        Statistics that layers such as BatchNorm have collected are those of the training weights;
        ``torch.optim.swa_utils.update_bn(loader, model)`` recomputes them.

        Args:
            model: The model to write, with the same parameters and buffers as ``self.model``, in
                any dtypes. Names are compared without the prefixes of ``torch.compile`` and of
                wrappers such as DDP. If the parameters of ``self.model`` are sharded but those of
                ``model`` are not, all ranks must call this together.

        Raises:
            ValueError: If ``model`` lacks a name or has another shape under it, ``self.model``
                lacks a parameter of the optimizer, or only the parameters of ``model`` are sharded.
                Nothing has been written then.
            RuntimeError: If the average was constructed without ``model``.
        """
        averages, copies = self._by_name("WeightAverage.copy_to"), []
        theirs = _bare(_tensors_of(model))
        for name, each in _bare(_tensors_of(self.model)).items():
            if name in averages or not each.requires_grad:
                source: Any = averages.get(name, each)
                target: Any = theirs.get(name)
                is_whole = is_dtensor(source) and not is_dtensor(target)
                _check_layout(f"WeightAverage.copy_to: {name} of model", source, target, is_whole)
                copies.append((target, source, is_whole))
        for target, source, is_whole in copies:
            target.copy_(source.full_tensor() if is_whole else source)

    def averaged_state_dict(self) -> dict[str, Any]:
        """Returns a state dict for ``torch.optim.swa_utils.AveragedModel(model)``.

        Contains "n_averaged"; the averages under "module.<name>"; and all other entries of the
        model unchanged: buffers, extra states of any type, frozen parameters and parameters of
        other optimizers. The tensors are not copied.

        Under ``fully_shard`` all ranks must call this method together, because modules gather their
        parameters again afterwards. The same holds for ``model.state_dict()`` and for
        :meth:`load_state_dict` with such a file.

        Raises:
            RuntimeError: If the average was constructed without ``model``, or is swapped in.
            KeyError: If ``state_dict()`` of the model lacks a parameter of the optimizer.
            ValueError: If the model lacks a parameter of the optimizer.
        """
        operation = "WeightAverage.averaged_state_dict"
        self.optimizer.check_weights_are_in(operation)
        averages, model = self._by_name(operation), self.model
        assert model is not None
        state = model.state_dict()
        names = dict(zip(_bare(state), state, strict=True))
        check_keys(f"{operation}: state_dict() of model", averages, names)
        named = {names[name]: average for name, average in averages.items()}
        entries = {"module." + name: named.get(name, each) for name, each in state.items()}
        return {"n_averaged": self.n_averaged, **entries}

    def _by_name(self, operation: str) -> dict[str, Tensor]:
        """Returns the averages by the names that the parameters have in the model."""
        if self.model is None:
            raise RuntimeError(
                f"{operation}: this average has no model, so its parameters have no names. "
                "Construct it as WeightAverage(optimizer, model=model)."
            )
        _forget_copies(self.model)
        tensors, found = _bare(_tensors_of(self.model)), self.averages
        averages = dict(zip(map(id, self._averages), found, strict=True))
        if averages.keys() - map(id, tensors.values()):
            raise ValueError(f"{operation}: model must have all parameters of the optimizer")
        return {name: averages[id(p)] for name, p in tensors.items() if id(p) in averages}

    # Files.

    def state_dict(self) -> dict[str, Any]:
        """Returns averages and counts, without the arguments. The tensors are not copied.

        The entries are "averages" in the order of the optimizer's parameters, "steps" (not counting
        skipped ones) and "n_averaged". If parameters were added since the last step, "joined" is
        the list of their indices.

        Raises:
            RuntimeError: If the averages are swapped in.
        """
        self.optimizer.check_weights_are_in("WeightAverage.state_dict")
        steps, n_averaged = self._counts.long().unbind()
        state = {"averages": self.averages, "steps": steps, "n_averaged": n_averaged}
        joined = [index for index, param in enumerate(self._averages) if param in self._joined]
        return state | ({"joined": joined} if joined else {})

    @outside_inference_mode()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads averages and counts, which are copied. The arguments stay as constructed.

        Args:
            state_dict: A dict from ``state_dict()``; or, if ``model`` was given, one of torch's
                ``AveragedModel``, whose buffers and frozen parameters are ignored. Names are
                compared without the prefixes of ``torch.compile`` and of wrappers such as DDP.

        Raises:
            KeyError: If an entry is missing.
            TypeError: If ``state_dict`` is not a dict, or a count is not an integer.
            ValueError: If the averages do not fit the parameters, there are more averages than
                steps, or the model lacks a parameter. After any error nothing has changed.
            RuntimeError: If the averages are swapped in, or the file is one of ``AveragedModel``
                and the average has no ``model``.
        """
        operation = "WeightAverage.load_state_dict"
        check_is_dict(operation, state_dict)
        self.optimizer.check_weights_are_in(operation)
        ours, saved = self.averages, {str(name): each for name, each in state_dict.items()}
        if any(name.startswith("module.") for name in saved):  # a file of AveragedModel
            saved, wanted = _bare(saved), self._by_name(operation)
            names = {id(each): name for name, each in _bare(_tensors_of(self.model)).items()}
            check_keys(f"{operation}: state_dict", [*wanted, "n_averaged"], saved)
            saved["averages"] = [saved[names[id(param)]] for param in self._averages]
            saved["steps"] = operator.index(saved["n_averaged"]) * self.every
        check_keys(f"{operation}: state_dict", ("averages", "steps", "n_averaged"), saved)
        steps, n_averaged = operator.index(saved["steps"]), operator.index(saved["n_averaged"])
        joined = {[*self._averages][index] for index in saved.get("joined", ())}
        if not 0 <= n_averaged <= steps or len(saved["averages"]) != len(ours):
            raise ValueError(
                f"{operation}: state_dict must have averages of {len(ours)} parameters after at "
                f"most as many averages as steps, got {len(saved['averages'])} after {n_averaged} "
                f"averages in {steps} steps"
            )
        for index, (average, loaded) in enumerate(zip(ours, saved["averages"], strict=True)):
            _check_layout(f"{operation}: averages[{index}]", average, loaded)
        for average, loaded in zip(ours, saved["averages"], strict=True):
            local_tensor(average).copy_(local_tensor(loaded))
        self._counts.copy_(torch.tensor([steps, n_averaged]))
        self._joined = joined

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents for a pickle or a copy, which include the optimizer."""
        names = ("optimizer", "decay", "every", "dtype", "model", "warmup")
        return {
            "arguments": {name: getattr(self, name) for name in names},
            "state": self.state_dict(),
            "is_removed": self not in self.optimizer._stepper.weight_averages,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an average and registers it with its optimizer."""
        # The model is checked at its first use, because a model that holds this average may be only
        # partly unpickled here.
        self.__init__(**{**state["arguments"], "model": None})  # type: ignore[misc]
        self.model = state["arguments"]["model"]
        self.load_state_dict(state["state"])
        if state["is_removed"]:
            self.remove()


def _hook_of(reference: weakref.ref[WeightAverage]) -> Callable[..., None]:
    """Returns a hook for an optimizer's steps that does not keep the average alive.

    The hook does nothing once the average is deleted. It stays registered then, because the garbage
    collector may delete an average while hooks run, and their dict must not change meanwhile.
    """
    captured: list[WeightAverage] = []

    def after_step(*_: Any) -> None:
        average = reference()
        if average is None:
            return
        average._update()
        if average._counts.is_cuda and torch.cuda.is_current_stream_capturing():
            captured[:] = [average]  # keeps it alive, because replays of the graph will write it

    return after_step


def _by_device(averages: dict[Tensor, Tensor]) -> Lists:
    lists: Lists = {}
    for param, average in averages.items():
        params, here = lists.setdefault(average.device, ([], []))
        params.append(param)
        here.append(average)
    return lists


def _tensors_of(model: Any) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a model, shared ones under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _bare(named: dict[str, Any]) -> dict[str, Any]:
    """Drops the prefixes of wrappers from names, unless two names would be the same."""
    bare = dict(zip(without_wrappers([*named]), named.values(), strict=True))
    return bare if len(bare) == len(named) else named


def _forget_copies(model: nn.Module | None) -> None:
    """Makes autocast cast the parameters again, and ``fully_shard`` gather them again."""
    torch.clear_autocast_cache()
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in () if model is None else model.modules():
        if isinstance(module, sharded):
            module.reshard()


def _check_layout(name: str, wanted: Any, got: Any, is_whole: bool = False) -> None:
    """Checks that a tensor has the shape and the placements of another one."""
    placements = None if is_whole else getattr(wanted, "placements", None)
    is_float = isinstance(got, Tensor) and got.is_floating_point() == wanted.is_floating_point()
    found = (got.shape, getattr(got, "placements", None)) if is_float else None
    if found != (wanted.shape, placements):
        raise ValueError(f"{name} must be a tensor of {wanted.shape}, {placements}, got {found}")
