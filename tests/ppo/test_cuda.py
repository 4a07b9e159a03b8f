"""The trainer on a GPU: the update loop waits for nothing, a run ends and goes on, precision 16 bits wide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.ppo import PPO, Settings, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stops early": {"target_kl": 1e-3, "num_micro_batches": 2},
    "adaptive": {"target_kl": 0.01, "lr_schedule": "adaptive", "precision": "bf16"},
    "scaled": {"precision": "fp16", "target_kl": 0.01, "compression": "fp16"},
    "continuous": {"env": "Pendulum-v1", "norm_observations": True, "norm_rewards": True},
}


def update_without_waiting(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for changes in KINDS.values():
        settings = replace(Settings(num_envs=8, num_steps=16, num_epochs=2), **changes)
        with make_environments(settings, rank=rank) as environments:
            ppo = PPO(settings, [environments], device)
            ppo.learn(ppo.collect())  # agreements and first allocations
            take_step = ppo._take_step

            def watched(*arguments: Any, take_step: Any = take_step) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return take_step(*arguments)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            ppo._take_step = watched  # type: ignore[method-assign]
            ppo.learn(ppo.collect())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_step_waits_for_nothing(world_size: int) -> None:
    run_ranks(update_without_waiting, world_size, backend="cpu:gloo,cuda:nccl")


def train_and_go_on(rank: int, world_size: int, runs_dir: str) -> list[tuple[int, dict[str, Tensor]]]:
    device = torch.device("cuda", torch.cuda.current_device())
    outcomes = []
    for name, changes in KINDS.items():
        settings = replace(
            Settings(total_steps=1_000, num_envs=4, num_steps=16, num_epochs=2, resume="auto", runs_dir=runs_dir),
            run_name=name,
            **changes,
        )
        train(settings, device)
        policy, result = train(replace(settings, total_steps=2_000), device)
        outcomes.append((result.step, {key: value.cpu() for key, value in policy.state_dict().items()}))
    return outcomes


def test_runs_on_gpus_go_on_and_end_with_the_same_weights(tmp_path: Path) -> None:
    first, second = run_ranks(train_and_go_on, 2, str(tmp_path), backend="cpu:gloo,cuda:nccl")
    for (step, weights), (other_step, others) in zip(first, second, strict=True):
        assert 2_000 <= step == other_step
        for key, weight in weights.items():
            assert weight.isfinite().all()
            assert torch.equal(weight, others[key])
    for file in tmp_path.glob("*/checkpoints/step-*.pt"):  # without a GPU they could be read, too
        of_run = torch.load(file, weights_only=True)
        assert {each.device.type for each in tree_leaves(of_run) if isinstance(each, Tensor)} == {"cpu"}
