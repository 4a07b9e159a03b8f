"""Stable-Baselines3's PPO, which trains in one process, made data-parallel by one line.

torchrun --standalone --nproc-per-node=2 examples/sb3_ppo.py
python examples/sb3_ppo.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import tyro
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
except ImportError:
    raise SystemExit("this example needs Stable-Baselines3 and tyro: pip install stable-baselines3 tyro") from None


@dataclass
class Args:
    total_timesteps: int = 80_000
    """steps of all environments of all ranks together"""
    num_envs: int = 8
    """environments of each rank"""
    seed: int = 0


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = args.seed + rank * args.num_envs  # environment i gets this seed + i: no two alike
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=args.num_envs, seed=seed),
        # Every rank must take part in every synchronisation, so all must take the same number of optimizer steps. They
        # do: rows, epochs and minibatches are the same everywhere. target_kl stays off: it would let a rank stop its
        # epochs early by its own KL divergence, and the others would wait for it.
        target_kl=None,
        n_steps=32,
        batch_size=128,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda remaining: 1e-3 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=seed,
        device=device,
    )
    fastsync.attach(model.policy)  # the line: weights of rank 0 everywhere now, mean gradients after every backward()
    model.learn(args.total_timesteps // world_size)

    fastsync.check_consistency(model.policy)
    evaluation = make_vec_env("CartPole-v1", n_envs=5, seed=1000 + seed)
    mean_return, _ = evaluate_policy(model, evaluation, n_eval_episodes=10)
    mean_return = dist_mean(torch.tensor(mean_return, device=device)).item()
    if rank == 0:
        print(f"mean return of {world_size} x 10 episodes: {mean_return:.1f}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    torch.set_num_threads(1)  # as torchrun does; for networks this small more threads are slower
    with process_group(timeout=60) as device:
        main(arguments, device)
