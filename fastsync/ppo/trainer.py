"""The learning loop: collect, learn, tell, save; the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastsync.distributed import check_consistency
from fastsync.launch.signals import StopSignals
from fastsync.ppo.config import Settings
from fastsync.ppo.envs.interface import begun_anew, redistribute
from fastsync.ppo.envs.make import TRIAL_SECONDS, Environments, make_environments, try_environments
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.learner import Learner
from fastsync.ppo.objective import LOSSES
from fastsync.ppo.policy import ActorCritic, make_policy
from fastsync.ppo.random_streams import RandomStreams
from fastsync.ppo.rollout import RolloutCollector
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import CHECKPOINTS, check_room, close_run, open_run
from fastsync.ppo.runs.metrics import (
    EpisodeWindow,
    PhaseTimes,
    RankReport,
    Status,
    TrainResult,
    gather_reports,
    gpu_use,
    mean,
    mean_sync_report,
)
from fastsync.ppo.runs.report import RunReport
from fastsync.ppo.update import autocast

Found = TypeVar("Found")


def train(settings: Settings, device: torch.device) -> tuple[ActorCritic, TrainResult]:
    """Trains a policy with PPO. Every rank of the default process group must call it with the same settings.

    Rank 0 shows progress and writes logs, learning curve and checkpoints into the run's folder. SIGTERM or SIGUSR1 on
    any rank ends the run in order on all of them after the update they are in, with a checkpoint.

    Returns:
        The policy, the same on every rank, and how the run ended.

    Raises:
        ValueError: an unsupported environment, a run folder that exists already or has no room, or a run that cannot be
            gone on with.
        RuntimeError: a rank was lost, or the ranks' weights differ at the end.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder, checkpoint, notes = _by_rank_0(lambda: open_run(settings, world_size))
    resumed_step = checkpoint.step if checkpoint else 0
    # One rank tries, before the others give up: if each did, not all might come to the same answer.
    trial = _by_rank_0(lambda: try_environments(settings, min(TRIAL_SECONDS, settings.timeout / 4)))
    with (
        make_environments(settings, rank=rank, restart=resumed_step, is_restorable=trial.is_restorable) as environments,
        StopSignals() as signals,
    ):
        run = Run(settings, environments, device, rank=rank, world_size=world_size)
        if checkpoint:
            notes += run.resume(checkpoint)
        if trial.note:
            lost = ": if the run is resumed, their episodes begin anew, and it is not bitwise what it would have been"
            notes.append(trial.note if trial.is_restorable else f"environments cannot be saved ({trial.note}){lost}")
        with ExitStack() as stack:
            report = None
            if rank == 0:
                # The least that a checkpoint takes: Adam has two moments of each weight.
                check_room(folder, 3 * sum(parameter.nbytes for parameter in run.policy.parameters()))
                report = RunReport(
                    folder,
                    settings,
                    world_size,
                    environments.reward_threshold,
                    resumed_step=resumed_step,
                    resumed_seconds=run.seconds,
                    notes=notes,
                )
                stack.enter_context(report)
            dist.barrier()  # rank 0 has taken its time to open the report
            result = run.train(signals, report, CheckpointFolder(folder / CHECKPOINTS, settings.keep_checkpoints))
            if rank == 0:
                close_run(folder)
    return run.policy, result


