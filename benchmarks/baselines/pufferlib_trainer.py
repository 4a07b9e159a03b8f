"""PufferLib 3's trainer on an environment of gymnasium: ``PYTHON pufferlib_trainer.py TRAINING GAMMA GAE_LAMBDA``.

It stands alone, for a Python of its own: PufferLib 3.0 needs gym 0.23 and gymnasium 0.29, which nothing else takes.
What settings do not tell is PufferLib's: V-trace, prioritised rows, a cosine schedule, rewards cut off at 1. Prints one
JSON object: the fields of ``benchmarks.baselines.trainers.Outcome``.
"""

import ast
import configparser
import contextlib
import functools
import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pufferlib
import pufferlib.emulation
import pufferlib.vector
import torch
from pufferlib.pufferl import PuffeRL
from pufferlib.pytorch import layer_init
from torch import Tensor, nn


class Policy(nn.Module):
    """The network of all others: two hidden layers for the logits and two for the value."""

    def __init__(self, num_inputs: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()

        def network(num_outputs: int, last_gain: float) -> nn.Sequential:
            hidden = [layer_init(nn.Linear(size, hidden_size)) for size in (num_inputs, hidden_size)]
            last = layer_init(nn.Linear(hidden_size, num_outputs), std=last_gain)
            return nn.Sequential(hidden[0], nn.Tanh(), hidden[1], nn.Tanh(), last)

        self.actor, self.critic = network(num_actions, 0.01), network(1, 1.0)

    def forward_eval(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations)

    forward = forward_eval


def make(env: str, buf: Any = None, seed: int = 0) -> Any:
    counted = pufferlib.EpisodeStats(gymnasium.make(env))
    return pufferlib.emulation.GymnasiumPufferEnv(env=counted, buf=buf, seed=seed)


def train(chosen: Any, gamma: float, gae_lambda: float) -> dict[str, Any]:
    envs = pufferlib.vector.make(
        functools.partial(make, chosen.env),
        backend=pufferlib.vector.Serial,
        num_envs=chosen.num_envs,
        seed=chosen.seed,
    )
    torch.manual_seed(chosen.seed)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n, chosen.hidden_size)
    batch_size = chosen.num_envs * chosen.num_steps
    options = {
        **_defaults(),
        "env": chosen.env,
        "use_rnn": False,
        "device": "cpu",
        "seed": chosen.seed,
        "optimizer": "adam",
        "adam_beta1": 0.9,
        "adam_eps": 1e-5,
        "total_timesteps": chosen.total_steps,
        "batch_size": batch_size,
        "bptt_horizon": chosen.num_steps,
        "minibatch_size": batch_size // chosen.num_minibatches,
        "update_epochs": chosen.num_epochs,
        "learning_rate": chosen.learning_rate,
        "gamma": gamma,
        "gae_lambda": gae_lambda,
        "clip_coef": chosen.clip,
        "vf_clip_coef": chosen.clip,
        "vf_coef": 0.5,
        "ent_coef": chosen.entropy,
        "max_grad_norm": 0.5,
    }
    with contextlib.redirect_stdout(io.StringIO()):  # its dashboard
        trainer = PuffeRL(options, envs, policy)
        returns: list[float] = []
        began = time.perf_counter()
        while trainer.global_step < chosen.total_steps:
            trainer.stats.clear()
            returns += trainer.evaluate()["episode_return"]
            trainer.train()
        seconds = time.perf_counter() - began
        trainer.close()
    mean_return = float(np.mean(returns[-100:])) if returns else None
    return {"steps": trainer.global_step, "seconds": seconds, "mean_return": mean_return}


def _defaults() -> dict[str, Any]:
    """PufferLib's own settings of a training."""
    config = configparser.ConfigParser()
    config.read(Path(pufferlib.__file__).parent / "config" / "default.ini")
    return {name: _value(text) for name, text in config["train"].items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(SimpleNamespace(**json.loads(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3]))))
