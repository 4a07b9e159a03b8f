"""Stable-Baselines3's PPO, and SBX's, which has the same interface, in JAX."""

import time
from importlib import import_module
from typing import Any

from benchmarks.baselines import jax_compiler
from benchmarks.baselines.training import Outcome, Training, Watch
from benchmarks.harness.records import versions


def train(training: Training, *, package: str = "stable_baselines3", processes: bool = False) -> Outcome:
    """By ``package``, with each environment in a process of its own or all in this one."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Look(BaseCallback):
        """Looks at the training after each update, which is before each rollout and at the end."""

        is_over = False

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            self.is_over = watch.look(self.num_timesteps, returns)

        def _on_rollout_end(self) -> None:
            if training.norm_advantages == "rollout":
                buffer = self.model.rollout_buffer
                buffer.advantages = (buffer.advantages - buffer.advantages.mean()) / (buffer.advantages.std() + 1e-8)

        def _on_step(self) -> bool:
            return not self.is_over

        _on_training_end = _on_rollout_start

    in_jax = package == "sbx"
    options: dict[str, Any] = {}
    if training.gsde and not in_jax:
        options |= {"use_sde": True, "sde_sample_freq": 4}
    if training.clip_value_loss and not in_jax:
        options["clip_range_vf"] = _schedule(training.clip, training.anneal_clip)
    if training.norm_advantages == "rollout":
        options["normalize_advantage"] = False  # that is for minibatches
    if not training.is_atari:
        options["policy_kwargs"] = {"net_arch": [training.hidden_size, training.hidden_size]}
    envs = _environments(training, processes)
    model = import_module(package).PPO(
        "CnnPolicy" if training.is_atari else "MlpPolicy",
        envs,
        n_steps=training.num_steps,
        batch_size=training.minibatch_size,
        n_epochs=training.num_epochs,
        learning_rate=_schedule(training.learning_rate, training.anneal_lr),
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        clip_range=_schedule(training.clip, training.anneal_clip),
        ent_coef=training.entropy,
        vf_coef=training.value_coef,
        seed=training.seed,
        device=training.device,
        **options,
    )
    compiled = jax_compiler.stopwatch() if in_jax else None
    watch = Watch(training)
    model.learn(training.total_steps, callback=Look())
    outcome = watch.outcome(model.num_timesteps, [episode["r"] for episode in model.ep_info_buffer or []])
    envs.close()
    return jax_compiler.told(outcome, compiled, versions("stable_baselines3", *(("sbx-rl", "jax") if in_jax else ())))


def _schedule(value: float, anneal: bool) -> Any:
    return (lambda remaining: value * remaining) if anneal else value


def _environments(training: Training, processes: bool) -> Any:
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

    many: Any = {"n_envs": training.num_envs, "seed": training.seed}
    many["vec_env_cls"] = SubprocVecEnv if processes else DummyVecEnv
    if training.is_atari:
        import ale_py  # noqa: F401 registers the games

        return VecFrameStack(make_atari_env(training.env, env_kwargs={"frameskip": 1}, **many), n_stack=4)
    # Without a word make_vec_env asks for pictures. LunarLander then draws particles in each step, which change nothing
    # else, and a training takes two to three times as long.
    envs = make_vec_env(training.env, env_kwargs={"render_mode": None}, **many)
    return VecNormalize(envs, gamma=training.gamma) if training.normalize else envs


def step_environments(training: Training, *, processes: bool = False) -> Outcome:
    """Random actions."""
    import numpy as np

    envs = _environments(training, processes)
    envs.reset()
    rows = [
        np.stack([envs.action_space.sample() for _ in range(training.num_envs)])
        for _ in range(training.total_steps // training.num_envs)
    ]
    began = time.perf_counter()
    for row in rows:
        envs.step(row)
    seconds = time.perf_counter() - began
    envs.close()
    return Outcome(len(rows) * training.num_envs, seconds)
