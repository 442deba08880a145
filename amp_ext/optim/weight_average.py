"""An average of an optimizer's weights, updated on the device after each step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.plain_numbers import plain
from amp_ext.saved_dicts import check_is_dict
from amp_ext.sharding import is_dtensor, is_flattened, laid_out_as, local_tensor

__all__ = ["WeightAverage", "has_average"]

_PREFIX = "module."  # before each parameter name in files of AveragedModel

_averages: weakref.WeakSet[WeightAverage] = weakref.WeakSet()  # all existing averages


def _argument(name: str, meaning: str) -> property:
    """Returns a read-only property for an argument of the constructor."""
    return property(lambda average: average._arguments[name], doc=meaning)


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

    The arguments are read-only properties.

    Reference:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; with
        ``decay="equal"`` Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
        Generalization", 2018.
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
            warmup: Limits the decay to (1 + n) / (10 + n) after n averages, so that it grows.

        Raises:
            TypeError: If the optimizer is not one of ``amp_ext.optim``, or an argument has a wrong
                type.
            ValueError: If an argument is out of range, or the model lacks a parameter.
            RuntimeError: If a parameter is lazy, or on a device or of a dtype that no kernel
                supports.
        """
        _check_optimizer(optimizer)
        decay, every = plain(decay), plain(every)
        if decay != "equal":
            _check("decay", decay, (float, int), 'a number or "equal"')
        _check("every", every, int, "an int")
        _check("dtype", dtype, torch.dtype, "torch.float32 or torch.bfloat16")
        _check("warmup", warmup, bool, "a bool")
        if model is not None:
            _check("model", model, nn.Module, "a torch.nn.Module or None")
        self._arguments: dict[str, Any] = {
            "optimizer": optimizer,
            "decay": decay,
            "every": every,
            "dtype": dtype,
            "model": model,
            "warmup": warmup,
        }
        _check_not_lazy(optimizer)
        number = None if decay == "equal" else float(decay)
        self._averages = ops.WeightAverages(number, every, warmup, dtype)
        self._params: list[Tensor] = []
        self._call_on_averages("take_average")
        if model is not None:
            self._check_model("WeightAverage", model)
        optimizer.track_step_applied()
        self._hook = optimizer.register_step_post_hook(_hook_of(weakref.ref(self)))
        self._is_removed = False
        _averages.add(self)

    optimizer = _argument("optimizer", "The optimizer whose weights are averaged.")
    decay = _argument("decay", 'The decay of the average, or "equal" for equal weights.')
    every = _argument("every", "The number of applied steps between two updates of the average.")
    dtype = _argument("dtype", "The dtype of the averages.")
    model = _argument("model", "The model that gives the parameters their names, or None.")
    warmup = _argument("warmup", "Whether the decay grows at the start.")

    def __repr__(self) -> str:
        """Returns the arguments, with the class names of the optimizer and the model."""
        arguments = {
            name: type(value).__name__ if name in ("optimizer", "model") and value else repr(value)
            for name, value in self._arguments.items()
        }
        return f"WeightAverage({', '.join(f'{each}={arguments[each]}' for each in arguments)})"

    def _reads(self, optimizer: FusedOptimizer) -> bool:
        return self.optimizer is optimizer and not self._is_removed

    def _register_params(self) -> None:
        """Registers the optimizer's present parameters, if they have changed."""
        if [*map(id, params_of(self.optimizer))] != [*map(id, self._params)]:
            _check_not_lazy(self.optimizer)
            self._call_on_averages("register_average")

    def _call_on_averages(self, operation: str) -> None:
        """Makes the optimizer run an operation on the averages of its present parameters."""
        self.optimizer._check_not_offloaded(f"WeightAverage: {operation}")
        before = self._averages.registrations
        method = getattr(self.optimizer._plan.compiled, operation)
        self.optimizer._call_plan(operation, method, self._averages)
        # Keeps the parameters alive, because the compiled averages store only their addresses.
        if self._averages.registrations != before:
            self._params = params_of(self.optimizer)

    def _check_model(self, operation: str, model: nn.Module) -> None:
        _reshard(model)
        known = set(map(id, model.parameters()))
        for index, param in enumerate(self._params):
            if id(param) not in known:
                raise ValueError(
                    f"{operation}: model must have all parameters of the optimizer, got one "
                    f"without param {index}, of shape {list(param.shape)}"
                )

    def remove(self) -> None:
        """Stops the updates of the average."""
        self._hook.remove()
        self._is_removed = True

    @property
    def averages(self) -> list[Tensor]:
        """The averages in the order of the optimizer's parameters. Later steps overwrite them."""
        self._register_params()
        pairs = zip(self._params, self._averages.averages, strict=True)
        return [laid_out_as(param, average) for param, average in pairs]

    @property
    def n_averaged(self) -> Tensor:
        """Number of averages taken, one int64 on the device. Later steps overwrite it."""
        return self._counters()[1]

    def _counters(self) -> Tensor:
        counters = self._averages.counters
        return torch.zeros(2, dtype=torch.int64) if counters is None else counters

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
                too. The error is also raised at the end of the block if a parameter has got another
                dtype, shape or device; all other parameters are restored then.
        """
        self._averages.check_not_swapped("WeightAverage.swap")
        for index, param in enumerate(params_of(self.optimizer)):
            if is_flattened(param):
                raise RuntimeError(
                    f"WeightAverage.swap: param {index} was flattened by "
                    "FullyShardedDataParallel. Use fully_shard instead."
                )
        try:
            self._call_on_averages("swap_average")
            _reshard(self.model)
            yield
        finally:
            try:
                self.optimizer._plan.compiled.swap_back(self._averages)
            finally:
                _reshard(self.model)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copies the averages, and all other parameters and buffers, into another model.

        Parameters that belong to another average are not copied, so that the averages of several
        optimizers of one model can be copied one after the other.

        Statistics that layers such as BatchNorm have collected are those of the training weights;
        ``torch.optim.swa_utils.update_bn(loader, model)`` recomputes them.

        Args:
            model: The model to write, with the same parameters and buffers as ``self.model``, in
                any dtypes. Names are compared without the prefixes of ``torch.compile`` and of
                wrappers such as DDP. If the parameters of ``self.model`` are sharded but those of
                ``model`` are not, all ranks must call this together.

        Raises:
            TypeError: If ``model`` is not a module.
            ValueError: If the names or shapes differ, ``self.model`` lacks a parameter of the
                optimizer, the ``state_dict()`` of a model has a copy of a parameter with another
                name or shape than the parameter, or only the parameters of ``model`` are sharded.
                Nothing has been written then.
            RuntimeError: If the average was constructed without ``model``.
        """
        operation = "WeightAverage.copy_to"
        if not isinstance(model, nn.Module):
            raise TypeError(f"{operation}: model must be a torch.nn.Module, got {_class_of(model)}")
        contents, contents_there = self._named(operation), _contents_of(model)
        ours, copies = contents.tensors, contents.copies
        entries = self._averaged(ours)
        target, copies_there = contents_there.tensors, contents_there.copies
        names = dict(zip(_matching_names([*entries], [*target]), entries, strict=True))
        target = {names.get(name, name): each for name, each in target.items()}
        copies_there = {names.get(name, name) for name in copies_there}
        for name in [*entries, *target]:
            wanted, got = _shape_under(name, entries), _shape_under(name, target)
            if wanted != got:
                raise ValueError(f"{operation}: {name} of model must be {wanted}, got {got}")
            if is_dtensor(target[name]) and not is_dtensor(entries[name]):
                raise ValueError(
                    f"{operation}: {name} of model must be {_layout(entries[name])}, got "
                    f"{_layout(target[name])}"
                )
        for name in sorted(copies_there - copies):
            raise ValueError(
                f"{operation}: {name} of model must be a parameter or buffer in state_dict(), got "
                "a copy"
            )
        of_others = {id(param) for average in _averages for param in average._params}
        of_others -= set(map(id, self._params))
        for name, each in target.items():
            if id(ours[name]) not in of_others:
                average: Any = entries[name]
                is_whole = is_dtensor(each) or not is_dtensor(average)
                each.detach().copy_(average if is_whole else average.full_tensor())

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
            ValueError: If the model lacks a parameter of the optimizer, or its ``state_dict()`` has
                a copy of a parameter with another name or shape than the parameter.
        """
        operation = "WeightAverage.averaged_state_dict"
        self._averages.check_not_swapped(operation)
        contents = self._named(operation)
        averaged = self._averaged(contents.tensors) | contents.extra_states
        named = {_PREFIX + name: each for name, each in averaged.items()}
        return {"n_averaged": self.n_averaged, **named}

    def _named(self, operation: str) -> _Contents:
        """Returns the contents of the model; raises if it lacks a parameter of the optimizer."""
        if self.model is None:
            raise RuntimeError(
                f"{operation}: this average has no model, so its parameters have no names. "
                "Construct it as WeightAverage(optimizer, model=model)."
            )
        self._register_params()
        self._check_model(operation, self.model)
        contents = _contents_of(self.model)
        found = set(map(id, contents.tensors.values()))
        names = {id(param): name for name, param in self.model.named_parameters()}
        for index, param in enumerate(self._params):
            if id(param) not in found:
                raise ValueError(
                    f"{operation}: state_dict() of model lacks param {index}, "
                    f"{names[id(param)]!r} of shape {list(param.shape)}. Remove the hook that "
                    "changes state_dict(), or use fully_shard."
                )
        return contents

    def _averaged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors with each of the optimizer's parameters replaced by its average."""
        averages = dict(zip(map(id, self._params), self.averages, strict=True))
        return {name: averages.get(id(each), each.detach()) for name, each in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns averages and counts, without the arguments. The tensors are not copied.

        The entries are "averages" in the order of the optimizer's parameters, "steps" (not counting
        skipped ones) and "n_averaged". If parameters were added since the last step, "joined" is
        the list of their indices.

        Raises:
            RuntimeError: If the averages are swapped in.
        """
        self._averages.check_not_swapped("WeightAverage.state_dict")
        averages, counters = self.averages, self._counters()
        state = {"averages": averages, "steps": counters[0], "n_averaged": counters[1]}
        joined = self._averages.joined
        return {**state, "joined": joined} if joined else state

    @outside_inference_mode()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads averages and counts, which are copied. The arguments stay as constructed.

        Args:
            state_dict: A dict from ``state_dict()``; or, if ``model`` was given, one of torch's
                ``AveragedModel``, whose buffers and frozen parameters are ignored. Names are
                compared without the prefixes of ``torch.compile`` and of wrappers such as DDP.

        Raises:
            KeyError: If an entry is missing.
            TypeError: If ``state_dict`` is not a dict, the averages are not a list of
                floating-point tensors, or a count or an index is not an integer.
            ValueError: If averages have other shapes or placements than the parameters, there are
                more averages than steps, or the model lacks a parameter. After any error nothing
                has changed.
            RuntimeError: If the averages are swapped in, or the file is one of ``AveragedModel``
                and the average has no ``model``.
        """
        operation = "WeightAverage.load_state_dict"
        check_is_dict(operation, state_dict)
        self._averages.check_not_swapped(operation)
        self._register_params()
        if any(str(name).startswith(_PREFIX) for name in state_dict):
            named = self._named(operation).tensors
            names_of = {id(each): name for name, each in named.items()}
            ours = [_PREFIX + names_of[id(param)] for param in self._params]
            saved = [str(name) for name in state_dict if str(name).startswith(_PREFIX)]
            names = _matching_names(ours, saved)
            _check_keys(operation, state_dict, ["n_averaged", *names])
            averages = {name: state_dict[name] for name in names}
            n_averaged = _unsharded(operation, "n_averaged", state_dict["n_averaged"])
            steps, joined = n_averaged * self.every, []
        else:
            _check_keys(operation, state_dict, ["averages", "steps", "n_averaged"])
            listed = state_dict["averages"]
            if not isinstance(listed, (list, tuple)):
                raise TypeError(
                    f"{operation}: averages must be a list, got {type(listed).__name__}"
                )
            averages = {f"averages[{index}]": each for index, each in enumerate(listed)}
            n_averaged = _unsharded(operation, "n_averaged", state_dict["n_averaged"])
            steps = _unsharded(operation, "steps", state_dict["steps"])
            joined = [
                _unsharded(operation, "joined", each) for each in state_dict.get("joined", ())
            ]
        for name, average in averages.items():
            if not isinstance(average, Tensor):
                raise TypeError(f"{operation}: {name} must be a tensor, got {average!r}")
        for (name, average), param in zip(averages.items(), self._params, strict=False):
            wanted, got = _layout(param), _layout(average)
            if wanted != got and (is_dtensor(param) or is_dtensor(average)):
                raise ValueError(f"{operation}: {name} must be {wanted}, got {got}")
        local = [local_tensor(average) for average in averages.values()]
        self._averages.load(operation, local, steps, n_averaged, joined)

    def restart(self) -> None:
        """Restarts the averages with the present weights; the next average is a copy again.

        Call this also after parameters have changed their dtype, shape or device. Until you do,
        each step updates the parameters, but then the hook of the average raises an error.

        Raises:
            RuntimeError: If averages of this optimizer are in its parameters.
        """
        self._call_on_averages("restart_average")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents for a pickle or a copy, which include the optimizer."""
        return {
            "arguments": self._arguments,
            "state": self.state_dict(),
            "is_removed": self._is_removed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an average and registers it with its optimizer."""
        # The model is checked at its first use, because a model that holds this average may be only
        # partly unpickled here.
        self.__init__(**{**state["arguments"], "model": None})  # type: ignore[misc]
        self._arguments = state["arguments"]
        self.load_state_dict(state["state"])
        if state["is_removed"]:
            self.remove()


