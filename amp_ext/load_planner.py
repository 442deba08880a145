"""Loads distributed checkpoints whose groups lack options that torch's optimizers do not have."""

from __future__ import annotations

import re

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from amp_ext import ops

__all__ = ["LoadPlanner"]

_OPTION = re.compile(r"((?:.*\.)?param_groups\..+\.)(\w+)")


class LoadPlanner(DefaultLoadPlanner):
    """Lets ``torch.distributed.checkpoint.load`` read files without some options of ours.

    Such are the files of torch's optimizers, and those of ours from before there was an option.
    ``load`` asks for every key of the dict that it fills. Options of groups that torch does not
    have may be missing here: they stay as they are in that dict, which is how the optimizer was
    constructed. All else is as with ``DefaultLoadPlanner``: a moment, a counter or a master that is
    missing is an error. ``allow_partial_load=True`` would leave it as it is, without a word.

    Example:
        >>> state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        >>> dcp.load(state, checkpoint_id=folder, planner=amp_ext.LoadPlanner())
        >>> set_optimizer_state_dict(model, optimizer, state["optimizer"])
    """

    def create_local_plan(self) -> LoadPlan:
        """Plans to read all keys but those of options that may be missing, and are."""
        assert self.metadata is not None  # torch has set the planner up
        wanted, saved = self.state_dict, self.metadata.state_dict_metadata
        asked = {key: wanted[key] for key in wanted if key in saved or not self._may_miss(key)}
        self.state_dict = asked
        plan = super().create_local_plan()
        if self.state_dict is asked:  # not in a layout of torch's earlier releases
            self.state_dict = wanted
        return plan

    def _may_miss(self, key: str) -> bool:
        """Returns whether a key is of an option that torch's optimizer of that group lacks."""
        match = _OPTION.fullmatch(key)
        if match is None:
            return False
        group, option = match.groups()
        if option == "decoupled_weight_decay":  # which torch's SGD does not have
            return group + "dampening" in self.state_dict
        return option in ops.configured_options()
