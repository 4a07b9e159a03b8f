"""Hyperparameters as others publish them, unchanged, and the returns that count as solved."""

from benchmarks.baselines.training import Training

THRESHOLDS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "Pendulum-v1": -200.0, "LunarLander-v3": 200.0}
"""The reward_threshold of gymnasium's registry. Pendulum has none there."""

_CLEANRL = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "num_epochs": 4, "seed": 1}
_ZOO = {
    "seed": 1, "anneal_lr": False, "learning_rate": 3e-4, "clip_value_loss": False, "value_coef": 0.5, "entropy": 0.0,
}  # fmt: skip
PUBLISHED = {
    "zoo": {
        "CartPole-v1": Training(
            total_steps=100_000, num_envs=8, num_steps=32, num_minibatches=1, num_epochs=20, gamma=0.98, gae_lambda=0.8,
            **_ZOO | {"learning_rate": 1e-3, "anneal_lr": True, "anneal_clip": True},
        ),
        "Acrobot-v1": Training(
            total_steps=1_000_000, num_envs=16, num_steps=256, num_minibatches=64, num_epochs=4, gae_lambda=0.94,
            normalize=True, env="Acrobot-v1", **_ZOO,
        ),
        "Pendulum-v1": Training(
            total_steps=100_000, num_envs=4, num_steps=1024, num_minibatches=64, num_epochs=10, gamma=0.9, gsde=True,
            env="Pendulum-v1", **_ZOO | {"learning_rate": 1e-3},
        ),
        "LunarLander-v3": Training(
            total_steps=1_000_000, num_envs=16, num_steps=1024, num_minibatches=256, num_epochs=4, gamma=0.999,
            gae_lambda=0.98, env="LunarLander-v3", **_ZOO | {"entropy": 0.01},
        ),
    },
    "cleanrl": {
        env: Training(total_steps=500_000, env=env, **_CLEANRL) for env in ("CartPole-v1", "Acrobot-v1")
    },
}  # fmt: skip
"""By whose, and for which environment: hyperparams/ppo.yml of RL Baselines3 Zoo 2.9.2 with Stable-Baselines3's defaults
for the rest (batches of 64, a learning rate of 3e-4), and CleanRL's ppo.py, for what its documentation reports."""
