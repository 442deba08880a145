"""Files of other packages load as they are, or as the functions of docs/migration.md convert them.

The files and numbers are those that the packages wrote, after two steps from [1, -2, 3] with the
gradients of GRADS, with lr and weight_decay of 0.1, and after a third step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from migrations import functions_of_the_page
from torch import Tensor

import amp_ext

GRADS = [[0.5, -1.0, 2.0], [1.0, 0.25, -0.5], [-0.75, 1.5, 1.0]]
COMMON: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "params": [0]}
LION = [0.01495, -0.0074, 0.0148]
LION_BEFORE, LION_AFTER = (
    [0.7810999751, -1.9611999989, 2.9413001537],
    [0.8732889891, -2.041588068, 2.8118872643],
)
SGD = [1.634000063, -1.018000007, 1.846999884]
SGD_BEFORE, SGD_AFTER = (
    [0.7766000032, -1.7782000303, 2.5852999687],
    [0.6967740059, -1.8187980652, 2.2932169437],
)
ADAM = [[0.144999996, -0.064999998, 0.129999995], [0.00124975, 0.0010615, 0.004246]]
BNB_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "alpha": 0.0, "t_alpha": None, "t_beta3": None}
OPTIMI = {
    "decouple_lr": False,
    "max_lr": None,
    "kahan_sum": None,
    "foreach": None,
    "triton": False,
    "gradient_release": False,
    "setup": True,
}
BETAS_OF_OPTIMI = {"beta1": 0.9, "beta2": 0.99}
FLASH = {"initial_lr": 0.1, "master_bytewidth": 0, "quantize": False}


def of_bnb(*states: list[float]) -> dict[str, Any]:
    kept = {f"state{index}": torch.tensor(state) for index, state in enumerate(states, 1)}
    return {"step": 2, "__bnb_optimizer_quant_state__": kept}


# By package and class: the function of the page, if any, our class, the options and the state of
# the file, the parameter before and after the third step.
CASES: dict[str, tuple[str | None, str, dict[str, Any], dict[str, Any], list[float], list[float]]]
CASES = {
    "pytorch_optimizer 4.1.0 Lion(weight_decouple=False)": (
        None,
        "Lion",
        {"betas": (0.9, 0.99), "weight_decouple": False, "fixed_decay": False, "step": 2},
        {"exp_avg": torch.tensor([0.01684, -0.01128, 0.020669999])},
        [0.7999999523, -1.7999999523, 3.0],
        [0.8999999762, -1.8999999762, 2.9000000954],
    ),
    "deepspeed 0.19.8 DeepSpeedCPULion": (
        None,
        "Lion",
        {"betas": (0.9, 0.999)},
        {
            "step": 2,
            "exp_avg": torch.tensor([0.001499481, -0.00074899, 0.001497981]),
            "exp_avg_sq": torch.zeros(3),
        },
        LION_BEFORE,
        LION_AFTER,
    ),
    "deepspeed 0.19.8 DeepSpeedCPUAdam": (
        None,
        "AdamW",
        {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, "amsgrad": False},
        {
            "step": 2,
            "exp_avg": torch.tensor([0.145000041, -0.065000013, 0.130000025]),
            "exp_avg_sq": torch.tensor([0.001249734, 0.001061486, 0.004245945]),
        },
        [0.7845821381, -1.8142533302, 2.7943532467],
        [0.7503908873, -1.8282362222, 2.7058627605],
    ),
    "bitsandbytes 0.50.2 AdamW": (
        "of_bitsandbytes",
        "AdamW",
        BNB_ADAM,
        of_bnb(*ADAM),
        [0.7845818400, -1.8142532110, 2.7943534851],
        [0.7503904700, -1.8282364607, 2.7058625221],
    ),
    "bitsandbytes 0.50.2 Lion": (
        "of_bitsandbytes",
        "Lion",
        {"betas": (0.9, 0.99), "eps": 0.0},
        of_bnb(LION),
        LION_BEFORE,
        LION_AFTER,
    ),
    "bitsandbytes 0.50.2 SGD(momentum=0.9)": (
        "of_bitsandbytes",
        "SGD",
        {"betas": (0.9, 0), "eps": 0.0},
        of_bnb(SGD),
        SGD_BEFORE,
        SGD_AFTER,
    ),
    "torch-optimi 0.3.3 AdamW": (
        "of_optimi",
        "AdamW",
        OPTIMI
        | BETAS_OF_OPTIMI
        | {"eps": 1e-6, "decouple_wd": True, "step": torch.tensor(2, dtype=torch.int32)},
        {
            "exp_avg": torch.tensor([0.763157904, -0.34210524, 0.684210479]),
            "exp_avg_sq": torch.tensor([0.62688446, 0.528894484, 2.115577936]),
            "kahan_comp": None,
        },
        [0.7847129107, -1.8141592741, 2.7942593098],
        [0.7505406141, -1.8280884027, 2.7056124210],
    ),
    "torch-optimi 0.3.3 Lion": (
        "of_optimi",
        "Lion",
        OPTIMI | BETAS_OF_OPTIMI,
        {"exp_avg": torch.tensor(LION), "kahan_comp": None},
        LION_BEFORE,
        LION_AFTER,
    ),
    "torch-optimi 0.3.3 SGD(momentum=0.9)": (
        "of_optimi",
        "SGD",
        OPTIMI | {"momentum": 0.9, "dampening": False, "torch_init": False, "decouple_wd": False},
        {"exp_avg": torch.tensor(SGD), "kahan_comp": None},
        SGD_BEFORE,
        SGD_AFTER,
    ),
    "torch-optimi 0.3.3 SGD(momentum=0.9, dampening=True)": (
        "of_optimi",
        "SGD",
        OPTIMI | {"momentum": 0.9, "dampening": True, "torch_init": False, "decouple_wd": False},
        {"exp_avg": torch.tensor([0.163940012, -0.102880001, 0.186770007]), "kahan_comp": None},
        [0.9776059985, -1.9777120352, 2.9583230019],
        [0.9693737626, -1.9814751148, 2.9285554886],
    ),
    "flashoptim 0.1.4 FlashAdamW": (
        "of_flashoptim",
        "AdamW",
        FLASH | {"betas": (0.9, 0.999), "eps": 1e-8},
        {
            "step": torch.tensor(2),
            "exp_avg": torch.tensor(ADAM[0]),
            "exp_avg_sq": torch.tensor(ADAM[1]),
        },
        [0.7845834493, -1.8142544031, 2.7943544388],
        [0.7503921390, -1.8282374144, 2.7058637142],
    ),
    "flashoptim 0.1.4 FlashLion": (
        "of_flashoptim",
        "Lion",
        FLASH | {"betas": (0.9, 0.99)},
        {"exp_avg": torch.tensor(LION)},
        LION_BEFORE,
        LION_AFTER,
    ),
    "flashoptim 0.1.4 FlashSGD(momentum=0.9)": (
        "of_flashoptim",
        "SGD",
        FLASH | {"momentum": 0.9, "dampening": 0.0},
        {"momentum_buffer": torch.tensor(SGD)},
        SGD_BEFORE,
        SGD_AFTER,
    ),
}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Returns the functions of the page that convert files of optimizers."""
    return functions_of_the_page()


