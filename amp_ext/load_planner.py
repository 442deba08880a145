"""Loads distributed checkpoints without the options that only amp_ext's optimizers have."""

from __future__ import annotations

import re

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from amp_ext.optim.options import OPTIONAL

_OPTION = re.compile(r"((?:.*\.)?param_groups\..+\.)(\w+)")


class LoadPlanner(DefaultLoadPlanner):
    """Lets ``torch.distributed.checkpoint.load`` read files that lack options of amp_ext.

    Such files come from torch's optimizers, or from a release of amp_ext before an option was
    added. By default ``load`` raises an error for each key that a file lacks. With this planner,
    missing options of amp_ext keep the values that the optimizer was constructed with. A missing
    moment, step counter or master is still an error, unlike with ``allow_partial_load=True``.

    Example:
        >>> state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        >>> dcp.load(state, checkpoint_id=folder, planner=amp_ext.LoadPlanner())
        >>> set_optimizer_state_dict(model, optimizer, state["optimizer"])
    """

    def create_local_plan(self) -> LoadPlan:
        """Plans to read all keys, without options that the file lacks and is allowed to lack."""
        assert self.metadata is not None  # set_up_planner() was called
        wanted, saved = self.state_dict, self.metadata.state_dict_metadata
        asked = {key: wanted[key] for key in wanted if key in saved or not self._may_miss(key)}
        self.state_dict = asked
        plan = super().create_local_plan()
        if self.state_dict is asked:  # DefaultLoadPlanner replaces it for files of old torch
            self.state_dict = wanted
        return plan

    def _may_miss(self, key: str) -> bool:
        """Returns True if a key names a group option that torch's optimizer does not have."""
        match = _OPTION.fullmatch(key)
        if match is None:
            return False
        group, option = match.groups()
        if option == "decoupled_weight_decay":  # torch's SGD lacks it
            return group + "dampening" in self.state_dict
        return option in OPTIONAL
