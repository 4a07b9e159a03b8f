"""skrl's way of synchronising, model by model on gradients that a GradScaler has scaled, by fastsync.

    torchrun --standalone --nproc-per-node=2 examples/skrl_per_model.py
    python examples/skrl_per_model.py

At one step the value loss of the last rank overflows. The mean of an infinite gradient is infinite on every rank, so
all of them skip that step and lower the scale alike.
"""

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group

NUM_STEPS = 60
BAD_STEP = 20


def network(num_outputs):
    return nn.Sequential(nn.Linear(12, 64), nn.ELU(), nn.Linear(64, num_outputs))


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every rank draws weights and data of its own
    policy, value = network(4).to(device), network(1).to(device)
    # In place of policy.broadcast_parameters() here and policy.reduce_parameters() below.
    policy_sync, value_sync = fastsync.attach(policy), fastsync.attach(value)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3)
    scaler = torch.amp.GradScaler(device.type)
    teacher = torch.linspace(-1, 1, 12 * 5, device=device).sin().reshape(12, 5)

    losses, skipped = [], []
    for step in range(NUM_STEPS):
        observations = torch.randn(256, 12, device=device)
        actions, returns = (observations @ teacher).tanh().split([4, 1], dim=1)
        if step == BAD_STEP and rank == world_size - 1:
            returns = returns * 1e30
        with torch.autocast(device.type, torch.float16):
            policy_loss = nn.functional.mse_loss(policy(observations), actions)
            value_loss = nn.functional.mse_loss(value(observations), returns)
            loss = policy_loss + value_loss

        optimizer.zero_grad()
        scaler.scale(loss).backward()  # leaves the mean of the scaled gradients
        scaler.unscale_(optimizer)
        fastsync.clip_grad_norm_(policy_sync, 1.0, optimizer=optimizer, scaler=scaler)
        fastsync.clip_grad_norm_(value_sync, 1.0, optimizer=optimizer, scaler=scaler)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < scale:
            skipped.append(step)
        losses.append(dist_mean(loss.detach()).item())

    for model in (policy, value):
        fastsync.check_consistency(model)
    skipped_by_rank = [None] * world_size
    dist.all_gather_object(skipped_by_rank, skipped)
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; steps skipped, by rank: {skipped_by_rank}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
