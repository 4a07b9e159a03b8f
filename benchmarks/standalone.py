"""DDP beside fastsync on this machine's CPUs, in one file: torchrun --nproc-per-node=2 benchmarks/standalone.py

A sample is the time of one backward that leaves the mean over the ranks in every .grad, on the slowest rank. Methods
take turns, in an order that changes. Before they are timed and after, their results are compared with all_reduce's.
"""

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastsync

METHODS = {  # what travels, and how far from the mean a value may end; gradients are between -1 and 1
    "DDP": (None, 0.0),
    "DDP with fastsync's hook, full width": ("none", 0.0),
    "attach, full width": ("none", 0.0),
    "attach, fp16": ("fp16", 2**-9),
    "attach, int8 with error feedback": (fastsync.Compression("int8", error_feedback=True), 2.1 / 127),  # two steps
}


class Model(torch.nn.Module):  # whose gradients are given: backward costs one multiplication each
    def __init__(self, grads: list[torch.Tensor]) -> None:
        super().__init__()
        self.grads, self.weights = grads, torch.nn.ParameterList(torch.zeros_like(grad) for grad in grads)

    def forward(self) -> torch.Tensor:
        return torch.stack([(weight * grad).sum() for weight, grad in zip(self.weights, self.grads, strict=True)]).sum()


def build(method: str, grads: list[torch.Tensor]) -> torch.nn.Module:
    (compression, _), model, group = METHODS[method], Model(grads), dist.new_group()  # connections of its own
    if method.startswith("attach"):
        fastsync.attach(model, compression, process_group=group)
        return model
    ddp = DistributedDataParallel(model, process_group=group)
    if compression is not None:
        fastsync.register_comm_hook(ddp, compression)
    return ddp


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--numel", type=int, default=12_595_200, help="parameters of the model, about")
parser.add_argument("--steps", type=int, default=20, help="timed steps of each method, after 10 that are not")
options = parser.parse_args()
"RANK" in os.environ or parser.error("start it by torchrun --nproc-per-node=2 benchmarks/standalone.py")
dist.init_process_group("gloo")
ranks, cores, width = dist.get_world_size(), len(os.sched_getaffinity(0)), int((options.numel // 12) ** 0.5)
generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has gradients of its own
grads = [2 * torch.rand(shape, generator=generator) - 1 for shape in [(width, width), (width,)] * 12]
mean = torch.cat([grad.flatten() for grad in grads]) / ranks
dist.all_reduce(mean)
models = {method: build(method, grads) for method in METHODS}
order, turns, samples = list(METHODS), random.Random(0), torch.zeros(len(METHODS), 10 + options.steps)
for step in range(10 + options.steps):
    turns.shuffle(order)  # alike on all ranks
    for method in order:
        models[method].zero_grad()
        loss = models[method]()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        samples[list(METHODS).index(method), step] = time.perf_counter() - began
        if step in (9, 9 + options.steps):
            off = (torch.cat([p.grad.flatten() for p in models[method].parameters()]) - mean).abs().max().item()
            if not off <= METHODS[method][1] + 1e-6 * (ranks > 2):
                raise SystemExit(f"{method} is WRONG: a value is {off:.3g} from the mean")
dist.all_reduce(samples, dist.ReduceOp.MAX)
low, median, high = samples[:, 10:].quantile(torch.tensor([0.1, 0.5, 0.9]), dim=1) * 1e3
if dist.get_rank() == 0:
    print(f"{mean.numel():,} float32 parameters, {ranks} ranks, {cores} cores, torch {torch.__version__}\n")
    print("| | step in ms, median | 10 to 90 % of steps | DDP's time ÷ this |\n|---|---|---|---|")
    for name, half, few, most in zip(METHODS, median, low, high, strict=True):
        print(f"| {name} | {half:.1f} | {few:.1f} to {most:.1f} | {median[0] / half:.2f} |")
dist.destroy_process_group()
