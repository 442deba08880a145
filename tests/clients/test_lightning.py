"""Training through Lightning's Trainer and Fabric equals the loop by hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import small_training as small
import torch

import amp_ext

lightning = small.client("lightning")

from amp_ext.integrations.lightning import FabricMixedPrecision, MixedPrecision  # noqa: E402

OPTIMIZERS = [*small.FUSED, small.LOOPING]
# Lightning's packages of the Trainer and of Fabric, with our plugin for each.
OURS = {lightning.pytorch: MixedPrecision, lightning.fabric: FabricMixedPrecision}


def our_plugin(package: Any = lightning.pytorch) -> Any:
    return OURS[package](device="cpu", scaler=small.our_scaler())


def their_plugin(package: Any = lightning.pytorch) -> Any:
    return package.plugins.MixedPrecision("16-mixed", "cpu", scaler=small.our_scaler())


class Module(lightning.LightningModule):
    def __init__(self, make_optimizer: small.MakeOptimizer) -> None:
        super().__init__()
        self.model = small.make_model()
        self.make_optimizer = make_optimizer

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return small.loss_of(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.model.parameters())


class ManualModule(Module):
    """Clips, twice, and steps by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.fixture
def fit(tmp_path: Any) -> Callable[..., Any]:
    """Trains a module with a plugin, quietly and in a folder of the test."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fit(
        module: Any, plugin: Any, ckpt_path: Any = None, batches: Any = None, **options: Any
    ) -> Any:
        quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        options |= {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
        options = {"max_epochs": 1, **dict.fromkeys(quiet, False), **options}
        trainer = lightning.Trainer(plugins=[plugin], **options)
        batches = torch.utils.data.DataLoader(batches or small.make_batches(), batch_size=None)
        trainer.fit(module, batches, ckpt_path=ckpt_path)
        return trainer

    return fit


def set_up_fabric(make_optimizer: small.MakeOptimizer, plugin: Any) -> tuple[Any, Any, Any]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = small.make_model()
    return fabric, *fabric.setup(model, make_optimizer(model.parameters()))


def loop(fabric: Any, model: Any, optimizer: Any, batches: Any, max_norm: Any = None) -> None:
    for x, y in batches:
        fabric.backward(small.loss_of(model(x), y))
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=OURS, ids=["trainer", "fabric"])
def package(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def trained(package: Any, fit: Callable[..., Any]) -> Callable[..., torch.nn.Module]:
    """Trains a model through the Trainer, or through Fabric."""

    def trained(make_optimizer: small.MakeOptimizer, plugin: Any, max_norm: Any = None) -> Any:
        if package is lightning.pytorch:
            module = Module(make_optimizer)
            fit(module, plugin, gradient_clip_val=max_norm)
            return module.model
        fabric, model, optimizer = set_up_fabric(make_optimizer, plugin)
        loop(fabric, model, optimizer, small.make_batches(), max_norm)
        return model.module

    return trained


pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")

# Both.


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_lightning_s_own_plugin_takes_our_scaler(make_optimizer, package, trained):
    plugin = their_plugin(package)
    model = trained(make_optimizer, plugin)
    small.assert_trained_as_by_hand(model, plugin.scaler, make_optimizer)


@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS, small.SWITCHED_OFF])
def test_our_plugin_clips_for_any_optimizer(make_optimizer, package, trained):
    plugin = our_plugin(package)
    model = trained(make_optimizer, plugin, max_norm=0.5)
    small.assert_trained_as_by_hand(model, plugin.scaler, make_optimizer, max_norm=0.5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_without_scaling_gradients_are_clipped_as_they_are(precision, package, trained):
    scaler = None if precision == "bf16-mixed" else amp_ext.GradScaler("cpu", enabled=False)
    models = []
    for options, max_norm in (({}, 0.5), ({"max_grad_norm": 0.5}, None)):
        make_optimizer = functools.partial(amp_ext.optim.SGD, lr=small.LR, **options)
        models.append(trained(make_optimizer, OURS[package](precision, "cpu", scaler), max_norm))
    small.assert_close_weights(*models, rtol=1e-3, atol=1e-4)


def test_bfloat16_has_no_scaler(package):
    assert OURS[package]("bf16-mixed", "cpu").scaler is None
    misconfigured = lightning.pytorch.utilities.exceptions.MisconfigurationException
    error = ValueError if package is lightning.fabric else misconfigured
    with pytest.raises(error, match="'bf16-mixed'` does not use a scaler"):
        OURS[package]("bf16-mixed", "cpu", small.our_scaler())


# The Trainer.


@pytest.mark.parametrize("make_optimizer", small.FUSED)
def test_a_module_that_clips_by_hand_clips_unscaled_gradients(make_optimizer, fit):
    module, plugin = ManualModule(make_optimizer), our_plugin()
    fit(module, plugin)
    small.assert_trained_as_by_hand(module.model, plugin.scaler, make_optimizer, max_norm=0.5)


def test_our_plugin_clips_by_value(fit):
    make_optimizer = functools.partial(amp_ext.optim.SGD, lr=small.LR)
    module = Module(make_optimizer)
    fit(module, our_plugin(), gradient_clip_val=0.05, gradient_clip_algorithm="value")
    expected, _ = small.by_hand(functools.partial(make_optimizer, clip_value=0.05))
    small.assert_close_weights(module.model, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("writer", [our_plugin, their_plugin])
def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(
    make_optimizer, writer, fit, tmp_path
):
    fit(Module(make_optimizer), writer()).save_checkpoint(tmp_path / "one.ckpt")
    resumed, plugin = Module(make_optimizer), MixedPrecision(device="cpu")
    second = fit(resumed, plugin, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    expected, _ = small.by_hand(make_optimizer, batches=small.make_batches() * 2)
    assert second.global_step == 2 * len(small.make_batches())
    small.assert_same_weights(resumed.model, expected)


# Fabric.


def test_the_wrapper_shows_the_norm_of_the_optimizer_inside():
    make_optimizer = functools.partial(small.our_adamw, max_grad_norm=0.5)
    fabric, model, optimizer = set_up_fabric(make_optimizer, our_plugin(lightning.fabric))
    loop(fabric, model, optimizer, small.make_batches())
    assert optimizer.optimizer.grad_norm > 0
    assert optimizer.grad_norm is optimizer.optimizer.grad_norm


def test_training_resumed_with_fabric_ends_with_the_same_bits(tmp_path):
    for batches in (small.make_batches()[:7], small.make_batches()[7:]):
        plugin = our_plugin(lightning.fabric)
        fabric, model, optimizer = set_up_fabric(small.guarded_adamw, plugin)
        state = {"model": model, "optimizer": optimizer, "scaler": plugin.scaler}
        state["guard"] = optimizer.optimizer.norm_guard
        if (tmp_path / "state.ckpt").exists():
            fabric.load(tmp_path / "state.ckpt", state)
        loop(fabric, model, optimizer, batches)
        fabric.save(tmp_path / "state.ckpt", state)
    assert plugin.scaler.get_scale() < small.INIT_SCALE
    assert state["guard"].stats(wait=True).norms > len(batches), "with those of the first part"
    small.assert_same_weights(model.module, small.by_hand(small.guarded_adamw)[0])
