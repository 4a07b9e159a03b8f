"""SAC on Pendulum in one file, as CleanRL writes it: three optimizers, and so three lines.

    torchrun --standalone --nproc-per-node=2 examples/cleanrl_sac.py
    python examples/cleanrl_sac.py

Each network that has an optimizer of its own is attached by itself; a lone parameter, the logarithm of the temperature,
too. Every rank has environments and a replay buffer of its own. Target networks only follow, and need nothing.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import gymnasium
    import tyro
except ImportError:
    raise SystemExit("this example needs gymnasium and tyro: pip install 'gymnasium>=1.4' tyro") from None

OBSERVED, ACTED = 3, 1  # widths of Pendulum's observations and actions


@dataclass
class Args:
    total_timesteps: int = 16_000
    """steps of all environments of all ranks together"""
    num_envs: int = 4
    """environments of each rank"""
    learning_starts: int = 800
    """steps of each rank with random actions"""
    batch_size: int = 128
    gamma: float = 0.98
    tau: float = 0.02
    learning_rate: float = 2e-3
    seed: int = 1


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network(OBSERVED, 2 * ACTED)

    def forward(self, observations):
        """Actions within ±1, and the logarithms of their densities."""
        mean, log_std = self.layers(observations).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        # 2 (log 2 - x - softplus(-2x)) is log(1 - tanh(x)²) without its overflow.
        squashing = 2 * (0.6931472 - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal.log_prob(raw) - squashing).sum(dim=-1)


class Critics(nn.Module):
    """Two of them; the smaller value counts."""

    def __init__(self):
        super().__init__()
        self.both = nn.ModuleList([network(OBSERVED + ACTED, 1), network(OBSERVED + ACTED, 1)])

    def forward(self, observations, actions):
        inputs = torch.cat([observations, actions], dim=-1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.both])


def network(num_inputs, num_outputs):
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


class ReplayBuffer:
    """Transitions: observations, actions, rewards, next observations."""

    def __init__(self, capacity, device):
        widths = (OBSERVED, ACTED, 1, OBSERVED)
        self.columns = [torch.empty(capacity, width, device=device) for width in widths]
        self.size = 0

    def add(self, *rows):
        for column, new in zip(self.columns, rows, strict=True):
            column[self.size : self.size + len(new)] = new
        self.size += len(rows[0])

    def sample(self, num):
        chosen = torch.randint(self.size, (num,), device=self.columns[0].device)
        return [column[chosen] for column in self.columns]


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # ranks must not act alike
    actor, critics = Actor().to(device), Critics().to(device)
    log_alpha = torch.zeros(1, device=device, requires_grad=True)
    # The lines: weights of rank 0 everywhere now, mean gradients after every backward().
    fastsync.attach(actor)
    critics_sync = fastsync.attach(critics)
    fastsync.attach([log_alpha])
    targets = copy.deepcopy(critics).requires_grad_(False)  # after attach, so that they too are rank 0's
    actor_optimizer, critics_optimizer, alpha_optimizer = (
        torch.optim.Adam(parameters, lr=args.learning_rate)
        for parameters in (actor.parameters(), critics.parameters(), [log_alpha])
    )

    steps = args.total_timesteps // (args.num_envs * world_size)
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec("Pendulum-v1", args.num_envs, vector_kwargs=same_step)
    observations, _ = envs.reset(seed=args.seed + rank * args.num_envs)
    observations = torch.as_tensor(observations, device=device)
    replay = ReplayBuffer(steps * args.num_envs, device)
    running, finished = torch.zeros(args.num_envs), []

    for step in range(steps):
        with torch.no_grad():
            actions, _ = actor(observations)
        if step * args.num_envs < args.learning_starts:
            actions = 2 * torch.rand_like(actions) - 1
        after, rewards, _, truncated, infos = envs.step(2 * actions.cpu().numpy())
        after, rewards = torch.as_tensor(after, device=device), torch.as_tensor(rewards).float()
        running += rewards
        reached = after.clone()
        for ended in truncated.nonzero()[0]:  # Pendulum only ends by time, which is no end to its value
            reached[ended] = torch.as_tensor(infos["final_obs"][ended])
            finished.append(running[ended].item())
            running[ended] = 0
        replay.add(observations, actions, rewards.unsqueeze(1).to(device) / 10, reached)
        observations = after
        if step * args.num_envs < args.learning_starts:
            continue

        seen, acted, reward, seen_next = replay.sample(args.batch_size)
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            acted_next, log_prob_next = actor(seen_next)
            value = targets(seen_next, acted_next).amin(dim=0) - alpha * log_prob_next
            wanted = reward.squeeze(1) + args.gamma * value
        critics_optimizer.zero_grad()
        (critics(seen, acted) - wanted).square().mean(dim=1).sum().backward()
        critics_optimizer.step()

        actor_optimizer.zero_grad()
        proposed, log_prob = actor(seen)
        with critics_sync.no_sync():  # this backward goes through the critics, whose gradients nobody wants then
            (alpha * log_prob - critics(seen, proposed).amin(dim=0)).mean().backward()
        actor_optimizer.step()

        alpha_optimizer.zero_grad()
        (-log_alpha.exp() * (log_prob.detach() - ACTED)).mean().backward()
        alpha_optimizer.step()

        with torch.no_grad():
            for target, trained in zip(targets.parameters(), critics.parameters(), strict=True):
                target.lerp_(trained, args.tau)

    for trained in (actor, critics, targets, nn.ParameterList([log_alpha])):
        fastsync.check_consistency(trained)
    mean_return = dist_mean(torch.tensor(finished[-8:], device=device).mean()).item()
    if rank == 0:
        print(f"mean return of the last 8 episodes of each rank, {world_size} ranks: {mean_return:.1f}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    torch.set_num_threads(1)  # as torchrun does; for networks this small more threads are slower
    with process_group(timeout=60) as device:
        main(arguments, device)
