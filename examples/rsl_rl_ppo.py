"""RSL-RL's PPO on CPUs, made data-parallel by one line, with a learning rate that all ranks adapt alike.

    torchrun --standalone --nproc-per-node=2 examples/rsl_rl_ppo.py
    python examples/rsl_rl_ppo.py

Told of several ranks, RSL-RL's runner opens an NCCL group and wants a GPU for each. So open the group first, and take
what torchrun has set out of the environment before the runner is made. RSL-RL would also average the KL
divergence that its learning rate follows. Here it is sent with the gradients.
"""

import os
from collections import deque

import gymnasium
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict
except ImportError:
    raise SystemExit("this example needs RSL-RL: pip install rsl-rl-lib 'gymnasium>=1.4'") from None

NUM_UPDATES = 30


class Pendulums(VecEnv):
    """gymnasium's Pendulum-v1 as RSL-RL sees environments."""

    def __init__(self, num_envs, seed, device):
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        self.envs = gymnasium.make_vec("Pendulum-v1", num_envs, vector_kwargs={"autoreset_mode": mode})
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, 200
        self.device, self.cfg = device, {}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.observations = self.envs.reset(seed=seed)[0]
        self.returns = torch.zeros(num_envs, device=device)
        self.finished = deque(maxlen=16)

    def get_observations(self):
        observations = torch.as_tensor(self.observations, device=self.device)
        return TensorDict({"policy": observations}, batch_size=[self.num_envs])

    def step(self, actions):
        self.observations, rewards, terminated, truncated, _ = self.envs.step(actions.clamp(-2, 2).cpu().numpy())
        rewards = torch.as_tensor(rewards, dtype=torch.float32, device=self.device)
        dones = torch.as_tensor(terminated | truncated, device=self.device)
        self.returns += rewards
        self.finished.extend(self.returns[dones].tolist())
        self.returns[dones] = 0
        extras = {"time_outs": torch.as_tensor(truncated, device=self.device)}
        return self.get_observations(), 0.1 * rewards, dones, extras


def agree_on_kl(actor, sync):
    """Has the learning rate follow the mean of the ranks' KL divergences in the minibatch before."""
    of_this_rank = actor.get_kl_divergence

    def of_all_ranks(old, new):
        before = sync.piggybacked().get("kl", torch.zeros(()))  # RSL-RL leaves its learning rate as it is at 0
        sync.piggyback("kl", of_this_rank(old, new).mean())  # travels with the gradients of this minibatch
        return before

    actor.get_kl_divergence = of_all_ranks


def settings():
    mlp = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "elu"}
    return {
        "num_steps_per_env": 64,
        "save_interval": NUM_UPDATES,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**mlp, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": dict(mlp),
        "algorithm": {
            "class_name": "PPO",
            "schedule": "adaptive",
            "desired_kl": 0.01,
            "learning_rate": 1e-3,
            "gamma": 0.95,
            "num_learning_epochs": 4,
            "num_mini_batches": 4,
            "entropy_coef": 0.0,
            "rnd_cfg": None,
            "symmetry_cfg": None,
        },
    }


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.manual_seed(rank)  # ranks must not act alike
    env = Pendulums(16, 1 + 1000 * rank, device)
    runner = OnPolicyRunner(env, settings(), device=str(device))
    algorithm = runner.alg
    # The line: weights of rank 0 everywhere now, mean gradients after every backward().
    sync = fastsync.attach(nn.ModuleList([algorithm.actor, algorithm.critic]))
    agree_on_kl(algorithm.actor, sync)
    runner.learn(NUM_UPDATES)

    for model in (algorithm.actor, algorithm.critic):
        fastsync.check_consistency(model)
    rates = [None] * world_size
    dist.all_gather_object(rates, algorithm.learning_rate)
    mean_return = dist_mean(torch.tensor(env.finished, device=device).mean()).item()
    if rank == 0:
        print(f"mean return of {world_size} ranks {mean_return:.1f}; learning rates {rates}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