class Run:
    """A training that goes on from update to update, as one rank sees it."""

    def __init__(
        self, settings: Settings, environments: Environments, device: torch.device, *, rank: int, world_size: int
    ) -> None:
        self._settings = settings
        self._environments = environments
        self._device = device
        self._rank = rank
        self._world_size = world_size
        torch.manual_seed(settings.seed)
        streams = RandomStreams(
            settings.seed, first_index=environments.first_index, num_envs=environments.num_envs, device=device
        )
        policy = make_policy(settings, environments.single_observation_space, environments.single_action_space)
        self.policy = policy.to(device)
        self._exchange = Exchange(device)
        self._learner = Learner(settings, self.policy, streams, self._exchange, world_size=world_size)
        self._collector = RolloutCollector(environments, self.policy, num_steps=settings.num_steps, streams=streams)
        self._window = EpisodeWindow()
        self._step = 0
        self._update = 0
        self.seconds = 0.0
        """Wall time of the learning loop, with what came before where the run was resumed."""
        self._telling_seconds = 0.0
        self._reporting_seconds = 0.0

    def train(self, signals: StopSignals, report: RunReport | None, checkpoints: CheckpointFolder) -> TrainResult:
        """Trains until the end, or until a rank is told to stop; then rank 0, which has a report, saves."""
        started = time.perf_counter() - self.seconds
        saved_at = time.perf_counter()
        stopped = False
        while self._step < self._settings.total_steps and not stopped:
            mine = self._advance()
            is_due = time.perf_counter() - saved_at >= self._settings.checkpoint_interval
            mine = replace(mine, stop_requested=signals.requested, checkpoint_due=self._rank == 0 and is_due)
            reports = self._tell(mine)
            told_at = time.perf_counter()
            self.seconds = told_at - started
            _check_finite(reports, self._update)
            stopped = any(each.stop_requested for each in reports)
            if report:
                report.update(Status(self._step, self.seconds, self._update, self._window, reports))
            is_over = stopped or self._step >= self._settings.total_steps
            if is_over or reports[0].checkpoint_due:
                self._save(checkpoints)
                saved_at = time.perf_counter()
            self._reporting_seconds = time.perf_counter() - told_at  # the next report tells, for this one is sent

        check_consistency(self.policy)
        sync = mean_sync_report(self._learner.sync.report(), self._device)
        stopped_by = None
        if self._step < self._settings.total_steps:
            stopped_by = signals.received.name if signals.received else "a signal to another rank"
        result = TrainResult(self._step, self.seconds, self._window.returns, sync, stopped_by)
        if report:
            report.finish(result)
        return result

    def resume(self, checkpoint: Checkpoint) -> list[str]:
        """Goes on from a checkpoint, also from one of another number of ranks.

        Returns:
            What could not go on exactly, in sentences.
        """
        self._step, self._update, self.seconds = checkpoint.step, checkpoint.update, checkpoint.seconds
        self._window = EpisodeWindow.from_list(checkpoint.window)
        # Each rank's own: of no use to other ranks.
        residuals = [part.get("residuals", {}) for part in checkpoint.environments]
        goes_on = checkpoint.world_size == self._world_size
        self._learner.load_state_dict(checkpoint.learner, residuals[self._rank] if goes_on else {})
        environments = self._environments
        states = [part["environments"] for part in checkpoint.environments]
        spread = {"world_size": self._world_size, "num_envs": environments.num_envs}
        mine, said = redistribute(states, rank=self._rank, **spread)
        if mine is None:
            observations, restored = environments.reset(), np.zeros(environments.num_envs, dtype=np.bool_)
        else:
            observations, restored = environments.restore(mine), environments.restored
        saved = [part["columns"] for part in checkpoint.environments]
        columns = _columns_for(saved, environments.first_index, torch.from_numpy(restored))
        self._collector.restore(observations, columns)
        self._learner.load_environment_state(columns)
        begun = self._exchange.all_gather(environments.begun_anew if mine is not None else [])
        notes = [said, begun_anew(number for of_rank in begun for number in of_rank)]
        if any(residuals) and not goes_on:
            notes.append("what error feedback had not sent yet is left out, as it belongs to other ranks")
        return [note for note in notes if note]

    def _advance(self) -> RankReport:
        """One rollout and the learning from it, and what this rank has to tell about them."""
        with autocast(self._settings.precision, self._device):
            rollout = self._collector.collect()
        before = self._learner.sync.report()
        waited_before = self._learner.waiting_seconds()
        began = time.perf_counter()
        num_steps, metrics = self._learner.learn(rollout, step=self._step, update=self._update)
        seconds = time.perf_counter() - began
        after = self._learner.sync.report()
        synced = _difference(after.exposed_seconds, before.exposed_seconds)
        waited = self._learner.waiting_seconds() - waited_before + synced
        self._step += num_steps
        self._update += 1
        return RankReport(
            times=PhaseTimes(
                environment=rollout.environment_seconds,
                policy=rollout.policy_seconds,
                learning=seconds - (0.0 if math.isnan(waited) else waited),
                communication=waited + self._telling_seconds,
                reporting=self._reporting_seconds,
            ),
            wire_bytes=_difference(after.wire_bytes, before.wire_bytes),
            gpu=gpu_use(self._device),
            episodes=rollout.episodes,
            metrics=metrics,
        )

    def _tell(self, mine: RankReport) -> list[RankReport]:
        """Exchanges the reports of all ranks."""
        began = time.perf_counter()
        reports = gather_reports(mine, self._exchange)
        self._telling_seconds = time.perf_counter() - began  # of the next update, for this one's are told
        self._window.extend(reports)
        return reports

    def _save(self, checkpoints: CheckpointFolder) -> None:
        """Writes a checkpoint, on rank 0, of what all ranks know."""
        mine = {
            "environments": self._environments.state(),
            "columns": self._columns(),
            "residuals": self._learner.sync.residuals(),
        }
        of_rank: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(mine, of_rank)
        if of_rank is None:
            return
        checkpoint = Checkpoint(
            settings=self._settings,
            world_size=self._world_size,
            step=self._step,
            update=self._update,
            seconds=self.seconds,
            learner=self._learner.state_dict(),
            environments=of_rank,
            window=self._window.to_list(),
        )
        checkpoints.save(checkpoint, mean(self._window.returns))

    def _columns(self) -> dict[str, Tensor]:
        """Returns what policy and learner keep for each environment of this rank, one row each."""
        return self._collector.state() | self._learner.environment_state()


def _by_rank_0(find: Callable[[], Found]) -> Found:
    """Has rank 0 find something out, and tells all ranks."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _columns_for(saved: Sequence[dict[str, Tensor]], first: int, restored: Tensor) -> dict[str, Tensor]:
    """Picks the rows of this rank's environments out of those of all ranks; where an episode begins, those of a start.

    Args:
        saved: of each rank of the run before, in rank order.
        first: number of this rank's first environment among all.
        restored: [N] bool: where the environment goes on.
    """
    columns = {}
    for name in saved[0]:
        rows = torch.cat([part[name] for part in saved])[first : first + len(restored)]
        column = torch.zeros(len(restored), *rows.shape[1:], dtype=rows.dtype)
        known = restored[: len(rows)]
        column[: len(rows)][known] = rows[known]
        columns[name] = column
    columns["starts"] |= ~restored
    return columns


def _check_finite(reports: Sequence[RankReport], update: int) -> None:
    """Refuses nan: what learns from it is lost, and must not be saved over what was good.

    Raises:
        RuntimeError: on every rank alike.
    """
    for rank, report in enumerate(reports):
        if not report.metrics["optimizer_steps"]:
            continue  # nothing is lost, as while a GradScaler finds its scale
        lost = [name for name in LOSSES if not math.isfinite(report.metrics[name])]
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} of rank {rank} in update {update} are not finite: are there nan or inf in the "
                "environment's rewards or observations, or is learning_rate too high? Older checkpoints are kept"
            )


def _difference(after: float | None, before: float | None) -> float:
    """NaN where it was not measured."""
    return math.nan if after is None or before is None else after - before
