# Types of the compiled module. amp_ext.ops documents the functions.
from typing import Any

from torch import Tensor

class BufferDescription:
    name: str
    role: str
    dither_stride: int  # Weyl stride, see csrc/formats/dither.h; 0: the buffer is never dithered
    code: str  # name of its 8-bit format, such as "q8h"; empty if it has none
    option: str | None  # option that a group must set to have the buffer; None: every group has it

class FormulaNames:  # names of one optimizer
    operation: str  # of the operation over lists, such as "adam_"
    fields: tuple[str, ...]  # of the hyperparameters
    buffers: tuple[BufferDescription, ...]

class Shard:  # what a step needs to know of a parameter that may be a DTensor
    def __init__(self, *fields: Any, **named: Any) -> None: ...

class CompiledStepper:  # half of amp_ext.optim.stepper.Stepper, see csrc/python/stepper.h
    grad_norm: Tensor | None  # [] float32, norm of all gradients at the last step
    step_applied: Tensor | None  # [] float32, 0 if the last step was skipped; None if not tracked
    skipped_matrices: Tensor | None  # [] int64, matrices that Muon left as they were; or None
    tracks_step_applied: bool
    progress: str  # how many parameters a failed step has updated: "3 of 8 parameters"; or ""
    def __init__(self, optimizer: str, hyperparameters: str) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

# Stands for the descriptions of optimizers and all functions, whose signatures amp_ext.ops has.
# Others are in csrc/python: scan_grads, update_scale_ with more arguments, state_needs.
def __getattr__(name: str) -> Any: ...
