"""The learning loop: collect, estimate advantages, update, tell; the same on every rank."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from fastsync.distributed import check_consistency
from fastsync.ppo.advantages import estimate_advantages, normalize_over_ranks
from fastsync.ppo.checkpoint import Checkpoint, save_checkpoint
from fastsync.ppo.config import Settings
from fastsync.ppo.envs import make_envs, space_sizes
from fastsync.ppo.gradient_sync import make_gradient_sync
from fastsync.ppo.metrics import EpisodeWindow, TrainResult, mean_over_ranks, mean_sync_report
from fastsync.ppo.policy import ActorCritic
from fastsync.ppo.report import RunReport, Status
from fastsync.ppo.rollout import RolloutCollector
from fastsync.ppo.update import LOGGED, Batch, row_weights, update


def rank_generator(seed: int, rank: int, device: torch.device) -> torch.Generator:
    """A source of randomness of this rank's own: no two pairs of seed and rank give the same stream."""
    return torch.Generator(device).manual_seed(
        int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])
    )


def train(settings: Settings, device: torch.device) -> tuple[ActorCritic, TrainResult]:
    """Trains a policy with PPO. Every rank of the default process group must call it with the same settings.

    Rank 0 shows progress and writes TensorBoard log, learning curve and checkpoint into the run's folder.

    Returns:
        The trained policy, the same on every rank, and how the run ended.

    Raises:
        ValueError: an unsupported environment, or a run folder that exists already.
        RuntimeError: a rank was lost, or the ranks' weights differ at the end.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    generator = rank_generator(settings.seed, rank, device)

    envs = make_envs(settings.env, settings.num_envs)
    policy = ActorCritic(*space_sizes(envs), settings.hidden_size).to(device)
    sync = make_gradient_sync(settings, policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)
    collector = RolloutCollector(
        envs,
        policy,
        num_steps=settings.num_steps,
        seed=settings.seed + rank * settings.num_envs,
        generator=generator,
    )
    window = EpisodeWindow(device)

    threshold = envs.spec.reward_threshold if envs.spec else None
    with closing(envs), RunReport(settings, world_size, threshold) if rank == 0 else nullcontext() as report:
        dist.barrier()  # rank 0 has taken its time to open the report
        step = 0
        started = time.perf_counter()
        while step < settings.total_steps:
            if settings.anneal_lr:
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * (1 - step / settings.total_steps)

            rollout = collector.collect()
            advantages = estimate_advantages(
                rollout.rewards,
                rollout.values,
                rollout.terminated,
                rollout.done,
                gamma=settings.gamma,
                gae_lambda=settings.gae_lambda,
            )
            normalized, num_valid = normalize_over_ranks(advantages, rollout.valid)
            weights = row_weights(
                rollout.valid, num_valid, world_size=world_size, num_minibatches=settings.num_minibatches
            )
            batch = Batch(
                observations=rollout.observations.flatten(0, 1),
                actions=rollout.actions.flatten(),
                log_probs=rollout.log_probs.flatten(),
                advantages=normalized.flatten(),
                returns=(advantages + rollout.values[:-1]).flatten(),
                weights=weights.flatten(),
            )
            logged = update(sync, optimizer, batch, settings, generator)

            step += int(num_valid)
            window.extend(rollout.episodes)
            metrics = mean_over_ranks(dict(zip(LOGGED, logged.tolist(), strict=True)), device)
            if report:
                report.update(Status(step, time.perf_counter() - started, window, metrics))
        seconds = time.perf_counter() - started

        check_consistency(policy)
        result = TrainResult(step, seconds, window.returns, mean_sync_report(sync.report(), device))
        if report:
            checkpoint = Checkpoint(policy.state_dict(), optimizer.state_dict(), sync.state_dict(), settings, step)
            save_checkpoint(report.folder / "checkpoint.pt", checkpoint)
            report.finish(result)
    return policy, result
