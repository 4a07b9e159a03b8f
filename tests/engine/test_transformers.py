"""The callback for Hugging Face's Trainer: a training that is resumed goes on as one that was not interrupted."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import assert_all_bitwise_equal, assert_same_on_all_ranks
from tests.ranks import on_ranks

pytestmark = pytest.mark.end_to_end
pytest.importorskip("transformers", exc_type=ImportError)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels)}


def _train(
    folder: str, steps: int, resume: str | None = None, compression: str = "int8+ef"
) -> tuple[Regression, list[str]]:
    from transformers import Trainer, TrainingArguments

    from fastsync.integrations.transformers import FastsyncCallback

    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(7))
    data = [{"inputs": each, "labels": each.sin().sum(dim=0, keepdim=True)} for each in inputs]
    model = Regression()
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    options = {"save_steps": 3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 8}
    arguments = TrainingArguments(folder, max_steps=steps, ddp_find_unused_parameters=False, **options, **quiet)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(FastsyncCallback(trainer, compression))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    return model, [str(each.message) for each in caught if "without the residuals" in str(each.message)]


def _as_under_torchrun(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0")


@on_ranks(2, timeout=200)
def test_a_training_that_is_resumed(rank: int, world_size: int, tmp_path: Path) -> None:
    _as_under_torchrun(rank, world_size)
    at_once, _ = _train(str(tmp_path / "at once"), 6)
    folder, elsewhere = str(tmp_path / "with pause"), tmp_path / "elsewhere"
    _train(folder, 3)
    dist.barrier()
    if rank == 0:
        shutil.copytree(f"{folder}/checkpoint-3", elsewhere)
    dist.barrier()
    resumed, warned = _train(folder, 6, f"{folder}/checkpoint-3")
    assert warned == []
    assert_all_bitwise_equal(list(resumed.parameters()), list(at_once.parameters()), "parameter")
    assert_same_on_all_ranks(list(resumed.parameters()))
    _, warned = _train(str(tmp_path / "other"), 4, str(elsewhere))
    assert len(warned) == 1


@on_ranks(2, timeout=200)
def test_a_training_that_is_resumed_on_more_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """The second rank is new: it has no state."""
    _as_under_torchrun(rank, world_size)
    folder = tmp_path / "with scales"
    _train(str(folder), 3)
    dist.barrier()
    if rank == 1:
        (folder / "checkpoint-3" / "fastsync_1.pt").unlink()
    dist.barrier()
    resumed, (warned,) = _train(str(folder), 6, f"{folder}/checkpoint-3")
    assert "ranks [1] have no state" in warned
    assert_same_on_all_ranks(list(resumed.parameters()))
    folder = tmp_path / "without"
    _train(str(folder), 3, compression="none")
    dist.barrier()
    assert not list(folder.glob("checkpoint-3/fastsync_*"))
    _, warned = _train(str(folder), 6, f"{folder}/checkpoint-3", compression="none")
    assert warned == []
