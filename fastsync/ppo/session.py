"""Everything around the algorithm on each rank: the run's folder, environments, signals, reports, checkpoints."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gymnasium import Space

from .._torch_compat import tree_map_only
from ..distributed import process_group
from ..launch.environment import threads_of_rank
from ..launch.signals import StopSignals
from ..printable import printing_what_can_be
from ..sync.compression import Auto
from ..sync.consistency import check_consistency
from ..sync.stats import SyncStats
from .before_update import Before
from .envs.interface import Environments, Episode
from .envs.make import make_environments
from .evaluation import Evaluator, kept_generators
from .fused import METRICS, what_ran
from .runs.checkpoints import BEST, Checkpoint, CheckpointFolder, kinds_of
from .runs.console import RunConsole, hints
from .runs.folder import CHECKPOINTS, Opened, learns_otherwise, locked, open_run
from .runs.loggers import open_loggers
from .runs.metrics import (
    WINDOW,
    PhaseTimes,
    RankReport,
    TrainResult,
    ended_episodes,
    gather_reports,
    in_order,
    mean,
    returns_of,
    scalars_of,
    spread,
)
from .runs.rank_output import output_kept_apart
from .runs.usage import UsageMeter
from .settings import RunSettings
from .survivors import Result, Survivors, survivors_of


@contextmanager
def open_session(settings: RunSettings, device: torch.device | None) -> Iterator[Session]:
    """Opens a training's session for a ``with`` block. Every rank must call it.

    Raises:
        ValueError: the environment is not supported, the run folder exists already, or the run cannot be resumed. Or
            the device is not of the settings' kind, or ranks cannot go on without others here.
    """
    if device is not None and settings.device not in ("auto", device.type):
        raise ValueError(f"device={str(device)!r}, but the settings have device={settings.device!r}; leave one out")
    with ExitStack() as stack:
        stack.enter_context(printing_what_can_be())
        if threads_of_rank() is None:  # as under torchrun: more threads gain nothing on small networks
            torch.set_num_threads(1)
        chosen = stack.enter_context(process_group(settings.timeout, backend=settings.backend))
        survivors = survivors_of(settings, device or chosen)
        if survivors is not None:
            stack.enter_context(survivors.starting())
        opened = [stack.enter_context(open_run(settings, dist.get_world_size())) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(opened)
        assert opened[0] is not None
        folder, checkpoint, _ = opened[0]
        here = Path.cwd()  # an environment may leave it
        apart = stack.enter_context(ExitStack())
        if dist.get_rank() > 0 and not settings.quiet:
            apart.enter_context(output_kept_apart(here / folder / f"rank{dist.get_rank()}.log"))
        restart = checkpoint.step if checkpoint else 0
        of_part = replace(settings, num_envs=settings.envs_together, micro_batches=None)
        environments = [
            stack.enter_context(make_environments(of_part, rank=part, restart=restart, device=device or chosen))
            for part in settings.parts_of(dist.get_rank(), dist.get_world_size())
        ]
        signals = stack.enter_context(StopSignals())
        yield Session(settings, environments, device or chosen, signals, stack, opened[0], here, survivors, apart)


class Session:
    """One rank's side of a training in its run's folder. Rank 0 prints, logs and saves.

    If rank 0 is lost, and the others go on, the first of them does so.
    """

    def __init__(
        self, settings: RunSettings, environments: Sequence[Environments], device: torch.device, signals: StopSignals,
        stack: ExitStack, opened: Opened, here: Path, survivors: Survivors | None = None,
        apart: ExitStack | None = None,
    ) -> None:  # fmt: skip
        self.environments, self.device = environments, device
        self._settings, self._signals, self._stack = settings, signals, stack
        self._survivors = survivors
        self._apart = apart  # keeps what this rank prints out of rank 0's terminal
        self._shown_folder, self._checkpoint, self._notes = opened
        self._folder = here / self._shown_folder
        self._best_return = _best_so_far(self._checkpoint, settings)
        self._checkpoints = CheckpointFolder(self._folder / CHECKPOINTS, settings.keep_checkpoints, self._best_return)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._evaluator: Evaluator | None = None
        if settings.eval_interval:
            self._evaluator = Evaluator(settings, environments[0])
            with kept_generators(device):  # making an environment seeds what the user's code may draw from
                self._evaluator.check()
        self._usage = UsageMeter(self.device)
        self._last_episodes = deque[Episode](maxlen=WINDOW)
        # After a change of settings the last episodes are those of a policy that learnt otherwise. They count for
        # nothing in the choice of the best checkpoint until as many new ones have ended.
        self._num_of_before = 0
        if self._checkpoint is not None:
            is_changed = learns_otherwise(self._checkpoint, settings)
            self._num_of_before = WINDOW if is_changed else self._checkpoint.num_of_before
        self._missing_infos = set(settings.log_info)  # that no environment has told so far
        self._seconds = self._gathering_seconds = self._reporting_seconds = self._evaluation_seconds = 0.0
        self._evaluated_step = 0
        self._is_stopped = False

    def begin(self, ppo: Any) -> None:
        """Resumes a ``ppo.PPO`` from the run's checkpoint, if there is one, and opens console and logs."""
        self._ppo = ppo
        if self._checkpoint:
            self._notes += self._resume(self._checkpoint)
        self._resumed_step, self._resumed_update, self._resumed_seconds = ppo.step, ppo.update, self._seconds
        before = self._checkpoint.evaluated_step if self._checkpoint else None
        self._evaluated_step = ppo.step if before is None else before  # a signal leaves out an evaluation that is due
        self._logged: tuple[int, dict[str, float]] | None = None  # the newest row of the logs
        self._logged_until = ppo.step  # the step of the row before
        if self._survivors is not None:
            self._ranks = self._survivors.ranks
            self._survivors.serve(self._go_on, lambda: ppo.sync._engine.take_failure())
        if self._rank == 0:
            self._open_console_and_logs()
            for sentence in self._notes:
                self._console.say(sentence)
            for sentence in self.environments[0].notes:
                (self._console.warn if sentence.startswith("warning:") else self._console.say)(sentence)
        gc.collect()  # in the loop, collecting the garbage of the start would take longer than an update
        # Rank 0 has taken time to open the logs. From here on the others go on if a rank is lost.
        self._on_all_ranks(lambda: ppo.exchange.all_gather([]))
        self._started = time.perf_counter() - self._seconds
        self._saved_at = time.perf_counter()
        self._before = _sync_stats(ppo), 0.0
        if self._is_done and self._rank == 0:
            self._console.say(
                f"nothing is left to do: the run has taken {ppo.step:,} steps; raise total_steps to go on"
            )
        if self._checkpoint is not None and self._lacks_only_evaluation(self._checkpoint):
            self._make_up_evaluation()

    def _open_console_and_logs(self) -> None:
        settings = self._settings
        ranks, step = self._world_size, self._ppo.step
        self._console = RunConsole(self._title(), settings.total_steps, step, ranks, quiet=settings.quiet)
        self._stack.callback(self._console.close)
        self._loggers = open_loggers(self._folder, settings, self._logged_until)
        for logger in self._loggers:
            self._stack.callback(logger.close)

    def _title(self) -> str:
        ranks = "1 rank" if self._world_size == 1 else f"{self._world_size} ranks"
        return f"{self._settings.env} on {ranks}, compression {self._settings.compression}"

    @property
    def is_over(self) -> bool:
        """Whether all is done, or a rank was asked to stop."""
        return self._is_stopped or self._is_done

    @property
    def _is_done(self) -> bool:
        """Whether all steps are done, and the evaluation after them. A stop may have left that out."""
        total = self._settings.total_steps
        return self._ppo.step >= total and (self._evaluator is None or self._evaluated_step >= total)

    def update(self, learn: Callable[[Any], dict[str, float]], rollouts: Sequence[Any]) -> None:
        """Learns from a rollout, and gathers, prints and logs the metrics. Saves a checkpoint if due.

        Every rank must call it.

        Args:
            learn: learns from the rollouts of all ranks, and returns metrics.
            rollouts: this rank's rollouts.
        """
        put_back = None if self._survivors is None else Before(self._ppo).put_back
        reports = self._on_all_ranks(lambda: self._gather(rollouts, learn(rollouts)), put_back)
        gathered_at = time.perf_counter()
        self._gathering_seconds = gathered_at - self._gathering_since  # counted in the next update: the report is sent
        ended = ended_episodes(reports)
        self._last_episodes.extend(ended)
        self._num_of_before = max(0, self._num_of_before - len(ended))
        self._seconds = gathered_at - self._started
        _check_finite(reports, self._ppo.update)
        self._is_stopped = any(each.stop_requested for each in reports)
        evaluation, is_best = self._evaluate()
        evaluated_at = time.perf_counter()
        self._evaluation_seconds = evaluated_at - gathered_at  # counted in the next update, too
        if self._rank == 0 or self._survivors is not None:
            step, speed = self._ppo.step, self._speed(self._ppo.step, self._seconds)
            scalars = scalars_of(self._ppo.update, self._seconds, speed, self._last_episodes, reports) | evaluation
            self._logged_until = self._logged[0] if self._logged is not None else self._logged_until
            self._logged = step, scalars
            self._missing_infos = {name for name in self._missing_infos if math.isnan(scalars[f"info/{name}"])}
        if self._rank == 0:
            if evaluation and not math.isnan(evaluation["evaluation/return"]):
                self._console.evaluated(step, scalars, self._best_return)
            self._console.update(step, scalars)
            for logger in self._loggers:
                logger.log(step, scalars)
            if self._ppo.update == self._resumed_update + 1:
                self._console.say(what_ran())
                if isinstance(self._ppo.sync.compression, Auto):
                    self._console.say(f"compression {self._settings.compression}: {self._ppo.sync.explain()}")
        if self.is_over or reports[0].checkpoint_due or is_best:
            self._save(self._score(is_best))
        self._reporting_seconds = time.perf_counter() - evaluated_at

    def _lacks_only_evaluation(self, checkpoint: Checkpoint) -> bool:
        """Whether all has been learnt, and the evaluation after it is left."""
        # With fewer steps than before, DiLoCo's ranks may differ. Then they need an update that ends with a mean.
        are_equal = self._ppo.outer is None or checkpoint.settings["total_steps"] <= self._ppo.step
        return are_equal and self._ppo.step >= self._settings.total_steps and not self._is_done

    def _make_up_evaluation(self) -> None:
        """Evaluates a policy that has taken all its steps, and that a stop has left without its last evaluation."""
        if self._rank == 0:
            self._console.say("nothing is left to learn: the last evaluation is under way")
        # The best of a run without evaluations was chosen by other figures, and stays.
        keeps_best = self._best_return == -math.inf and (self._checkpoints.folder / BEST).exists()
        began = time.perf_counter()
        metrics, is_best = self._evaluate()
        self._evaluation_seconds = time.perf_counter() - began
        if self._is_stopped:
            return
        if self._rank == 0:
            self._console.evaluated(self._ppo.step, metrics, self._best_return)
            for logger in self._loggers:  # in a row of its own, behind that of the last update
                logger.log(self._ppo.step, metrics | {"update": self._ppo.update, "seconds": self._seconds})
        self._save(self._score(is_best and not keeps_best))

    def _gather(self, rollouts: Sequence[Any], metrics: dict[str, float]) -> list[RankReport]:
        """Returns the reports of all ranks on the update that has just ended."""
        began = self._gathering_since = time.perf_counter()
        is_due = began - self._saved_at >= self._settings.checkpoint_interval
        mine = RankReport(
            times=self._times(rollouts, began),
            gradients_seconds=self._gradients_seconds,
            wire_bytes=self._wire_bytes,
            episodes=in_order(episode for rollout in rollouts for episode in rollout.episodes),
            metrics={f"learning/{name}": value for name, value in metrics.items()}
            | {f"info/{name}": value for name, value in self._mean_infos(rollouts).items()},
            stop_requested=self._signals.requested,
            checkpoint_due=self._rank == 0 and is_due,
            usage=self._usage.read(),
        )
        return gather_reports(mine, self._ppo.exchange)

    def _mean_infos(self, rollouts: Sequence[Any]) -> dict[str, float]:
        """Returns the means of numbers of ``info``: this rank's, or with micro_batches those of all rollouts."""
        names = self._settings.log_info
        if self._settings.micro_batches is None or not names:
            infos: dict[str, float] = rollouts[0].infos
            return infos
        known = [torch.tensor([each.infos[name] for name in names], dtype=torch.float64) for each in rollouts]
        counts = self._ppo.exchange.sum_parts([each.isfinite().double() for each in known])
        totals = self._ppo.exchange.sum_parts([each.nan_to_num(0.0, 0.0, 0.0) for each in known])
        return dict(zip(names, (totals / counts).tolist(), strict=True))

    def _on_all_ranks(self, part: Callable[[], Result], put_back: Callable[[], None] | None = None) -> Result:
        """Does something together with the other ranks, again if one is lost and the others go on."""
        if self._survivors is None:
            return part()
        return self._survivors.run(part, put_back or (lambda: None))

    def _go_on(self) -> None:
        """Goes on with the group of the ranks that are left."""
        assert self._survivors is not None
        group, ranks = self._survivors.group, self._survivors.ranks
        self._ppo.use_group(group)
        self._before = _sync_stats(self._ppo), self._ppo.exchange.waiting.seconds()
        was_first, lost = self._rank == 0, sorted({*self._ranks} - {*ranks})
        self._ranks, self._rank, self._world_size = ranks, group.rank(), group.size()
        if self._rank > 0:
            return
        if not was_first:
            self._become_first()
        self._console.use_ranks(self._title(), self._world_size)
        if lost:
            are_lost = f"rank {lost[0]} is lost" if len(lost) == 1 else f"ranks {lost} are lost"
            go_on = "1 rank goes on" if len(ranks) == 1 else f"{len(ranks)} ranks go on"
            self._console.warn(f"fastsync train: {are_lost}; {go_on}")

    def _become_first(self) -> None:
        """Prints, logs and saves from now on, as the lost rank 0 did."""
        if self._apart is not None:
            self._apart.close()
        with suppress(ValueError):  # a rank that is lost, but only stopped, holds the lock
            self._stack.enter_context(locked(self._folder))
        self._open_console_and_logs()
        if self._logged is not None:  # which the lost rank may have written or not
            for logger in self._loggers:
                logger.log(*self._logged)

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Evaluates the policy if that is due.

        Returns:
            Metrics by name, NaN if there was no evaluation now, and nothing if the run has none; and whether this is
            the best evaluation so far. Both are the same on every rank.
        """
        if self._evaluator is None:
            return {}, False
        step, before, interval = self._ppo.step, self._evaluated_step, self._settings.eval_interval
        is_due = step // interval > before // interval or step >= self._settings.total_steps
        episodes: list[Episode] = []
        if is_due and not self._is_stopped:
            evaluator, ppo = self._evaluator, self._ppo
            played = self._on_all_ranks(
                lambda: evaluator.evaluate(ppo.policy, ppo.exchange, lambda: self._signals.requested)
            )
            self._is_stopped = played is None
            if played is not None:
                self._evaluated_step, episodes = step, played
        returns = returns_of(episodes)
        metrics = spread("evaluation/return", returns) | spread("evaluation/length", [each.length for each in episodes])
        is_best = mean(returns) > self._best_return
        if is_best:
            self._best_return = mean(returns)
        return metrics, is_best

    def finish(self) -> TrainResult:
        """Compares the ranks' weights, and returns how the run ended."""
        self._count_last_evaluation()
        stopped_by = None
        if not self._is_done:
            stopped_by = self._signals.received.name if self._signals.received else "a signal to another rank"
        if stopped_by is None or self._ppo.outer is None:  # DiLoCo's ranks differ until weights are averaged again
            ppo = self._ppo
            self._on_all_ranks(lambda: check_consistency(ppo.policy, process_group=ppo.exchange.group))
        if self._survivors is not None:
            self._survivors.end()
        returns, sync = returns_of(self._last_episodes), _sync_stats(self._ppo)
        result = TrainResult(self._ppo.step, self._seconds, returns, sync, stopped_by)
        if self._rank == 0:
            self._console.finish(result, self._speed(result.step, result.seconds))
            for name in sorted(self._missing_infos if self._ppo.update > self._resumed_update else ()):
                since = "was resumed" if self._resumed_step else "began"
                self._console.warn(
                    f"warning: log_info={name!r}: since the run {since}, no environment has put a finite number of "
                    "this name into info"
                )
            self._console.say(f"written to {self._shown_folder}")
            for hint in hints(self._shown_folder):
                self._console.say(hint)
        return result

    def _count_last_evaluation(self) -> None:
        """Adds its time to that of the run, because no update follows that would count it."""
        if self._evaluator is not None:
            exchange = self._ppo.exchange
            of_ranks = self._on_all_ranks(lambda: exchange.all_gather([self._evaluation_seconds]))
            self._seconds += self._evaluation_seconds
            if self._rank == 0:
                self._console.add_seconds(
                    {f"rank{rank}/evaluation_seconds": each for rank, (each,) in enumerate(of_ranks)}
                )

    def _speed(self, step: int, seconds: float) -> float:
        since = seconds - self._resumed_seconds
        return (step - self._resumed_step) / since if since > 0 else math.nan

    def _times(self, rollouts: Sequence[Any], now: float) -> PhaseTimes:
        """Returns the times of the update that has just ended."""
        before, waited_before = self._before
        stats, waited_so_far = _sync_stats(self._ppo), self._ppo.exchange.waiting.seconds()
        self._before = stats, waited_so_far
        self._wire_bytes = stats.wire_bytes - before.wire_bytes
        self._gradients_seconds = stats.exposed_time - before.exposed_time
        waited, gathering = waited_so_far - waited_before + self._gradients_seconds, self._gathering_seconds
        is_alone = self._world_size == 1  # a single rank does not communicate
        return PhaseTimes(
            environment=sum(each.environment_seconds for each in rollouts),
            policy=sum(each.policy_seconds for each in rollouts),
            learning=now - rollouts[-1].ended - (0.0 if is_alone else waited),
            communication=0.0 if is_alone else waited + gathering,
            reporting=self._reporting_seconds + (gathering if is_alone else 0.0),
            evaluation=self._evaluation_seconds,
        )

    def _score(self, is_best: bool) -> float:
        """Returns what decides which checkpoint is the best: evaluations, if there are any, or the training's episodes.
        NaN if that is not known, as where fewer episodes have ended than an evaluation would have.

        ``is_best`` tells whether the newest evaluation is the best.
        """
        if self._evaluator is None:
            are_few = len(self._last_episodes) < min(self._settings.eval_episodes, WINDOW)
            return math.nan if self._num_of_before or are_few else mean(returns_of(self._last_episodes))
        return self._best_return if is_best else math.nan

    def _save(self, score: float) -> None:
        """Saves a checkpoint, which is the best if none has a higher score."""
        self._on_all_ranks(lambda: self._write(score))
        # On every rank, because any of them may become the first.
        self._checkpoints.best_return = max(self._checkpoints.best_return, score)
        self._saved_at = time.perf_counter()

    def _write(self, score: float) -> None:
        """Gathers the state of all ranks. Rank 0 writes it into a checkpoint."""
        ppo = self._ppo
        learner = {name: _on_host(part.state_dict()) for name, part in _parts(ppo).items()}
        # The residuals of error feedback differ between ranks. The rest of the engine's state is equal on all.
        residuals = learner["sync"].pop("residuals")
        mine = [
            {"environments": each.state(), "residuals": residuals, "torch_random": self._random_states()}
            for each in self.environments
        ]
        if ppo.policy.recurrent is not None:
            for state, collector in zip(mine, ppo.collectors, strict=True):
                state["memory"] = collector.memory.states.cpu()
        if ppo.outer is not None:  # each rank has learnt by itself
            mine[0]["learner"] = learner
        if ppo.reward_normalizer is not None:
            for state, carried in zip(mine, ppo.reward_normalizer.carried.cpu(), strict=True):
                state["discounted_return"] = carried.clone()
        of_ranks = ppo.exchange.gather_objects(mine)
        if of_ranks is not None:
            states = [state for of_rank in of_ranks for state in of_rank]
            checkpoint = Checkpoint(
                settings=self._settings.as_dict(), world_size=self._world_size, step=ppo.step, update=ppo.update,
                seconds=self._seconds, learner=learner | {"num_draws": ppo.streams[0].num_draws}, environments=states,
                window=[list(episode) for episode in self._last_episodes], evaluated_step=self._evaluated_step,
                spaces=kinds_of(*self._spaces()),
                num_of_before=self._num_of_before,
            )  # fmt: skip
            self._checkpoints.save(checkpoint, score)
        if self._survivors is not None:
            ppo.exchange.all_gather([])  # so that nobody goes on before the file is there

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return self.environments[0].single_observation_space, self.environments[0].single_action_space

    def _random_states(self) -> list[torch.Tensor]:
        """Returns the states of torch's generators, which layers such as Dropout draw from."""
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def _resume(self, checkpoint: Checkpoint) -> list[str]:
        """Restores a checkpoint, even of another number of ranks. Returns sentences about parts that are not exact."""
        ppo, saved, settings = self._ppo, checkpoint.environments, self._settings
        checkpoint.check_spaces(settings.env, *self._spaces())
        ppo.step, ppo.update, self._seconds = checkpoint.step, checkpoint.update, checkpoint.seconds
        self._last_episodes.extend(Episode(*episode) for episode in checkpoint.window)
        num_envs = [len(part["environments"]["restarting"]) for part in saved]
        fits = num_envs == [settings.envs_together] * (settings.micro_batches or self._world_size)
        parts = settings.parts_of(self._rank, self._world_size)
        own = [saved[part] if fits else {} for part in parts]
        learner = checkpoint.learner | own[0].get("learner", {})
        learner["sync"] |= {"residuals": own[0].get("residuals", {})}
        for name, part in _parts(ppo).items():
            if learner.get(name):
                part.load_state_dict(learner[name])
        for group in ppo.optimizer.param_groups:
            group["lr"] = group["lr"].to(self.device)
        for streams in ppo.streams:
            streams.num_draws = learner["num_draws"]
        if "torch_random" in own[0]:
            torch.set_rng_state(own[0]["torch_random"][0])
            if self.device.type == "cuda" and len(own[0]["torch_random"]) > 1:
                torch.cuda.set_rng_state(own[0]["torch_random"][1], self.device)
        observations = [
            environments.restore(state["environments"]) if state else None
            for environments, state in zip(self.environments, own, strict=True)
        ]
        for index, (observation, state) in enumerate(zip(observations, own, strict=True)):
            if observation is None:
                ppo.collectors[index].next_observation = self.environments[index].reset()
            else:
                ppo.collectors[index].next_observation = observation
                if "memory" in state:
                    ppo.collectors[index].memory.states = state["memory"].to(self.device)
                if ppo.reward_normalizer is not None and "discounted_return" in state:
                    ppo.reward_normalizer.carried[index].copy_(state["discounted_return"])
        notes = []
        go_on = ppo.exchange.all_gather([all(each is not None for each in observations)])
        if lost := [rank for rank, (goes_on,) in enumerate(go_on) if not goes_on]:
            notes.append(
                f"the environments of ranks {lost} could not be restored exactly, and begin new episodes: this run is "
                f"not bitwise what it would have been without the interruption"
            )
        if not fits and any(part["residuals"] for part in saved):
            notes.append("the residuals of error feedback are dropped, because they belong to other ranks")
        return notes


