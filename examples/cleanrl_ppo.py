"""PPO on CartPole in one file, as CleanRL writes it, made data-parallel by one line.

    torchrun --standalone --nproc-per-node=2 examples/cleanrl_ppo.py
    python examples/cleanrl_ppo.py

CleanRL's multi-GPU scripts concatenate the gradients after backward(), all-reduce them and copy them back. In place of
that block stands fastsync.attach(agent): when backward() returns, every gradient is the mean over the ranks.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import gymnasium
    import tyro
except ImportError:
    raise SystemExit("this example needs gymnasium and tyro: pip install 'gymnasium>=1.4' tyro") from None


@dataclass
class Args:
    total_timesteps: int = 100_000
    """steps of all environments of all ranks together"""
    num_envs: int = 8
    """environments of each rank"""
    num_steps: int = 64
    num_minibatches: int = 4
    update_epochs: int = 8
    learning_rate: float = 1e-3
    gamma: float = 0.98
    gae_lambda: float = 0.9
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    seed: int = 1


def network(num_outputs, last_gain):
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = network(2, 0.01)
        self.critic = network(1, 1.0)

    def forward(self, obs):
        return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # ranks must not act alike
    agent = Agent().to(device)
    fastsync.attach(agent)  # the line: weights of rank 0 everywhere now, mean gradients after every backward()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    envs = gymnasium.make_vec("CartPole-v1", num_envs=args.num_envs)
    # Environment i gets this seed + i.
    next_obs = torch.as_tensor(envs.reset(seed=args.seed + rank * args.num_envs)[0], device=device)
    rows = (args.num_steps, args.num_envs)
    obs = torch.empty(*rows, 4, device=device)
    actions = torch.empty(rows, dtype=torch.long, device=device)
    rewards, log_probs, advantages = (torch.empty(rows, device=device) for _ in range(3))
    terminated, done, valid = (torch.empty(rows, dtype=torch.bool, device=device) for _ in range(3))
    restarting = torch.zeros(args.num_envs, dtype=torch.bool, device=device)
    episode_return, finished = torch.zeros(args.num_envs, device=device), deque(maxlen=50)

    num_updates = args.total_timesteps // (args.num_steps * args.num_envs * world_size)
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / num_updates)
        for t in range(args.num_steps):
            with torch.no_grad():
                policy, _ = agent(next_obs)
            obs[t], actions[t], valid[t] = next_obs, policy.sample(), ~restarting
            log_probs[t] = policy.log_prob(actions[t])
            step = [torch.as_tensor(x, device=device) for x in envs.step(actions[t].cpu().numpy())[:4]]
            next_obs, rewards[t], terminated[t], truncated = step
            # The step after the last of an episode restarts the environment; nothing is to be learnt from it.
            done[t] = restarting = terminated[t] | truncated
            episode_return += rewards[t]
            finished.extend(episode_return[restarting].tolist())
            episode_return[restarting] = 0

        with torch.no_grad():
            values = agent(torch.cat([obs, next_obs[None]]))[1]
        advantage = torch.zeros(args.num_envs, device=device)
        for t in reversed(range(args.num_steps)):
            # The row after an episode's end still holds its last observation, which a time limit's bootstrap needs.
            delta = rewards[t] + args.gamma * values[t + 1] * ~terminated[t] - values[t]
            advantage = advantages[t] = delta + args.gamma * args.gae_lambda * ~done[t] * advantage
        returns = advantages + values[:-1]

        batch = [x[valid] for x in (obs, actions, log_probs, advantages, returns)]
        for _ in range(args.update_epochs):
            # The same number of minibatches on every rank, however many rows are valid: ranks meet in each backward().
            for rows_of_minibatch in torch.randperm(len(batch[0]), device=device).tensor_split(args.num_minibatches):
                mb_obs, mb_actions, mb_log_probs, mb_advantages, mb_returns = (x[rows_of_minibatch] for x in batch)
                policy, value = agent(mb_obs)
                ratio = (policy.log_prob(mb_actions) - mb_log_probs).exp()
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.minimum(ratio * mb_advantages, clipped * mb_advantages).mean()
                value_loss = 0.5 * (value - mb_returns).square().mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    fastsync.check_consistency(agent)
    mean_return = dist_mean(torch.tensor(finished, device=device).mean()).item()
    if rank == 0:
        print(f"mean return of the last {len(finished)} episodes of each rank, {world_size} ranks: {mean_return:.1f}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    torch.set_num_threads(1)  # as torchrun does; for networks this small more threads are slower
    with process_group(timeout=60) as device:
        main(arguments, device)
