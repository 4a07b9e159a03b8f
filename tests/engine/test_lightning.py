"""The callback for Lightning's Trainer: what it averages, and what a training that is resumed goes on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.models import assert_all_bitwise_equal, assert_same_on_all_ranks
from tests.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.end_to_end
pytest.importorskip("lightning", exc_type=ImportError)


def _module() -> Any:
    from lightning import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.network(inputs), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)

    return Regression()


def _fit(model: Any, callbacks: list[Any], folder: str, epochs: int, strategy: Any = "ddp", **options: Any) -> Any:
    from lightning import Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from torch.utils.data import DataLoader, TensorDataset

    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0")
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy if world_size > 1 else "auto",
        plugins=[TorchElasticEnvironment()] if world_size > 1 else None,
        callbacks=callbacks,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=False), **options)
    return trainer


@on_ranks(2, timeout=200)
def test_a_training_and_its_resumption(rank: int, world_size: int, tmp_path: Path) -> None:
    from fastsync.integrations.lightning import FastsyncCallback

    of_ddp, ours = _module(), _module()
    _fit(of_ddp, [], str(tmp_path), 2)
    callback = FastsyncCallback()
    assert callback.handle is None
    _fit(ours, [callback], str(tmp_path), 2)
    assert callback.handle.stats().num_steps == 12
    assert_all_bitwise_equal(list(ours.parameters()), list(of_ddp.parameters()), "parameter")

    at_once, with_pause, file = _module(), _module(), str(tmp_path / "checkpoint.ckpt")
    _fit(at_once, [FastsyncCallback("int8+ef")], str(tmp_path), 4)
    trainer = _fit(with_pause, [FastsyncCallback("int8+ef")], str(tmp_path), 2)
    trainer.save_checkpoint(file)
    kept = torch.load(file, weights_only=True)["callbacks"]["FastsyncCallback"]
    assert {name.rpartition(" of ")[2] for name in kept["residuals"]} == {"rank 0", "rank 1"}
    resumed, callback = _module(), FastsyncCallback("int8+ef")
    _fit(resumed, [callback], str(tmp_path), 4, ckpt_path=file)
    assert callback.handle.stats().num_steps == 12
    assert_all_bitwise_equal(list(resumed.parameters()), list(at_once.parameters()), "parameter")
    assert_same_on_all_ranks(list(resumed.parameters()))


@on_ranks(2, timeout=200)
def test_layers_that_are_unfrozen_on_the_way_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    """Else each rank would train its own: Lightning wraps the model once, before its first epoch."""
    from lightning.pytorch.callbacks import BaseFinetuning

    from fastsync.integrations.lightning import FastsyncCallback

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.network[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.network[0], optimizer)

    model = _module()
    with pytest.raises(RuntimeError, match=r"about to step network\.0\.weight, whose gradient no rank has averaged"):
        _fit(model, [Unfreeze(), FastsyncCallback()], str(tmp_path), 3)
    assert_same_on_all_ranks(list(model.parameters()))


def _weights_over(rank: int, world_size: int, backend: str, folder: str) -> list[Tensor]:
    from lightning.pytorch.strategies import DDPStrategy

    model = _module()
    _fit(model, [], folder, 1, DDPStrategy(process_group_backend=backend))
    assert dist.get_backend() == backend
    return [parameter.detach() for parameter in model.parameters()]


def test_the_backend_gives_the_bits_of_gloo(tmp_path: Path) -> None:
    ours, theirs = (
        run_ranks(_weights_over, 2, name, str(tmp_path), backend=name, timeout=200) for name in ("fastsync", "gloo")
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@on_ranks(1, timeout=200)
def test_one_rank_without_a_process_group(rank: int, world_size: int, tmp_path: Path) -> None:
    from fastsync.integrations.lightning import FastsyncCallback

    dist.destroy_process_group()
    folder, model, callback = str(tmp_path), _module(), FastsyncCallback("fp16")
    _fit(model, [callback], folder, 1)
    _fit(model, [callback], folder, 1)  # the same model once more
    assert callback.handle.stats().num_steps == 12
    assert isinstance(callback.handle, GradientSynchronizer)
    callback = FastsyncCallback("int8+ef")
    for is_known in (False, True, False):
        if not is_known:
            model = _module()
        with patch.object(GradientSynchronizer, "load_state_dict") as loaded:
            _fit(model, [callback], folder, 1)
        assert loaded.called == is_known, "a model goes on with its residuals, and another one has none"
        assert len(callback.state_dict()["residuals"]) > 0


@pytest.mark.parametrize("is_manual", [False, True])
@on_ranks(2, timeout=200)
def test_ranks_that_share_an_optimizer(rank: int, world_size: int, is_manual: bool, tmp_path: Path) -> None:
    """Lightning hands each step a closure: a backward, or one that does nothing."""
    from lightning import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    def trained(shares: bool) -> list[Tensor]:
        class Attached(type(_module())):  # type: ignore[misc]
            automatic_optimization = not is_manual

            def on_fit_start(self) -> None:
                sync = fastsync.attach(self.network)
                if shares:
                    fastsync.shard_optimizer(sync, self.optimizers())

            def training_step(self, batch: Any, index: int) -> Tensor:
                loss = super().training_step(batch, index)
                if is_manual:
                    self.optimizers().zero_grad()
                    self.manual_backward(loss)
                    self.optimizers().step()
                return loss

        model = Attached()
        inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(rank))
        data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        Trainer(accelerator="cpu", devices=1, max_epochs=2, default_root_dir=str(tmp_path), **quiet).fit(model, data)
        return [parameter.detach().clone() for parameter in model.parameters()]

    shared = trained(shares=True)
    assert_all_bitwise_equal(shared, trained(shares=False), "parameter")
    assert_same_on_all_ranks(shared)
