"""Fused optimizers with the constructors of torch.optim and with float32 masters."""

from amp_ext.optim.adam import Adam, AdamW
from amp_ext.optim.checkpoints import float32_state_dict
from amp_ext.optim.gradient_release import GradientRelease, release_gradients
from amp_ext.optim.lion import Lion
from amp_ext.optim.muon import Muon
from amp_ext.optim.muon_groups import MuonGroups, MuonRow, param_groups_for_muon
from amp_ext.optim.norm_guard import NormGuard, NormGuardStats
from amp_ext.optim.offload import OffloadedStates, offload_states
from amp_ext.optim.sgd import SGD
from amp_ext.optim.weight_average import WeightAverage
from amp_ext.optim.weight_decay_scheduler import (
    CorrectedWeightDecay,
    CosineAnnealingWeightDecay,
    LambdaWeightDecay,
    StepWeightDecay,
    WeightDecayScheduler,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CorrectedWeightDecay",
    "CosineAnnealingWeightDecay",
    "GradientRelease",
    "LambdaWeightDecay",
    "Lion",
    "Muon",
    "MuonGroups",
    "MuonRow",
    "NormGuard",
    "NormGuardStats",
    "OffloadedStates",
    "StepWeightDecay",
    "WeightAverage",
    "WeightDecayScheduler",
    "float32_state_dict",
    "offload_states",
    "param_groups_for_muon",
    "release_gradients",
]
