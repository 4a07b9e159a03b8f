"""What surrounds a training on each rank: the run's folder, environments, signals, reports, checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastsync.distributed import check_consistency, process_group
from fastsync.launch.signals import StopSignals
from fastsync.ppo.envs.interface import Environments, begun_anew, redistribute
from fastsync.ppo.envs.make import TRIAL_SECONDS, make_environments, try_environments
from fastsync.ppo.fused import FIGURES
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
from fastsync.ppo.settings import RunSettings

Found = TypeVar("Found")


def use_threads(settings: RunSettings) -> None:
    """Lets torch compute with as many threads as the settings say."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does: more threads gain nothing on networks this small, and cost much where a core is busy.
        torch.set_num_threads(1)


@contextmanager
def open_session(settings: RunSettings, device: torch.device | None) -> Iterator[Session]:
    """Opens what a training needs, for the time of a ``with`` block. Every rank must call it.

    Raises:
        ValueError: an unsupported environment, a run folder that exists already, or a run that cannot be gone on with.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            use_threads(settings)
        chosen = stack.enter_context(process_group(settings.timeout))
        folder, checkpoint, notes = _by_rank_0(lambda: open_run(settings, dist.get_world_size()))
        # One rank tries, before the others give up: if each did, not all might come to the same answer.
        trial = _by_rank_0(lambda: try_environments(settings, min(TRIAL_SECONDS, settings.timeout / 4)))
        if trial.note:
            lost = ": if the run is resumed, their episodes begin anew, and it is not bitwise what it would have been"
            notes.append(trial.note if trial.is_restorable else f"environments cannot be saved ({trial.note}){lost}")
        environments = make_environments(
            settings,
            rank=dist.get_rank(),
            restart=checkpoint.step if checkpoint else 0,
            is_restorable=trial.is_restorable,
        )
        stack.enter_context(environments)
        signals = stack.enter_context(StopSignals())
        yield Session(settings, environments, device or chosen, signals, stack, folder, checkpoint, notes)
        if dist.get_rank() == 0:
            close_run(folder)


class Session:
    """A training in its run's folder, as one rank sees it. Rank 0 tells and saves."""

    def __init__(
        self,
        settings: RunSettings,
        environments: Environments,
        device: torch.device,
        signals: StopSignals,
        stack: ExitStack,
        folder: Any,
        checkpoint: Checkpoint | None,
        notes: list[str],
    ) -> None:
        self.environments, self.device = environments, device
        self._settings, self._signals, self._stack, self._notes = settings, signals, stack, notes
        self._folder, self._checkpoint = folder, checkpoint
        self._checkpoints = CheckpointFolder(folder / CHECKPOINTS, settings.keep_checkpoints)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._window = EpisodeWindow()
        self._seconds = self._telling_seconds = self._reporting_seconds = 0.0
        self._is_stopped = False
        self._report: RunReport | None = None

    def begin(self, ppo: Any, note: str) -> None:
        """Goes on from the run's checkpoint, if there is one, and says what is to be said.

        Args:
            ppo: a ``ppo.PPO``.
            note: to say, too.
        """
        self._ppo = ppo
        if self._checkpoint:
            self._notes += self._resume(self._checkpoint)
        if self._rank == 0:
            # The least that a checkpoint takes: Adam has two moments of each weight.
            check_room(self._folder, 3 * sum(parameter.nbytes for parameter in ppo.policy.parameters()))
            self._report = RunReport(
                self._folder,
                self._settings,
                self._world_size,
                self.environments.reward_threshold,
                resumed_step=ppo.step,
                resumed_seconds=self._seconds,
                notes=[*self._notes, note],
            )
            self._stack.enter_context(self._report)
        dist.barrier()  # rank 0 has taken its time to open the report
        self._started = time.perf_counter() - self._seconds
        self._saved_at = time.perf_counter()
        self._before = ppo.sync.report(), 0.0

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or a rank was told to stop."""
        return self._is_stopped or self._ppo.step >= self._settings.total_steps

    def tell(self, rollout: Any, figures: dict[str, float]) -> None:
        """Exchanges, shows and logs what came of an update, and saves where it is time to. Every rank must call it."""
        began = time.perf_counter()
        is_due = began - self._saved_at >= self._settings.checkpoint_interval
        mine = RankReport(
            times=self._times(rollout, began),
            wire_bytes=self._wire_bytes,
            gpu=gpu_use(self.device),
            episodes=rollout.episodes,
            metrics={f"learning/{name}": value for name, value in figures.items()}
            | {f"info/{name}": value for name, value in rollout.infos.items()},
            stop_requested=self._signals.requested,
            checkpoint_due=self._rank == 0 and is_due,
        )
        reports = gather_reports(mine, self._ppo.exchange)
        self._window.extend(reports)
        told_at = time.perf_counter()
        self._telling_seconds = told_at - began  # of the next update, for this one's are told
        self._seconds = told_at - self._started
        _check_finite(reports, self._ppo.update)
        self._is_stopped = any(each.stop_requested for each in reports)
        if self._report:
            self._report.update(Status(self._ppo.step, self._seconds, self._ppo.update, self._window, reports))
        if self.is_over or reports[0].checkpoint_due:
            self._save()
            self._saved_at = time.perf_counter()
        self._reporting_seconds = time.perf_counter() - told_at  # the next report tells, for this one is sent

    def finish(self) -> TrainResult:
        """Compares the ranks' weights, and tells how the run ended."""
        check_consistency(self._ppo.policy)
        stopped_by = None
        if self._ppo.step < self._settings.total_steps:
            stopped_by = self._signals.received.name if self._signals.received else "a signal to another rank"
        sync = mean_sync_report(self._ppo.sync.report(), self.device)
        result = TrainResult(self._ppo.step, self._seconds, self._window.returns, sync, stopped_by)
        if self._report:
            self._report.finish(result)
        return result

    def _times(self, rollout: Any, now: float) -> PhaseTimes:
        """Of the update that has ended now."""
        before, waited_before = self._before
        report, waited_so_far = self._ppo.sync.report(), self._ppo.waiting.seconds()
        self._before = report, waited_so_far
        self._wire_bytes = report.wire_bytes - before.wire_bytes
        waited = waited_so_far - waited_before + report.exposed_seconds - before.exposed_seconds
        return PhaseTimes(
            environment=rollout.environment_seconds,
            policy=rollout.policy_seconds,
            learning=now - rollout.ended - waited,
            communication=waited + self._telling_seconds,
            reporting=self._reporting_seconds,
        )

    def _save(self) -> None:
        """Writes a checkpoint, on rank 0, of what all ranks know."""
        ppo = self._ppo
        mine = {
            "environments": self.environments.state(),
            "columns": _columns(ppo),
            "residuals": ppo.sync.residuals(),
        }
        of_rank: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(mine, of_rank)
        if of_rank is None:
            return
        learner = {name: part.state_dict() for name, part in _parts(ppo).items()}
        checkpoint = Checkpoint(
            settings=self._settings.as_dict(),
            world_size=self._world_size,
            step=ppo.step,
            update=ppo.update,
            seconds=self._seconds,
            learner=learner | {"num_draws": ppo.streams.num_draws},
            environments=of_rank,
            window=self._window.to_list(),
        )
        self._checkpoints.save(checkpoint, mean(self._window.returns))

    def _resume(self, checkpoint: Checkpoint) -> list[str]:
        """Goes on, also after another number of ranks, and returns what could not go on exactly, in sentences."""
        ppo, environments = self._ppo, self.environments
        ppo.step, ppo.update, self._seconds = checkpoint.step, checkpoint.update, checkpoint.seconds
        self._window = EpisodeWindow.from_list(checkpoint.window)
        # Each rank's own: of no use to other ranks.
        residuals = [part.get("residuals", {}) for part in checkpoint.environments]
        goes_on = checkpoint.world_size == self._world_size
        for name, part in _parts(ppo).items():
            state = checkpoint.learner.get(name)
            if name == "sync" and state:
                part.load_state_dict(state, residuals[self._rank] if goes_on else {})
            elif state:
                part.load_state_dict(state)
        for group in ppo.optimizer.param_groups:
            group["lr"] = group["lr"].to(self.device)
        ppo.streams.num_draws = checkpoint.learner["num_draws"]
        states = [part["environments"] for part in checkpoint.environments]
        num_envs = environments.num_envs
        mine, said = redistribute(states, rank=self._rank, world_size=self._world_size, num_envs=num_envs)
        if mine is None:
            ppo.collector.next_observation, restored = environments.reset(), np.zeros(num_envs, dtype=np.bool_)
        else:
            ppo.collector.next_observation, restored = environments.restore(mine), environments.restored
        saved = [part["columns"] for part in checkpoint.environments]
        _load_columns(ppo, _columns_for(saved, environments.first_index, torch.from_numpy(restored)))
        begun = ppo.exchange.all_gather(environments.begun_anew if mine is not None else [])
        notes = [said, begun_anew(number for of_rank in begun for number in of_rank)]
        if any(residuals) and not goes_on:
            notes.append("what error feedback had not sent yet is left out, as it belongs to other ranks")
        return [note for note in notes if note]


