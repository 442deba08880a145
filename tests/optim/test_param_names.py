"""State dicts of optimizers that were given names: states follow their parameters by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import ours
from harness.reference import same_bits
from harness.rows import rows
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch

PREFIXES = {
    "same": "{}",
    "parallel": "module.{}",
    "compiled": "_orig_mod.{}",
    "both": "module._orig_mod.{}",
    "inside": "blocks._orig_mod.0.module.{}",
    "recomputed": "_checkpoint_wrapped_module.{}",
}
BARE = {"inside": "blocks.0.{}"}


def named(names: list[str], form: str = "{}", dtype=F32) -> list[tuple[str, nn.Parameter]]:
    return [(form.format(name), nn.Parameter(torch.ones(3).to(dtype))) for name in names]


def trained(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Steps once, with another gradient for each parameter."""
    optimizer = ours(name)(params, lr=0.5, **options)
    for number, param in enumerate(cases.params_of(optimizer), 1):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    return optimizer


def states_by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        own.removesuffix(".weight").rpartition(".")[2]: optimizer.state[param]
        for group in optimizer.param_groups
        for param, own in zip(group["params"], group["param_names"], strict=True)
    }


def assert_same_states(first: Any, second: Any) -> None:
    left, right = states_by_name(first), states_by_name(second)
    assert left.keys() == right.keys()
    for name, state in left.items():
        assert state.keys() == right[name].keys() != set()
        assert all(same_bits(value, right[name][key]) for key, value in state.items()), name


@pytest.mark.parametrize("form", PREFIXES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@cases.each_class
def test_states_go_by_name_within_their_group(name, options, dtype, form):
    options = {key: value for key, value in options.items() if key != "lr"}
    bare = BARE.get(form, "{}")
    first = [
        {"params": named(["a", "b", "c"], bare, dtype)},
        {"params": named(["d", "e"], bare, dtype)},
    ]
    source = trained(name, first, **options)
    for here, names in ((PREFIXES[form], ["c", "a", "b"]), (bare, ["b", "c", "a"])):
        again = [
            {"params": named(names, here, dtype)},
            {"params": named(["e", "d"], here, dtype), "lr": 0.125},
        ]
        own = [[key for key, _ in group["params"]] for group in again]
        resumed = ours(name)(again, **options)
        resumed.load_state_dict(cases.through_a_file(source.state_dict()))
        assert_same_states(resumed, source)
        assert [group["param_names"] for group in resumed.param_groups] == own
        assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.5]
        source = resumed


# Names in the file, those of the optimizer, and whose states its parameters get.
OTHER_NAMES = {
    "renamed": (["first.a", "first.b"], ["second.b", "second.a"], [0, 1]),
    "one-more": (["a", "b"], ["b", "x"], [0, 1]),
    "twice": (["a", "module.a"], ["module.module.a", "a"], [0, 1]),
    "none-in-the-file": (None, ["b", "a"], [0, 1]),
    "none-of-the-optimizer": (["a", "b"], None, [0, 1]),
    "called-as-a-wrapper": (["module.a", "a"], ["a", "module.a"], [1, 0]),
}


@pytest.mark.parametrize(("saved", "own", "places"), rows(OTHER_NAMES))
def test_other_names_go_by_place(saved, own, places):
    """But a module may be called as a wrapper is."""

    def params_under(names: list[str] | None) -> list[Any]:
        return named(names) if names else [param for _, param in named(["a", "b"])]

    source, resumed = trained("AdamW", params_under(saved)), ours("AdamW")(params_under(own))
    resumed.load_state_dict(source.state_dict())
    assert resumed.param_groups[0]["param_names"] == (own or saved)
    moments, loaded = (
        [each.state[param]["exp_avg"] for param in cases.params_of(each)]
        for each in (source, resumed)
    )
    assert all(map(same_bits, loaded, [moments[place] for place in places]))


def test_names_that_are_in_other_groups_are_refused():
    source = trained("AdamW", [{"params": named(["a", "b"])}, {"params": named(["c", "d"])}])
    target = ours("AdamW")([{"params": named(["a", "module.c"])}, {"params": named(["b", "d"])}])
    words = (
        r"^AdamW.load_state_dict: param_names of param_groups\[0\] must have 'module.c', got it in "
        r"param_groups\[1\]$"
    )
    cases.assert_refused(target, source.state_dict(), ValueError, words)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")
def test_keys_that_are_names_are_not_permuted_again(flat):
    how = of_torch.StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    pairs = list(model.named_parameters())

    def groups(order: int) -> list[dict[str, Any]]:
        return [{"params": [(f"{name[0]}", param) for name, param in pairs[::order]]}]

    source = trained("AdamW", groups(1))
    saved = of_torch.get_optimizer_state_dict(model, source, options=how)
    for own in (groups(-1), [{"params": [param for _, param in pairs[::-1]]}]):
        resumed = ours("AdamW")(own)
        resumed.init_state()
        of_torch.set_optimizer_state_dict(model, resumed, saved, options=how)
        for _, param in pairs:
            assert same_bits(resumed.state[param]["exp_avg"], source.state[param]["exp_avg"])
        assert resumed.param_groups[0].get("param_names") in (["b", "a"], None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_fsdp1_has_matched_by_name_is_not_permuted_again():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def model_and_named() -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        sharded = FullyShardedDataParallel(model, **options)
        return sharded, list(sharded.named_parameters())

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, pairs = model_and_named()
        source = trained("AdamW", pairs)
        saved = FullyShardedDataParallel.optim_state_dict(model, source)
        other, others = model_and_named()
        resumed = ours("AdamW")(others[::-1])
        resumed.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, saved)
        )
        assert_same_states(resumed, source)
    finally:
        torch.distributed.destroy_process_group()
