"""TorchRL's PPO on CartPole, made data-parallel by one line.

    torchrun --standalone --nproc-per-node=2 examples/torchrl_ppo.py
    python examples/torchrl_ppo.py

The loss module holds the parameters of policy and value network, so it is what to attach to.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import tyro
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, RewardSum, TransformedEnv
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
except ImportError:
    raise SystemExit("this example needs TorchRL and tyro: pip install torchrl tyro 'gymnasium>=1.4'") from None


@dataclass
class Args:
    total_timesteps: int = 30_000
    """steps of all ranks together"""
    num_steps: int = 512
    """steps of each rank between updates"""
    num_epochs: int = 8
    minibatch_size: int = 128
    seed: int = 0


def network(num_outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # ranks must not act alike
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True, device=device), RewardSum())
    env.set_seed(args.seed + rank)

    policy = ProbabilisticActor(
        TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    ).to(device)
    value = ValueOperator(network(1), in_keys=["observation"]).to(device)
    advantage = GAE(gamma=0.98, lmbda=0.9, value_network=value, average_gae=True)
    loss_module = ClipPPOLoss(policy, value, clip_epsilon=0.2, entropy_coeff=0.0)
    fastsync.attach(loss_module)  # the line: weights of rank 0 everywhere now, mean gradients after every backward()
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3, eps=1e-5)

    returns = []
    num_rollouts = max(1, args.total_timesteps // (args.num_steps * world_size))
    for data in Collector(
        env,
        policy,
        frames_per_batch=args.num_steps,
        total_frames=num_rollouts * args.num_steps,
        auto_register_policy_transforms=True,
    ):
        returns += data["next", "episode_reward"][data["next", "done"]].tolist()
        for _ in range(args.num_epochs):
            advantage(data)
            for minibatch in data[torch.randperm(args.num_steps)].split(args.minibatch_size):
                losses = loss_module(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()

    for trained in (policy, value):
        fastsync.check_consistency(trained)
    mean_return = dist_mean(torch.tensor(returns[-20:], device=device).mean()).item()
    if rank == 0:
        print(f"mean return of the last 20 episodes of each rank, {world_size} ranks: {mean_return:.1f}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    torch.set_num_threads(1)  # as torchrun does; for networks this small more threads are slower
    with process_group(timeout=60) as device:
        main(arguments, device)
