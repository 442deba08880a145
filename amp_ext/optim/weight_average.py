"""An average of the weights of an optimizer, which follows its steps on the device."""

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

__all__ = ["WeightAverage"]

_PREFIX = "module."  # of names in files of AveragedModel

_averages: weakref.WeakSet[WeightAverage] = weakref.WeakSet()  # all that there are


def _argument(name: str, meaning: str) -> property:
    """Makes a property of an argument, which can't be set."""
    return property(lambda average: average._arguments[name], doc=meaning)


class WeightAverage:
    """Averages the float32 masters of an optimizer's parameters, in one launch after each step.

    The average of a parameter is that of its float32 master, of its decoded split master, or of
    itself where it has none; a float64 parameter is averaged in float32. Parameters without a
    gradient are averaged, too. Only steps that have landed count: not those that an overflow
    skipped, and not those in which no parameter had a gradient. The device alone knows that, and
    the host does not wait for it, so that steps can be captured in CUDA graphs.

    It ticks by itself, in a hook after each step of the optimizer, as long as somebody holds it:
    the optimizer does not. The first average is a copy of the weights; before it, the averages are
    the weights at construction. A parameter that joins later begins with its weight after the next
    step, taken or skipped. Where an average moves by less than half a unit in the last place, one
    in bfloat16 would stand still: it is dithered, so that it is right in the mean.

    ::

        average = amp_ext.optim.WeightAverage(optimizer, decay=0.999)
        for x, y in data:
            train_step(x, y)  # ends in optimizer.step(), or in scaler.step and update
        with average.swap():
            validate(model)

    The arguments are properties, which can't be set.

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
        """Begins averages at the present weights.

        Args:
            optimizer: Of ``amp_ext.optim``. Several averages may follow one.
            decay: What the average keeps of itself each time, from 0 to 1; or "equal": all weights
                count the same, the n-th with 1 / n.
            every: Takes an average at each such step, of those that have landed.
            dtype: torch.float32, or torch.bfloat16 for 2 bytes a parameter.
            model: Which has the parameters. Gives them their names, and the average the buffers and
                the frozen parameters, for :meth:`copy_to` and files of torch's ``AveragedModel``;
                and lets :meth:`swap` reach what ``fully_shard`` has gathered.
            warmup: Lets the decay grow: it is min(decay, (1 + n) / (10 + n)) after n averages.

        Raises:
            TypeError: If the optimizer is none of ``amp_ext.optim``, or an argument of a wrong
                type.
            ValueError: If an argument is out of range, or the model lacks a parameter.
            RuntimeError: If a parameter is lazy, or on a device or of a dtype that no kernel takes.
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
        self._ask("take_average")
        if model is not None:
            self._check_model("WeightAverage", model)
        optimizer.track_step_applied()
        self._hook = optimizer.register_step_post_hook(_hook_of(weakref.ref(self)))
        self._is_removed = False
        _averages.add(self)

    optimizer = _argument("optimizer", "The optimizer whose steps it follows.")
    decay = _argument("decay", 'What the average keeps of itself each time, or "equal".')
    every = _argument("every", "How many steps that landed there are to an average.")
    dtype = _argument("dtype", "Of the averages.")
    model = _argument("model", "The model that gives the parameters their names, or None.")
    warmup = _argument("warmup", "Whether the decay grows.")

    def __repr__(self) -> str:
        """Returns the arguments, with the classes of optimizer and model."""
        arguments = {
            name: type(value).__name__ if name in ("optimizer", "model") and value else repr(value)
            for name, value in self._arguments.items()
        }
        return f"WeightAverage({', '.join(f'{each}={arguments[each]}' for each in arguments)})"

    def _list(self) -> None:
        """Lists the parameters that the optimizer has now, if they are others."""
        if [*map(id, params_of(self.optimizer))] != [*map(id, self._params)]:
            _check_not_lazy(self.optimizer)
            self._ask("list_average")

    def _ask(self, operation: str) -> None:
        """Lets the optimizer do something with the averages, of the parameters that it has now."""
        before = self._averages.listings
        self.optimizer.average_weights(operation, self._averages)
        if self._averages.listings != before:  # held: by their addresses they are known
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
        """Lets the average follow no further step."""
        self._hook.remove()
        self._is_removed = True

    @property
    def averages(self) -> list[Tensor]:
        """The averages in the order of the optimizer's parameters, which later steps write anew."""
        self._list()
        pairs = zip(self._params, self._averages.averages, strict=True)
        return [laid_out_as(param, average) for param, average in pairs]

    @property
    def n_averaged(self) -> Tensor:
        """How many averages were taken, one int64 on the device, which later steps write anew."""
        return self._counters()[1]

    def _counters(self) -> Tensor:
        counters = self._averages.counters
        return torch.zeros(2, dtype=torch.int64) if counters is None else counters

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Puts the averages into the parameters, and at the end the parameters back.

        A context. Parameters and masters have their bits again after it, also after an exception,
        and the next step leaves masters as they are. For autograd the parameters were written: no
        graph from before a swap, or made in it, can be differentiated after it (``fully_shard``
        does not see that, and computes wrong gradients). Inside it split
        masters are what the parameters are. Takes a copy of the parameters meanwhile. What
        ``fully_shard`` has gathered is gathered anew, where the average was made with ``model``.

        Raises:
            RuntimeError: If the averages of this optimizer are in its parameters already, or
                FullyShardedDataParallel keeps these, whose modules compute with copies. Inside,
                also for a step or a look of the optimizer, for its state dict and that of the
                average, and for ``refresh_masters`` and ``restart``. At the end, if a parameter got
                another dtype, shape or device inside: all others are back then.
        """
        self._averages.check_not_swapped("WeightAverage.swap")
        for index, param in enumerate(params_of(self.optimizer)):
            if is_flattened(param):
                raise RuntimeError(
                    "WeightAverage.swap: parameters must not be flattened, as those of "
                    f"FullyShardedDataParallel are, got param {index}: use fully_shard"
                )
        try:
            self._ask("swap_average")
            _reshard(self.model)
            yield
        finally:
            try:
                self.optimizer.swap_back(self._averages)
            finally:
                _reshard(self.model)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Copies the averages into another model, with all else that ours has.

        Parameters that another average has are left out, so that the averages of several optimizers
        of one model can be copied one after the other.

        What a layer has measured of its inputs, as BatchNorm does, was measured of the weights in
        training: ``torch.optim.swa_utils.update_bn(loader, model)`` measures it anew.

        Args:
            model: Of the parameters and buffers of ``self.model``, in any dtypes; written. Names
                are compared without what ``torch.compile`` and wrappers such as DDP add to them.
                Where ours are sharded and its are not, all ranks have to call this together.

        Raises:
            TypeError: If it is no module.
            ValueError: If it has others, by name or shape, or ``self.model`` lacks a parameter that
                has joined the optimizer, or the ``state_dict()`` of a model has copies of
                parameters that can't be told by name and shape, or its parameters are sharded and
                ours are not. Nothing has been written then.
            RuntimeError: If the average was made without ``model``.
        """
        operation = "WeightAverage.copy_to"
        if not isinstance(model, nn.Module):
            raise TypeError(f"{operation}: model must be a torch.nn.Module, got {_class_of(model)}")
        contents, contents_there = self._named(operation), _contents_of(model)
        ours, copies = contents.tensors, contents.copies
        entries = self._averaged(ours)
        target, copies_there = contents_there.tensors, contents_there.copies
        names = list(target)
        placed_params = ops.indices_by_name([*entries], names)
        if placed_params:
            names = [names[at] for at in placed_params]
            copies_there = {
                name for name, there in zip(entries, names, strict=True) if there in copies_there
            }
            target = {name: target[there] for name, there in zip(entries, names, strict=True)}
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
        """Returns what ``torch.optim.swa_utils.AveragedModel(model).load_state_dict`` takes.

        Under ``fully_shard`` all ranks have to call it together, as :meth:`load_state_dict` of such
        a file and ``model.state_dict()``: modules gather their parameters anew afterwards.

        "n_averaged", and under "module.<name>" the averages, and all else that the model has as it
        is: buffers, extra states of any type, frozen parameters, and those of other optimizers. Its
        tensors are those in use.

        Raises:
            RuntimeError: If the average was made without ``model``, or is swapped in.
            ValueError: If the model lacks a parameter that has joined the optimizer, or its
                ``state_dict()`` has copies of parameters that can't be told by name and shape.
        """
        operation = "WeightAverage.averaged_state_dict"
        self._averages.check_not_swapped(operation)
        contents = self._named(operation)
        averaged = self._averaged(contents.tensors) | contents.extra_states
        named = {_PREFIX + name: each for name, each in averaged.items()}
        return {"n_averaged": self.n_averaged, **named}

    def _named(self, operation: str) -> _Contents:
        """Returns what the model has by its names, with all parameters of the optimizer in it."""
        if self.model is None:
            raise RuntimeError(
                f"{operation}: model must be given to WeightAverage for the names, got None"
            )
        self._list()
        self._check_model(operation, self.model)
        contents = _contents_of(self.model)
        found = set(map(id, contents.tensors.values()))
        names = {id(param): name for name, param in self.model.named_parameters()}
        for index, param in enumerate(self._params):
            if id(param) not in found:
                raise ValueError(
                    f"{operation}: state_dict() of model must have param {index} under its name "
                    f"{names[id(param)]!r}, of shape {list(param.shape)}, or itself, got neither"
                )
        return contents

    def _averaged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns averages in place of our parameters."""
        averages = dict(zip(map(id, self._params), self.averages, strict=True))
        return {name: averages.get(id(each), each.detach()) for name, each in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns averages and counts, without the options; its tensors are those in use.

        "averages" in the order of the optimizer's parameters, "steps" that have landed, and
        "n_averaged". Where parameters have joined since the last step, their indices: "joined".

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
        """Takes over averages and counts, which are copied; the options stay as they are.

        Args:
            state_dict: From ``state_dict()``; or, with ``model``, one of torch's ``AveragedModel``,
                of which buffers and frozen parameters are left out. Names are compared without what
                ``torch.compile`` and wrappers such as DDP add to them.

        Raises:
            KeyError: If an entry is missing.
            TypeError: If it is no dict, the averages are no list of floating-point tensors, or a
                count or an index is no whole number.
            ValueError: If averages have other shapes or are sharded otherwise than the parameters,
                more averages were taken than steps landed, or the model lacks a parameter. Nothing
                has been changed after any error.
            RuntimeError: If the averages are swapped in, or a file of ``AveragedModel`` comes to an
                average without ``model``.
        """
        operation = "WeightAverage.load_state_dict"
        check_is_dict(operation, state_dict)
        self._averages.check_not_swapped(operation)
        self._list()
        if any(str(name).startswith(_PREFIX) for name in state_dict):
            named = self._named(operation).tensors
            names_of = {id(each): name for name, each in named.items()}
            names = _names_in_file([names_of[id(param)] for param in self._params], state_dict)
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
        """Begins anew: the averages are the present weights, and the next one is a copy.

        Also where parameters have got another dtype, shape or device: each step is taken then, and
        its hook raises an error.

        Raises:
            RuntimeError: If averages of this optimizer are in its parameters.
        """
        self._ask("restart_average")

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle or a copy has, whose optimizer is a copy, too."""
        return {
            "arguments": self._arguments,
            "state": self.state_dict(),
            "is_removed": self._is_removed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Lets a copy follow its optimizer."""
        # A model that holds its average is not whole yet: what it has is asked for when it is used.
        self.__init__(**{**state["arguments"], "model": None})  # type: ignore[misc]
        self._arguments = state["arguments"]
        self.load_state_dict(state["state"])
        if state["is_removed"]:
            self.remove()


def _hook_of(average: weakref.ref[WeightAverage]) -> Callable[[Any, Any, Any], None]:
    """Returns what an optimizer calls after a step, which does not hold the average.

    Once the average is gone it does nothing. It is not removed then: the collector may let an
    average go amid the hooks of a step, whose dict must not change.
    """
    captured: list[WeightAverage] = []

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = average()
        if held is None:
            return
        held._ask("take_average")
        if held._counters().is_cuda and torch.cuda.is_current_stream_capturing():
            captured[:] = [held]  # the graph writes its averages for as long as it is replayed

    return after_step


class _Contents(NamedTuple):
    """What a model has, by the names of its state dict."""

    tensors: dict[str, Tensor]
    copies: set[str]  # names of tensors that are neither a parameter nor a buffer
    extra_states: dict[str, Any]  # what ``get_extra_state`` gave that is no tensor


def _contents_of(model: nn.Module) -> _Contents:
    """Returns what a model has by the names of its state dict.

    A copy that a hook has put there gives way to the parameter or buffer of its name and shape.
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


def _names_in_file(names: list[str], state_dict: Mapping[str, Any]) -> list[str]:
    """Returns the keys of parameters in a file of ``AveragedModel``.

    They are compared without what wrappers add to names, where a file lacks one of them as it is.
    """
    keys = [_PREFIX + name for name in names]
    if all(key in state_dict for key in keys):
        return keys
    saved = [str(key) for key in state_dict if str(key).startswith(_PREFIX)]
    bare_saved, bare = ops.without_wrappers(saved), ops.without_wrappers(names)
    placed_params = dict(zip(bare_saved, saved, strict=True))
    are_unique = len(placed_params) == len(saved) and len(set(bare)) == len(bare)
    return [
        placed_params.get(name, key) if are_unique else key
        for name, key in zip(bare, keys, strict=True)
    ]


def _reshard(model: nn.Module | None) -> None:
    """Lets modules of ``fully_shard`` gather their parameters anew before they are used again."""
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
                f"WeightAverage: param {index} must have a shape, got a lazy parameter: run the "
                "model once first"
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
