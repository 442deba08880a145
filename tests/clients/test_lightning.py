"""Training through Lightning's Trainer and Fabric equals the loop by hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import (
    INIT_SCALE,
    LR,
    assert_same_weights,
    client,
    loss_of,
    make_batches,
    make_model,
    our_scaler,
    train_by_hand,
)

import amp_ext

lightning = client("lightning")

from amp_ext.integrations.lightning import FabricMixedPrecision, MixedPrecision  # noqa: E402

MakeOptimizer = Callable[..., torch.optim.Optimizer]

FUSED = [
    pytest.param(functools.partial(amp_ext.optim.AdamW, lr=LR), id="our-adamw"),
    pytest.param(functools.partial(amp_ext.optim.SGD, lr=LR, momentum=0.9), id="our-sgd"),
    pytest.param(functools.partial(torch.optim.AdamW, lr=LR, fused=True), id="torch-fused"),
]
OPTIMIZERS = [*FUSED, pytest.param(functools.partial(torch.optim.AdamW, lr=LR), id="torch")]


def switched_off(params: Any) -> torch.optim.Optimizer:
    """Our optimizer as one that leaves unscaling to the scaler."""
    optimizer = amp_ext.optim.AdamW(params, lr=LR)
    optimizer._step_supports_amp_scaling = False
    return optimizer


class Module(lightning.LightningModule):
    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.model = make_model()
        self.make_optimizer = make_optimizer

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return loss_of(self.model(x), y)

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
def trainer_in(tmp_path: Any) -> Callable[..., Any]:
    """Makes trainers that write into a folder of the test and are quiet."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def make(plugin: Any, epochs: int = 1, **options: Any) -> Any:
        return lightning.Trainer(
            plugins=[plugin],
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            **options,
        )

    return make


def loader(batches: Any = None) -> Any:
    """Returns the batches as Lightning wants them."""
    batches = make_batches() if batches is None else batches
    return torch.utils.data.DataLoader(batches, batch_size=None)


def by_hand(make_optimizer: MakeOptimizer, **options: Any) -> tuple[torch.nn.Module, list[bool]]:
    model = make_model()
    skipped = train_by_hand(model, make_optimizer(model.parameters()), our_scaler(), **options)
    assert any(skipped)
    assert not all(skipped)
    return model, skipped


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
class TestTrainer:
    @pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
    def test_lightning_s_own_plugin_takes_our_scaler(self, make_optimizer, trainer_in):
        scaler = our_scaler()
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        module = Module(make_optimizer)
        trainer_in(plugin).fit(module, loader())
        expected, skipped = by_hand(make_optimizer)
        assert scaler.history().skipped == skipped
        assert_same_weights(module.model, expected)

    @pytest.mark.parametrize(
        "make_optimizer", [*OPTIMIZERS, pytest.param(switched_off, id="our-adamw-switched-off")]
    )
    def test_our_plugin_clips_for_any_optimizer(self, make_optimizer, trainer_in):
        scaler = our_scaler()
        module = Module(make_optimizer)
        trainer = trainer_in(MixedPrecision(device="cpu", scaler=scaler), gradient_clip_val=0.5)
        trainer.fit(module, loader())
        expected, skipped = by_hand(make_optimizer, max_norm=0.5)
        assert scaler.history().skipped == skipped
        assert_same_weights(module.model, expected)

    @pytest.mark.parametrize("make_optimizer", FUSED)
    def test_a_module_that_clips_by_hand_clips_unscaled_gradients(self, make_optimizer, trainer_in):
        scaler = our_scaler()
        module = ManualModule(make_optimizer)
        trainer_in(MixedPrecision(device="cpu", scaler=scaler)).fit(module, loader())
        expected, skipped = by_hand(make_optimizer, max_norm=0.5)
        assert scaler.history().skipped == skipped
        assert_same_weights(module.model, expected)

    def test_lightning_s_own_plugin_clips_for_ours_with_the_switch_off(self, trainer_in):
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=our_scaler())
        module = Module(switched_off)
        trainer_in(plugin, gradient_clip_val=0.5).fit(module, loader())
        assert_same_weights(module.model, by_hand(switched_off, max_norm=0.5)[0])

    def test_clipping_in_the_step_needs_nothing_from_lightning(self, trainer_in):
        make_optimizer = functools.partial(amp_ext.optim.AdamW, lr=LR, max_grad_norm=0.5)
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=our_scaler())
        module = Module(make_optimizer)
        trainer_in(plugin).fit(module, loader())
        assert_same_weights(module.model, by_hand(make_optimizer)[0])

    @pytest.mark.parametrize("algorithm", ["norm", "value"])
    def test_our_plugin_clips_by_norm_and_by_value(self, algorithm, trainer_in):
        make_optimizer = functools.partial(amp_ext.optim.SGD, lr=LR)
        module = Module(make_optimizer)
        trainer = trainer_in(
            MixedPrecision(device="cpu", scaler=our_scaler()),
            gradient_clip_val=0.05,
            gradient_clip_algorithm=algorithm,
        )
        trainer.fit(module, loader())
        option = {"max_grad_norm": 0.05} if algorithm == "norm" else {"clip_value": 0.05}
        expected, _ = by_hand(functools.partial(make_optimizer, **option))
        for left, right in zip(module.model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(left, right)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
    def test_without_scaling_gradients_are_clipped_as_they_are(self, precision, trainer_in):
        models = []
        for clip_val, options in ((0.5, {}), (None, {"max_grad_norm": 0.5})):
            scaler = None if precision == "bf16-mixed" else amp_ext.GradScaler("cpu", enabled=False)
            module = Module(functools.partial(amp_ext.optim.SGD, lr=LR, **options))
            plugin = MixedPrecision(precision, "cpu", scaler)
            trainer_in(plugin, gradient_clip_val=clip_val).fit(module, loader())
            models.append(module.model)
        for left, right in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)

    def test_accumulation_equals_the_loop_by_hand(self, trainer_in):
        make_optimizer = OPTIMIZERS[0].values[0]
        scaler = our_scaler()
        module = Module(make_optimizer)
        trainer_in(MixedPrecision(device="cpu", scaler=scaler), accumulate_grad_batches=2).fit(
            module, loader()
        )
        expected, skipped = by_hand(make_optimizer, accumulate=2)
        assert scaler.history().skipped == skipped
        assert_same_weights(module.model, expected)

    @pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("writer", ["ours", "lightning"])
    def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(
        self, make_optimizer, writer, trainer_in, tmp_path
    ):
        def plugin(kind: str) -> Any:
            if kind == "ours":
                return MixedPrecision(device="cpu", scaler=our_scaler())
            return lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=our_scaler())

        module = Module(make_optimizer)
        first = trainer_in(plugin(writer))
        first.fit(module, loader())
        first.save_checkpoint(tmp_path / "one.ckpt")

        resumed = Module(make_optimizer)
        second = trainer_in(MixedPrecision(device="cpu"), epochs=2)
        second.fit(resumed, loader(), ckpt_path=tmp_path / "one.ckpt")
        expected, _ = by_hand(make_optimizer, batches=make_batches() * 2)
        assert second.global_step == 2 * len(make_batches())
        assert_same_weights(resumed.model, expected)

    def test_a_scaler_for_bfloat16_is_refused(self):
        error = lightning.pytorch.utilities.exceptions.MisconfigurationException
        with pytest.raises(error, match="'bf16-mixed'` does not use a scaler"):
            MixedPrecision("bf16-mixed", "cpu", our_scaler())

    def test_bfloat16_has_no_scaler(self):
        assert MixedPrecision("bf16-mixed", "cpu").scaler is None


