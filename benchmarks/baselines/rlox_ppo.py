"""rlox's PPO: environments in Rust where it has them, which for PPO is CartPole-v1, and gymnasium's others."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.baselines.training import Outcome, Training, Watch
from benchmarks.harness.records import versions


def train(training: Training) -> Outcome:
    from rlox.algorithms.ppo import PPO
    from rlox.callbacks import Callback

    class Look(Callback):
        """Looks at the training after each update; that is when rlox calls ``on_step``."""

        updates = 0

        @property
        def steps(self) -> int:
            return self.updates * training.batch_size

        def on_step(self, **_: Any) -> bool:
            self.updates += 1
            return not watch.look(self.steps, returns)

    torch.manual_seed(training.seed)
    look = Look()
    model = PPO(
        training.env,
        n_envs=training.num_envs,
        seed=training.seed,
        callbacks=[look],
        n_steps=training.num_steps,
        n_epochs=training.num_epochs,
        batch_size=training.minibatch_size,
        learning_rate=training.learning_rate,
        anneal_lr=training.anneal_lr,
        clip_eps=training.clip,
        clip_vloss=training.clip_value_loss,
        ent_coef=training.entropy,
        vf_coef=2 * training.value_coef,
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        normalize_obs=training.normalize,
        normalize_rewards=training.normalize,
    )
    returns = model.collector.episode_rewards
    if model.vec_normalize is not None:  # the collector sees normalised rewards
        model.vec_normalize.env = recorded = _Recorded(model.vec_normalize.env, training.num_envs)
        returns = recorded.returns
    watch = Watch(training)
    model.train(training.total_steps)
    return replace(watch.outcome(look.steps, returns), versions=versions("rlox"))


class _Recorded:
    """Environments whose returns are added up."""

    def __init__(self, envs: Any, num_envs: int) -> None:
        self._envs, self._running = envs, np.zeros(num_envs)
        self.returns = list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)

    def step_all(self, actions: Any) -> dict[str, Any]:
        step = self._envs.step_all(actions)
        self._running += step["rewards"]
        ended = (step["terminated"] | step["truncated"]).astype(bool)
        self.returns += self._running[ended].tolist()
        self._running[ended] = 0.0
        return step


def step_environments(training: Training) -> Outcome:
    """Random actions, for the environments that ``train`` steps."""
    import gymnasium
    from rlox.algorithms.ppo import PPO

    from fastsync.ppo.envs.spaces import random_actions

    envs = PPO(training.env, n_envs=training.num_envs, seed=training.seed).collector.env
    envs.reset_all()
    space, generator = gymnasium.make(training.env).action_space, np.random.default_rng(training.seed)
    num_rows = training.total_steps // training.num_envs
    rows = [random_actions(space, training.num_envs, generator) for _ in range(num_rows)]
    if isinstance(space, gymnasium.spaces.Discrete):
        rows = [row.tolist() for row in rows]  # as Rust takes them
    began = time.perf_counter()
    for row in rows:
        envs.step_all(row)
    return Outcome(num_rows * training.num_envs, time.perf_counter() - began)
