"""Rejax's PPO over gymnax's environments: rollout, update and environments are one compiled function of JAX.

This is the way of PureJaxRL, which is a file to copy and not on PyPI. Rejax's ``train`` is compiled whole, and so
cannot end early. Here its ``train_iteration`` is compiled, and called once an update.
"""

import time
from typing import Any

import numpy as np

from benchmarks.baselines import jax_compiler
from benchmarks.baselines.training import WINDOW, Outcome, Training, Watch
from benchmarks.harness.records import versions


def train(training: Training) -> Outcome:
    import jax
    import optax
    from rejax import PPO

    env, params = _environment(training)
    num_updates = training.total_steps // training.batch_size
    num_optimizer_steps = num_updates * training.num_epochs * training.num_minibatches
    learning_rate: Any = training.learning_rate
    if training.anneal_lr:
        learning_rate = optax.linear_schedule(training.learning_rate, 0.0, num_optimizer_steps)
    model = PPO.create(
        env=env,
        env_params=params,
        num_envs=training.num_envs,
        num_steps=training.num_steps,
        num_minibatches=training.num_minibatches,
        num_epochs=training.num_epochs,
        learning_rate=learning_rate,
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        clip_eps=training.clip,
        ent_coef=training.entropy,
        vf_coef=2 * training.value_coef,
        max_grad_norm=0.5,
        normalize_observations=training.normalize,
        normalize_rewards=training.normalize,
        reward_normalization_discount=training.gamma,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (training.hidden_size,) * 2},
    )
    state = model.init_state(jax.random.PRNGKey(training.seed))
    update = jax.jit(model.train_iteration)
    compiled, watch = jax_compiler.stopwatch(), Watch(training)
    for done in range(1, num_updates + 1):
        state = update(state)
        if watch.look(done * training.batch_size, _newest_returns(state.env_state)):
            break
    outcome = watch.outcome(num_updates * training.batch_size, _newest_returns(state.env_state))
    return jax_compiler.told(outcome, compiled, versions("rejax", "gymnax", "jax"))


def _environment(training: Training) -> tuple[Any, Any]:
    """One of gymnax, with the interface that Rejax takes, whose state holds the newest returns. With its parameters."""
    import gymnax
    import jax.numpy as jnp

    env, params = gymnax.make(training.env)

    class Recorded:
        """Its state: the environment's, the running return, the newest returns, at which step each was, the step."""

        def __getattr__(self, name: str) -> Any:
            return getattr(env, name)

        def __deepcopy__(self, memo: Any) -> "Recorded":
            return self

        def reset(self, key: Any, params: Any) -> tuple[Any, Any]:
            observation, state = env.reset(key, params)
            return observation, (state, 0.0, jnp.zeros(WINDOW), jnp.full(WINDOW, -1), 0)

        def step(self, key: Any, state: Any, action: Any, params: Any) -> Any:
            inner, total, returns, ended_at, steps = state
            observation, inner, reward, terminated, truncated, info = env.step(key, inner, action, params)
            done, total = terminated | truncated, total + jnp.squeeze(reward)
            oldest = jnp.argmin(ended_at)
            returns = returns.at[oldest].set(jnp.where(done, total, returns[oldest]))
            ended_at = ended_at.at[oldest].set(jnp.where(done, steps, ended_at[oldest]))
            state = inner, jnp.where(done, 0.0, total), returns, ended_at, steps + 1
            return observation, state, reward, done, info

    return Recorded(), params


def _newest_returns(env_state: Any) -> list[float]:
    """The returns of the newest episodes of all environments, the newest last. It waits for the update."""
    _, _, returns, ended_at, _ = (np.asarray(part).ravel() if index else part for index, part in enumerate(env_state))
    order = np.argsort(ended_at, kind="stable")
    return returns[order][ended_at[order] >= 0].tolist()


def step_environments(training: Training) -> Outcome:
    """Random actions, without the time to compile."""
    import gymnax
    import jax

    env, params = gymnax.make(training.env)
    num_rows = training.total_steps // training.num_envs

    def step(state: Any, key: Any) -> Any:
        action_keys, step_keys = jax.random.split(key, (2, training.num_envs))
        actions = jax.vmap(env.action_space(params).sample)(action_keys)
        return jax.vmap(env.step, in_axes=(0, 0, 0, None))(step_keys, state, actions, params)[1], None

    def steps(state: Any, key: Any) -> Any:
        return jax.lax.scan(step, state, jax.random.split(key, num_rows))[0]

    first, second = jax.random.split(jax.random.PRNGKey(training.seed))
    _, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(first, training.num_envs), params)
    compiled = jax.jit(steps).lower(state, second).compile()
    began = time.perf_counter()
    jax.block_until_ready(compiled(state, second))
    return Outcome(num_rows * training.num_envs, time.perf_counter() - began)
