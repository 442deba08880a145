"""What the parameters of a group keep in their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amp_ext import ops
from amp_ext.optim.moments import formats_of
from amp_ext.sharding import is_flattened

__all__ = ["Kept"]


@dataclass(frozen=True)
class Kept:
    """What the formula and the options of a group let its parameters keep in their states.

    Attributes:
        kind: The name of the optimizer, for errors.
        buffers: Name and role of each buffer of the formula, as the compiled module describes them.
        names: Of the buffers that the group keeps, the first ones.
        keeps_step: Whether states count steps.
        needs_buffers: Whether a state that lacks one of its buffers is refused. If not, its next
            step is the first one.
        needs_step: Whether a state that lacks its counter is refused, if the group keeps one.
        master_weights: The option.
        state_dtype: The option, as it is stored.
    """

    kind: str
    buffers: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    keeps_step: bool
    needs_buffers: bool
    needs_step: bool
    master_weights: Any
    state_dtype: str | None

    @property
    def roles(self) -> dict[str, str]:
        """The role of each buffer of the formula, by its name."""
        return dict(self.buffers)

    def formats(self, param: Tensor) -> list[ops.MomentFormat]:
        """Returns how a parameter keeps each buffer, also those that the group does not keep.

        Raises:
            ValueError: If they have codes, which FSDP1 can't save.
        """
        formats = formats_of(self.state_dtype, self.buffers, param)
        if any(form.code for form in formats) and is_flattened(param):
            raise ValueError(
                f"{self.kind}: state_dtype must be torch.float32, torch.bfloat16 or None "
                "for parameters that FullyShardedDataParallel flattens, which can't save codes, "
                f"got {self.state_dtype!r}; fully_shard can"
            )
        return formats

    def master_key(self, param: Tensor) -> str | None:
        """Returns the key of the master that a parameter has in its state, or None.

        Raises:
            ValueError: If the master is split, which FSDP1 can't save.
        """
        key: str | None = ops.key_of_master(self.master_weights, param.dtype)
        if key not in (None, "master_param") and is_flattened(param):
            raise ValueError(
                f"{self.kind}: master_weights must be True or False for parameters that "
                "FullyShardedDataParallel flattens, which can't save the lower parts of masters, "
                f"got {self.master_weights!r}; fully_shard can"
            )
        return key

    def missing_from(self, state: Mapping[str, Any]) -> list[str]:
        """Returns the names of what a state would need and does not have."""
        names = self.names if self.needs_buffers else ()
        missing = [name for name in names if not ops.has_moment(state, name)]
        lacks_step = self.needs_step and self.keeps_step and state.get("step") is None
        return missing + (["step"] if lacks_step else [])

    def steps_behind(self, state: Mapping[str, Any]) -> float | None:
        """Returns the number of steps behind a state, None where its counter says so."""
        lacks_step = state.get("step") is None
        if not self.needs_buffers and self.buffers:  # torch's SGD keeps no counter
            has_buffers = all(ops.has_moment(state, name) for name, _ in self.buffers)
            if not has_buffers and self.names:
                return 0.0
            if has_buffers and lacks_step:
                return 1.0
        return 0.0 if lacks_step else None