class TestFabric:
    def train(
        self, make_optimizer: MakeOptimizer, plugin: Any, max_norm: float | None = None
    ) -> tuple[Any, Any]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model = make_model()
        model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
        for x, y in make_batches():
            fabric.backward(loss_of(model(x), y))
            if max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        return model.module, optimizer

    @pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
    def test_fabric_s_own_plugin_takes_our_scaler(self, make_optimizer):
        scaler = our_scaler()
        plugin = lightning.fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        model, _ = self.train(make_optimizer, plugin)
        expected, skipped = by_hand(make_optimizer)
        assert scaler.history().skipped == skipped
        assert_same_weights(model, expected)

    @pytest.mark.parametrize(
        "make_optimizer", [*OPTIMIZERS, pytest.param(switched_off, id="our-adamw-switched-off")]
    )
    def test_our_plugin_clips_for_any_optimizer(self, make_optimizer):
        scaler = our_scaler()
        plugin = FabricMixedPrecision(device="cpu", scaler=scaler)
        model, _ = self.train(make_optimizer, plugin, max_norm=0.5)
        expected, skipped = by_hand(make_optimizer, max_norm=0.5)
        assert scaler.history().skipped == skipped
        assert_same_weights(model, expected)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
    def test_without_scaling_gradients_are_clipped_as_they_are(self, precision):
        models = []
        for max_norm, options in ((0.5, {}), (None, {"max_grad_norm": 0.5})):
            scaler = None if precision == "bf16-mixed" else amp_ext.GradScaler("cpu", enabled=False)
            make_optimizer = functools.partial(amp_ext.optim.SGD, lr=LR, **options)
            plugin = FabricMixedPrecision(precision, "cpu", scaler)
            models.append(self.train(make_optimizer, plugin, max_norm)[0])
        for left, right in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)

    def test_the_wrapper_shows_the_norm_of_the_optimizer_inside(self):
        make_optimizer = functools.partial(amp_ext.optim.AdamW, lr=LR, max_grad_norm=0.5)
        plugin = FabricMixedPrecision(device="cpu", scaler=our_scaler())
        _, optimizer = self.train(make_optimizer, plugin)
        assert optimizer.optimizer.grad_norm > 0
        assert optimizer.grad_norm is optimizer.optimizer.grad_norm

    def test_a_scaler_for_bfloat16_is_refused(self):
        with pytest.raises(ValueError, match="'bf16-mixed'` does not use a scaler"):
            FabricMixedPrecision("bf16-mixed", "cpu", our_scaler())

    def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(self, tmp_path):
        make_optimizer = OPTIMIZERS[0].values[0]
        batches = make_batches()

        def make() -> tuple[Any, dict[str, Any]]:
            plugin = FabricMixedPrecision(device="cpu", scaler=our_scaler())
            fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
            model = make_model()
            model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
            return fabric, {"model": model, "optimizer": optimizer, "scaler": plugin.scaler}

        def train(fabric: Any, state: dict[str, Any], batches: Any) -> None:
            for x, y in batches:
                fabric.backward(loss_of(state["model"](x), y))
                state["optimizer"].step()
                state["optimizer"].zero_grad()

        fabric, state = make()
        train(fabric, state, batches[:7])
        fabric.save(tmp_path / "state.ckpt", state)
        resumed_fabric, resumed = make()
        resumed_fabric.load(tmp_path / "state.ckpt", resumed)
        train(resumed_fabric, resumed, batches[7:])
        assert resumed["scaler"].get_scale() < INIT_SCALE
        expected, _ = by_hand(make_optimizer)
        assert_same_weights(resumed["model"].module, expected)