def stepped_after_load(name: str, file: dict[str, Any], before: list[float], **own: Any) -> Tensor:
    param = torch.nn.Parameter(torch.tensor(before))
    optimizer = getattr(amp_ext.optim, name)([param], lr=123.0, weight_decay=0.0, **own)
    optimizer.load_state_dict(file)
    used = {"step", "exp_avg", "momentum_buffer"} | ({"exp_avg_sq"} if name == "AdamW" else set())
    assert optimizer.state[param].keys() == file["state"][0].keys() & used
    param.grad = torch.tensor(GRADS[2])
    optimizer.step()
    return param.detach()


@pytest.mark.parametrize("case", CASES)
def test_a_file_goes_on(case: str, page: dict[str, Any]) -> None:
    function, name, options, state, before, after = CASES[case]
    file = {"state": {0: state}, "param_groups": [COMMON | options]}
    own = {"decoupled_weight_decay": False} if "weight_decouple" in options else {}
    if function is not None:
        with pytest.raises(ValueError, match=rf"^{name}\.load_state_dict: "):
            stepped_after_load(name, file, before)
        file = page[function](file, name)
    param = stepped_after_load(name, file, before, **own)
    torch.testing.assert_close(param, torch.tensor(after), rtol=2e-5, atol=0.0)


def test_states_of_bitsandbytes_in_8_bits_become_numbers(page: dict[str, Any]) -> None:
    """Each number is its code in the map, times the maximum of its 256 elements."""
    codes = torch.arange(512, dtype=torch.int64).remainder(4).to(torch.uint8).view(2, 256)
    first, second = [-1.0, -0.5, 0.25, 1.0], [0.0, 0.125, 0.5, 1.0]
    kept: dict[str, Any] = {"state1": codes, "state2": codes}
    kept |= {"qmap1": torch.tensor(first), "qmap2": torch.tensor(second)}
    kept |= {"absmax1": torch.tensor([2.0, 4.0]), "absmax2": torch.tensor([8.0, 16.0])}
    file = {
        "state": {0: {"step": 2, "__bnb_optimizer_quant_state__": kept}},
        "param_groups": [BNB_ADAM | COMMON],
    }
    state = page["of_bitsandbytes"](file, "AdamW")["state"][0]
    assert state["exp_avg"][:, :4].tolist() == [[2 * x for x in first], [4 * x for x in first]]
    assert state["exp_avg_sq"][:, :4].tolist() == [
        [8 * x for x in second],
        [16 * x for x in second],
    ]


def test_compressed_states_of_flashoptim_are_refused(page: dict[str, Any]) -> None:
    file = {"state": {}, "param_groups": [FLASH | {"quantize": True} | COMMON]}
    with pytest.raises(ValueError, match="the states are compressed"):
        page["of_flashoptim"](file, "Lion")


def test_a_file_of_lion_pytorch_with_decoupled_decay_goes_on_with_another_weight_decay() -> None:
    """lion-pytorch 0.2.5, Lion(decoupled_weight_decay=True), of which the file says nothing."""
    param = torch.nn.Parameter(torch.tensor([0.6199998856, -1.6299998760, 2.4399998188]))
    optimizer = amp_ext.optim.Lion([param])
    optimizer.load_state_dict(
        {
            "state": {0: {"exp_avg": torch.tensor(LION)}},
            "param_groups": [COMMON | {"betas": (0.9, 0.99)}],
        }
    )
    optimizer.param_groups[0]["weight_decay"] = 0.1 / 0.1
    param.grad = torch.tensor(GRADS[2])
    optimizer.step()
    wanted = torch.tensor([0.6579999328, -1.5669999123, 2.0959999561])
    torch.testing.assert_close(param.detach(), wanted, rtol=1e-6, atol=0.0)