def _best_so_far(checkpoint: Checkpoint | None, settings: RunSettings) -> float:
    """Returns the return that the next best checkpoint has to exceed. Other evaluations before count for nothing."""
    if checkpoint is None:
        return -math.inf
    before = checkpoint.settings_as(RunSettings)
    same = all(getattr(before, name) == getattr(settings, name) for name in ("eval_env", "eval_episodes"))
    is_comparable = same and bool(before.eval_interval) == bool(settings.eval_interval)
    return checkpoint.best_return if is_comparable else -math.inf


def _sync_stats(ppo: Any) -> SyncStats:
    """Returns what synchronisation of gradients or weights has cost so far."""
    stats: SyncStats = ppo.sync.stats() if ppo.outer is None else ppo.outer.stats()[0]
    return stats


def _parts(ppo: Any) -> dict[str, Any]:
    """Returns the learner's parts for a checkpoint. With averaged gradients only residuals differ between ranks."""
    parts = {"model": ppo.policy, "optimizer": ppo.optimizer, "scaler": ppo.scaler, "sync": ppo.sync}
    parts |= {"learning_rate": ppo.learning_rate, "outer": ppo.outer, "rewards": ppo.reward_normalizer}
    return {name: part for name, part in parts.items() if part is not None}


def _on_host(state: Any) -> Any:
    """Returns a state with its tensors on the CPU. A rank may lack the GPU that another one's tensors lie on."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, state)


def _check_finite(reports: Sequence[RankReport], update: int) -> None:
    """Ends a training that has become NaN, before it replaces good checkpoints.

    Raises:
        RuntimeError: on every rank.
    """
    for rank, report in enumerate(reports):
        if not report.metrics["learning/optimizer_steps"]:
            continue  # no step was taken, such as while GradScaler looks for its scale
        # A loss of one's own may lack all of METRICS, but if it is nan, the gradients are, too.
        names = (*METRICS, "grad_norm")
        lost = [name for name in names if not math.isfinite(report.metrics.get(f"learning/{name}", 0.0))]
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)} of rank {rank} in update {update} are not finite: are there nan or inf in the "
                "environment's rewards or observations, or is learning_rate too high? Older checkpoints are kept"
            )
