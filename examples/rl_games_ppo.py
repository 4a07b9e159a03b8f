"""rl_games' PPO on CPUs, made data-parallel by one line, with a learning rate that all ranks adapt alike.

    torchrun --standalone --nproc-per-node=2 examples/rl_games_ppo.py
    python examples/rl_games_ppo.py

rl_games' own multi_gpu opens an NCCL group and takes a GPU for each rank, so it does not run on CPUs. Leave it off, and
attach to the agent's model. What multi_gpu does besides is to agree on the learning rate, which rl_games adapts to the
KL divergence: here the ranks' mean of it travels with the gradients, as a rider.
"""

import tempfile

import gymnasium
import torch
import torch.distributed as dist

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner
except ImportError:
    raise SystemExit("this example needs rl_games: pip install rl-games 'gymnasium>=1.4'") from None


class Pendulums(IVecEnv):
    """gymnasium's Pendulum-v1 as rl_games sees environments."""

    def __init__(self, num_actors, seed):
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        self.seed = seed
        self.envs = gymnasium.make_vec("Pendulum-v1", num_actors, vector_kwargs={"autoreset_mode": mode})

    def reset(self):
        return self.envs.reset(seed=self.seed)[0]

    def step(self, actions):
        observations, rewards, terminated, truncated, _ = self.envs.step(actions)
        return observations, rewards.astype("float32"), terminated | truncated, {"time_outs": truncated}

    def get_env_info(self):
        return {
            "observation_space": self.envs.single_observation_space,
            "action_space": self.envs.single_action_space,
        }


class AgreedSchedule:
    """A schedule of rl_games, which goes by the mean of the ranks' KL divergences in the minibatch before."""

    def __init__(self, schedule, sync):
        self.schedule, self.sync = schedule, sync

    def update(self, learning_rate, entropy_coef, epoch, frames, kl_dist, **others):
        of_all_ranks = self.sync.piggybacked().get("kl")
        self.sync.piggyback("kl", torch.tensor(kl_dist))  # travels with the gradients of the next minibatch
        if of_all_ranks is None:
            return learning_rate, entropy_coef
        return self.schedule.update(learning_rate, entropy_coef, epoch, frames, of_all_ranks.item(), **others)


def make_agent(base_name, params):
    """For runner.run(): runner.algo_factory.register_builder("a2c_continuous", make_agent)."""
    agent = A2CAgent(base_name=base_name, params=params)
    sync = fastsync.attach(agent.model)  # the line: weights of rank 0 everywhere now, mean gradients from now on
    agent.scheduler = AgreedSchedule(agent.scheduler, sync)
    return agent


def parameters(device, seed, folder):
    layers = {"units": [64, 64], "activation": "elu", "initializer": {"name": "default"}}
    action = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
    return {
        "seed": seed,
        "torch_threads": 1,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {"name": "actor_critic", "separate": False, "space": {"continuous": action}, "mlp": layers},
        "config": {
            "name": "pendulum",
            "env_name": "pendulums",
            "env_config": {"seed": seed},
            "train_dir": folder,
            "multi_gpu": False,
            "torch_compile": False,  # it would take longer than the training
            "device": str(device),
            "num_actors": 8,
            "horizon_length": 64,
            "minibatch_size": 256,
            "mini_epochs": 4,
            "max_epochs": 12,
            "reward_shaper": {"scale_value": 0.1},
            "normalize_advantage": True,
            "normalize_input": False,
            "gamma": 0.95,
            "tau": 0.95,
            "learning_rate": 1e-3,
            "lr_schedule": "adaptive",
            "kl_threshold": 0.008,
            "grad_norm": 1.0,
            "truncate_grads": True,
            "e_clip": 0.2,
            "clip_value": False,
            "critic_coef": 2,
            "entropy_coef": 0.0,
            "bounds_loss_coef": 1e-4,
            "print_stats": False,
        },
    }


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    vecenv.register("PENDULUMS", lambda _, num_actors, **config: Pendulums(num_actors, **config))
    env_configurations.register("pendulums", {"vecenv_type": "PENDULUMS", "env_creator": None})
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner()
        runner.load({"params": parameters(device, 1 + 1000 * rank, folder)})  # each rank its own environments
        agent = make_agent("run", runner.params)
        agent.train()
        agent.writer.close()

    fastsync.check_consistency(agent.model)
    rates = [None] * world_size
    dist.all_gather_object(rates, agent.last_lr)
    mean_reward = dist_mean(torch.as_tensor(agent.game_rewards.get_mean(), device=device)).item()
    if rank == 0:
        print(f"mean return of {world_size} ranks {mean_reward:.1f}; learning rates {rates}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
