"""A training that goes on in the same step when a rank is lost.

    fastsync launch local -n 4 --replace examples/elastic.py

Kill one of its processes meanwhile. The others go on at once, and another one joins them.
"""

import argparse
import os
import time

import torch
from torch import nn

import fastsync

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--seconds", type=float, default=0.01, help="what a step takes at least")
options = parser.parse_args()

with fastsync.distributed.process_group(timeout=60):
    torch.manual_seed(1)
    target = torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100)
    sync = fastsync.attach(model)
    elastic = fastsync.Elastic(
        model,
        optimizer,
        sync,
        state=[scheduler],
        on_change=lambda members: print(f"process {os.getpid()}: ranks {members} go on"),
    )
    for step in elastic.steps(options.steps):
        with step:
            data = torch.Generator().manual_seed(step.index * elastic.num_ranks + elastic.rank)
            inputs = torch.randn(32, 64, generator=data)
            loss = (model(inputs) - inputs @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(options.seconds)
        if step.index % 200 == 0 and elastic.rank == 0:
            print(f"step {step.index}: loss {loss.item():.3f} on {elastic.num_ranks} ranks")
    fastsync.check_consistency(model, process_group=elastic.group)
    if elastic.rank == 0:
        print(f"done: loss {loss.item():.3f} on {elastic.num_ranks} ranks")
