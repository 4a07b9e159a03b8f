"""RSL-RL's way of synchronising, an algorithm with reduce_parameters() between backward and clip, by fastsync.

    torchrun --standalone --nproc-per-node=2 examples/rsl_rl_reduce_parameters.py
    python examples/rsl_rl_reduce_parameters.py

Twice: with one call as the body of reduce_parameters(), and attached, which needs no reduce_parameters() at all and
clips by norms that are known already. Both train the same networks.
"""

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group


def network(num_outputs):
    return nn.Sequential(nn.Linear(12, 64), nn.ELU(), nn.Linear(64, num_outputs))


class Algorithm:
    max_grad_norm = 1.0

    def __init__(self, device):
        self.actor, self.critic = network(4).to(device), network(1).to(device)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=3e-3)
        self.set_up_sync()

    def set_up_sync(self):
        """RSL-RL's broadcast_parameters()."""
        for parameter in (*self.actor.parameters(), *self.critic.parameters()):
            dist.broadcast(parameter.data, src=0)

    def update(self, observations, actions, returns):
        loss = nn.functional.mse_loss(self.actor(observations), actions)
        loss = loss + nn.functional.mse_loss(self.critic(observations), returns)
        self.optimizer.zero_grad()
        loss.backward()
        self.reduce_parameters()
        self.clip_gradients()
        self.optimizer.step()
        return loss.detach()

    def reduce_parameters(self):
        """In place of: concatenate, all-reduce, divide, copy back. Gradients that are None on all ranks stay None."""
        fastsync.all_reduce_gradients([*self.actor.parameters(), *self.critic.parameters()])

    def clip_gradients(self):
        nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_grad_norm)
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)


class AttachedAlgorithm(Algorithm):
    def set_up_sync(self):
        # Attached apart, because they are clipped apart: each synchronizer knows the norm of its own network.
        self.actor_sync = fastsync.attach(self.actor)
        self.critic_sync = fastsync.attach(self.critic)

    def reduce_parameters(self):
        pass  # done when backward() returns

    def clip_gradients(self):
        fastsync.clip_grad_norm_(self.actor_sync, self.max_grad_norm)
        fastsync.clip_grad_norm_(self.critic_sync, self.max_grad_norm)


def train(algorithm_class, device, num_updates=150):
    """The algorithm after imitating an actor and a critic, and its first and last loss over all ranks."""
    torch.manual_seed(dist.get_rank())  # every rank draws weights and data of its own
    teacher = torch.linspace(-1, 1, 12 * 5, device=device).sin().reshape(12, 5)
    algorithm = algorithm_class(device)
    losses = []
    for _ in range(num_updates):
        observations = torch.randn(256, 12, device=device)
        actions, returns = (observations @ teacher).tanh().split([4, 1], dim=1)
        losses.append(dist_mean(algorithm.update(observations, actions, returns)).item())
    for trained in (algorithm.actor, algorithm.critic):
        fastsync.check_consistency(trained)
    return algorithm, losses[0], losses[-1]


def largest_difference(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def main(device):
    called, first_loss, last_loss = train(Algorithm, device)
    attached, *_ = train(AttachedAlgorithm, device)
    difference = max(
        largest_difference(called.actor, attached.actor), largest_difference(called.critic, attached.critic)
    )
    if dist.get_rank() == 0:
        print(f"loss {first_loss:.3f} -> {last_loss:.3f}; attached, weights differ by at most {difference:.0e}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