def _parts(ppo: Any) -> dict[str, Any]:
    """What a resumed run needs to go on as if it had not stopped; the same on every rank."""
    parts = {"model": ppo.policy, "optimizer": ppo.optimizer, "scaler": ppo.scaler, "sync": ppo.sync}
    parts |= {"learning_rate": ppo.learning_rate}
    return parts if ppo.reward_normalizer is None else parts | {"rewards": ppo.reward_normalizer}


def _columns(ppo: Any) -> dict[str, Tensor]:
    """What goes on into the next rollout besides the environments: one row an environment, on the CPU."""
    columns = {"starts": torch.from_numpy(ppo.collector.next_starts.copy())}
    if ppo.collector.memory is not None:
        columns["hidden"], columns["cell"] = (part.cpu() for part in ppo.collector.memory)
    if ppo.reward_normalizer is not None:
        columns["discounted_return"] = ppo.reward_normalizer.carried.cpu()
    return columns


def _load_columns(ppo: Any, columns: dict[str, Tensor]) -> None:
    ppo.collector.next_starts = columns["starts"].numpy().copy()
    if ppo.collector.memory is not None:
        ppo.collector.memory = tuple(columns[name].to(ppo.device) for name in ("hidden", "cell"))
    if ppo.reward_normalizer is not None and "discounted_return" in columns:
        ppo.reward_normalizer.carried.copy_(columns["discounted_return"])


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


def _by_rank_0(find: Callable[[], Found]) -> Found:
    """Has rank 0 find something out, and tells all ranks."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _check_finite(reports: Sequence[RankReport], update: int) -> None:
    """Refuses nan: what learns from it is lost, and must not be saved over what was good.

    Raises:
        RuntimeError: on every rank alike.
    """
    for rank, report in enumerate(reports):
        if not report.metrics["learning/optimizer_steps"]:
            continue  # nothing is lost, as while a GradScaler finds its scale
        lost = [name for name in FIGURES if not math.isfinite(report.metrics.get(f"learning/{name}", 0.0))]
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} of rank {rank} in update {update} are not finite: are there nan or inf in the "
                "environment's rewards or observations, or is learning_rate too high? Older checkpoints are kept"
            )
