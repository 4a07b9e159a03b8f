"""Checkpoints load back, and a write that fails leaves the old one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastsync.ppo.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fastsync.ppo.config import Settings
from fastsync.ppo.policy import ActorCritic


def make_checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    policy = ActorCritic(4, 2, 8)
    optimizer = torch.optim.Adam(policy.parameters())
    policy.value(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    settings = Settings(seed=step, run_name="a run")
    return Checkpoint(policy.state_dict(), optimizer.state_dict(), {"scales": {"w": 0.5}}, settings, step)


def test_everything_loads_back(tmp_path: Path):
    path = tmp_path / "checkpoint.pt"
    saved = make_checkpoint(5)
    save_checkpoint(path, saved)
    loaded = load_checkpoint(path)
    assert loaded.step == 5
    assert loaded.config == saved.config
    assert loaded.sync == saved.sync
    torch.testing.assert_close(loaded.model, saved.model, rtol=0, atol=0)
    torch.testing.assert_close(loaded.optimizer["state"], saved.optimizer["state"], rtol=0, atol=0)
    assert loaded.optimizer["param_groups"] == saved.optimizer["param_groups"]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, make_checkpoint(1))

    def write_half_and_fail(content: object, file: object) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", write_half_and_fail)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, make_checkpoint(2))
    assert load_checkpoint(path).step == 1
