"""Whole trainings, one a process: ``python -m benchmarks.baselines.trainers TRAINER OPTIONS``.

Prints one JSON object: the fields of ``Outcome``.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines import cleanrl_loop, rejax_ppo, rlox_ppo, sb3
from benchmarks.baselines.training import Outcome, Training, Watch
from benchmarks.harness.collect import TrainingError

ALONE = "environment alone"
MEETINGS, COLUMNS = "meetings", 16  # a file of how often each rank has come; a row is a rank's, for its cache lines


def train_fastsync(training: Training) -> Outcome:
    from fastsync.launch.torchrun import launch_ranks

    with tempfile.TemporaryDirectory() as folder:
        return launch_ranks(fastsync_rank, training.nproc, _settings(training, folder), training)[0]


def train_fastsync_apart(training: Training, *, in_step: bool = False) -> Outcome:
    """Each rank trains a policy of its own, all at the same time: what the machine gives where nobody communicates.

    In step, ranks also wait for each other before each update and each optimizer step.
    """
    from fastsync.launch.torchrun import launch_ranks

    each = replace(training, total_steps=training.total_steps // training.nproc)
    with tempfile.TemporaryDirectory() as folder:
        np.zeros((training.nproc, COLUMNS)).tofile(f"{folder}/{MEETINGS}")
        outcomes = launch_ranks(fastsync_rank_apart, training.nproc, _settings(each, folder), each, in_step)
    returns = [outcome.mean_return for outcome in outcomes if outcome.mean_return is not None]
    return Outcome(
        sum(outcome.steps for outcome in outcomes),
        max(outcome.seconds for outcome in outcomes),
        float(np.mean(returns)) if returns else None,
    )


def _settings(training: Training, folder: str) -> Any:
    from fastsync.ppo.ppo import Settings

    return Settings(
        env=training.env,
        total_steps=training.total_steps,
        num_envs=training.num_envs // training.nproc,
        num_steps=training.num_steps,
        num_minibatches=training.num_minibatches,
        num_epochs=training.num_epochs,
        vectorization=training.vectorization,  # type: ignore[arg-type]
        learning_rate=training.learning_rate,
        lr_schedule="linear" if training.anneal_lr else "constant",
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        clip_coef=training.clip,
        anneal_clip=training.anneal_clip,
        clip_value_loss=training.clip_value_loss,
        vf_coef=2 * training.value_coef,
        hidden_sizes=(training.hidden_size, training.hidden_size),
        ent_coef=training.entropy,
        norm_observations=training.normalize,
        norm_advantages=training.norm_advantages,
        norm_rewards=training.normalize,
        seed=training.seed,
        runs_dir=folder,
    )


def fastsync_rank(settings: Any, training: Training) -> Outcome:
    from fastsync.distributed import process_group
    from fastsync.ppo.ppo import train

    sys.stdout = sys.stderr  # which the parent lets through
    with process_group(settings.timeout) as device, _watched(training) as reached:
        _, result = train(settings, device)
    mean_return = None if math.isnan(result.mean_return) else result.mean_return
    return reached[0] if reached else Outcome(result.step, result.seconds, mean_return)


@contextmanager
def _watched(training: Training) -> Iterator[list[Outcome]]:
    """Inside, a training ends once it has come far enough. Then the list has the outcome.

    Every rank knows the episodes of all, so all decide alike.
    """
    from fastsync.ppo.runs.metrics import returns_of
    from fastsync.ppo.session import Session

    reached, update, begin = list[Outcome](), Session.update, Session.begin
    watches = list[Watch]()

    def begins(session: Session, ppo: Any) -> None:
        begin(session, ppo)
        watches.append(Watch(training))

    def updates_and_looks(session: Session, *given: Any) -> None:
        update(session, *given)
        step, returns = session._ppo.step, returns_of(session._last_episodes)
        if watches[0].look(step, returns):
            reached.append(watches[0].outcome(step, returns))
            session._is_stopped = True

    with patch.multiple(Session, begin=begins, update=updates_and_looks):
        yield reached


def fastsync_rank_apart(settings: Any, training: Training, in_step: bool) -> Outcome:
    """As fastsync_rank, in a world of its own, which begins when all have come this far."""
    from fastsync.distributed import process_group

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with process_group(settings.timeout):
        dist.barrier()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    meetings = np.memmap(f"{settings.runs_dir}/{MEETINGS}", np.float64, shape=(world_size, COLUMNS))
    own = replace(settings, seed=settings.seed + rank, runs_dir=f"{settings.runs_dir}/{rank}")
    with _meeting(meetings[:, 0], rank) if in_step else nullcontext():
        return fastsync_rank(own, training)


@contextmanager
def _meeting(counts: Any, rank: int) -> Iterator[None]:
    """Inside, trainings begin, ranks begin to learn, and they take their optimizer steps, once all have come so far."""
    from fastsync.ppo.ppo import PPO
    from fastsync.ppo.session import Session

    def after_all(method: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*given: Any) -> Any:
            counts[rank] += 1
            while counts.min() < counts[rank]:
                os.sched_yield()
            return method(*given)

        return waits

    steps = {"learn": after_all(PPO.learn), "_take_step": after_all(PPO._take_step)}
    try:
        with patch.multiple(PPO, **steps), patch.object(Session, "begin", after_all(Session.begin)):
            yield
    finally:
        counts[rank] = np.inf  # others may have more updates


def step_environment_alone(training: Training, vectorization: str = "auto") -> Outcome:
    """Random actions, by the environment's own vectorised implementation where it has one that trainings take.

    With ``vectorization="sync"`` environments step one after the other, always.
    """
    import gymnasium

    from fastsync.ppo.envs.lookup import find_env
    from fastsync.ppo.envs.spaces import random_actions

    source = find_env(training.env)
    has_own = source.spec and source.spec.vector_entry_point and not source.is_atari
    if has_own and vectorization == "auto":
        envs: Any = gymnasium.make_vec(training.env, training.num_envs, vectorization_mode="vector_entry_point")
    else:
        envs = gymnasium.vector.SyncVectorEnv([source.make] * training.num_envs)
    envs.reset(seed=training.seed)
    generator = np.random.default_rng(training.seed)
    num_rows = training.total_steps // training.num_envs
    rows = [random_actions(envs.single_action_space, training.num_envs, generator) for _ in range(num_rows)]
    began = time.perf_counter()
    for row in rows:
        envs.step(row)
    return Outcome(num_rows * training.num_envs, time.perf_counter() - began)


TRAINERS: dict[str, Callable[[Training], Outcome]] = {
    "fastsync": train_fastsync,
    "fastsync apart": train_fastsync_apart,
    "fastsync in step": partial(train_fastsync_apart, in_step=True),
    "stable-baselines3": sb3.train,
    "stable-baselines3, SubprocVecEnv": partial(sb3.train, processes=True),
    "sbx": partial(sb3.train, package="sbx"),
    "cleanrl loop": cleanrl_loop.train,
    "rlox": rlox_ppo.train,
    "rejax": rejax_ppo.train,
    ALONE: step_environment_alone,
}
ENVIRONMENTS: dict[str, Callable[[Training], Outcome]] = {
    "fastsync": step_environment_alone,
    "cleanrl loop": partial(step_environment_alone, vectorization="sync"),
    "stable-baselines3": sb3.step_environments,
    "stable-baselines3, SubprocVecEnv": partial(sb3.step_environments, processes=True),
    "sbx": sb3.step_environments,
    "rlox": rlox_ppo.step_environments,
    "rejax": rejax_ppo.step_environments,
}
"""What steps the environments of these trainers with random actions."""
EVERYTHING = TRAINERS | {f"{trainer}, {ALONE}": step for trainer, step in ENVIRONMENTS.items()}


def run_alone(trainer: str, training: Training, *, timeout: float, python: str | None = None) -> Outcome:
    """Runs a trainer in a fresh process, with ``training.threads`` threads to compute with on each rank.

    It sees no GPU, unless it is to compute on one. ``python`` is another interpreter, which has the trainer's packages.

    Whatever ends the wait for it, its ranks and environments end with it.

    Raises:
        TrainingError: it failed, or has not ended in ``timeout`` seconds.
    """
    command = [python or sys.executable, "-m", "benchmarks.baselines.trainers", trainer, json.dumps(asdict(training))]
    environment = os.environ | {"OMP_NUM_THREADS": str(training.threads)}
    if training.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # a group of its own, which is ended as a whole
    ) as process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TrainingError(f"{trainer} has not ended within {timeout:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise TrainingError(f"{trainer} failed:\n{printed}{errors}")
    return Outcome(**json.loads(printed.splitlines()[-1]))


if __name__ == "__main__":
    told = Training(**json.loads(sys.argv[2]))
    torch.set_num_threads(told.threads)
    print(json.dumps(asdict(EVERYTHING[sys.argv[1]](told))))