def _hook_of(average: weakref.ref[WeightAverage]) -> Callable[[Any, Any, Any], None]:
    """Returns a hook for an optimizer's steps that does not keep the average alive.

    The hook does nothing once the average is deleted. It stays registered then, because the garbage
    collector may delete an average while hooks run, and their dict must not change meanwhile.
    """
    captured: list[WeightAverage] = []

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = average()
        if held is None:
            return
        held._call_on_averages("take_average")
        if held._counters().is_cuda and torch.cuda.is_current_stream_capturing():
            captured[:] = [held]  # keeps the average alive: replays of the graph will write it

    return after_step


class _Contents(NamedTuple):
    """The contents of a model, keyed by the names of its state dict."""

    tensors: dict[str, Tensor]
    copies: set[str]  # names of tensors that are neither a parameter nor a buffer
    extra_states: dict[str, Any]  # results of get_extra_state() that are not tensors


def _contents_of(model: nn.Module) -> _Contents:
    """Returns the contents of a model, keyed by the names of its state dict.

    If a hook has replaced a parameter or buffer in the state dict by a copy, the parameter or
    buffer with the name and shape of the copy is used instead.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    own: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    known = set(map(id, own.values()))
    contents = _Contents({}, set(), {})
    for name, each in state.items():
        if not isinstance(each, Tensor):
            contents.extra_states[name] = each
            continue
        contents.tensors[name] = each
        if id(each) in known:
            continue
        if name in own and own[name].shape == each.shape:
            contents.tensors[name] = own[name]
        else:
            contents.copies.add(name)
    return contents


def _matching_names(names: list[str], others: list[str]) -> list[str]:
    """Returns for each name the one of ``others`` that means the same parameter.

    If ``others`` lacks one of the names, all names are compared without the prefixes of wrappers. A
    name without a counterpart is returned as it is.
    """
    bare, bare_others = ops.without_wrappers(names), ops.without_wrappers(others)
    known = dict(zip(bare_others, others, strict=True))
    if set(names) <= set(others) or len(known) < len(others) or len(set(bare)) < len(bare):
        return names
    return [known.get(each, name) for each, name in zip(bare, names, strict=True)]


def _reshard(model: nn.Module | None) -> None:
    """Makes modules of ``fully_shard`` gather their parameters again before the next use."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in () if model is None else model.modules():
        if isinstance(module, sharded):
            module.reshard()


