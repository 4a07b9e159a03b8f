"""One training on 1, on 2 and on 4 ranks, and on 3 of which one is killed: it ends with the same bits each time.

python examples/same_bits.py
"""

import hashlib
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastsync

NUM_STEPS, MICRO_BATCHES = 50, 8


def train(rank: int, num_ranks: int, folder: str, victim: int | None) -> None:
    torch.set_num_threads(1)  # the same on all ranks of all runs
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=num_ranks)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = fastsync.attach(model, micro_batches=MICRO_BATCHES)
    elastic = fastsync.Elastic(model, optimizer, sync, store=dist.FileStore(f"{folder}/members", -1))
    for step in elastic.steps(NUM_STEPS):
        with step:
            optimizer.zero_grad()
            for index in sync.micro_batches():
                if rank == victim and step.index == NUM_STEPS // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                data = torch.Generator().manual_seed(step.index * MICRO_BATCHES + index)
                inputs = torch.randn(16, 32, generator=data)
                (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            fastsync.clip_grad_norm_(sync, 1.0)
            optimizer.step()
    if elastic.rank == 0:
        state = [each for of_one in optimizer.state.values() for each in of_one.values()]
        values = b"".join(each.detach().numpy().tobytes() for each in [*model.parameters(), *state])
        Path(folder, "hash").write_text(hashlib.sha256(values).hexdigest())


def run(num_ranks: int, victim: int | None = None) -> str:
    """Returns the sha256 of the weights and the optimizer's state."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=train, args=(rank, num_ranks, folder, victim)) for rank in range(num_ranks)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        return Path(folder, "hash").read_text()


if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastsync", "torch._dynamo"])  # imported once for all ranks
    for num_ranks, victim in [(1, None), (2, None), (4, None), (3, 1)]:
        print(
            f"{run(num_ranks, victim)}  {num_ranks} ranks{'' if victim is None else ', of which one is killed'}",
            flush=True,
        )