def _layout(tensor: Any) -> str:
    sizes = f"of sizes {list(tensor.shape)}"
    if is_dtensor(tensor):
        return f"a DTensor {sizes}, {tensor.placements}"
    return f"a whole tensor {sizes}"


def _check_not_lazy(optimizer: FusedOptimizer) -> None:
    for index, param in enumerate(params_of(optimizer)):
        if is_lazy(param):
            raise RuntimeError(
                f"WeightAverage: param {index} is a lazy parameter, which has no shape yet. Run "
                "the model once first."
            )


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, FusedOptimizer):
        return
    inner = getattr(optimizer, "optimizer", None)
    advice = ": give its .optimizer" if isinstance(inner, FusedOptimizer) else ""
    raise TypeError(
        "WeightAverage: optimizer must be one of amp_ext.optim, such as AdamW, got "
        f"{_class_of(optimizer)}{advice}"
    )


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _check(name: str, value: Any, wanted_type: Any, wanted: str) -> None:
    if not isinstance(value, wanted_type) or (isinstance(value, bool) and wanted_type is not bool):
        raise TypeError(f"WeightAverage: {name} must be {wanted}, got {value!r}")


def _check_keys(operation: str, state_dict: Mapping[str, Any], wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in state_dict]
    if missing:
        raise KeyError(f"{operation}: state_dict must have {missing[:8]}, got {[*state_dict][:8]}")


def _unsharded(operation: str, name: str, value: Any) -> int:
    value = plain(value)
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{operation}: {name} must be a whole number, got {value!r}")
    return number


def _shape_under(name: str, entries: Mapping[str, Tensor]) -> str:
    return f"of shape {list(entries[name].shape)}" if name in entries else "absent"


def has_average(optimizer: FusedOptimizer) -> bool:
    """Returns True if an optimizer has an average of its weights that was not removed."""
    return any(average._reads(optimizer) for average in _averages)
