"""A small transformer in two pipeline stages; the gradients of ranks with the same stage are averaged by fastsync.

    torchrun --standalone --nproc-per-node=2 examples/pipeline_transformer.py
    torchrun --standalone --nproc-per-node=4 examples/pipeline_transformer.py
    python examples/pipeline_transformer.py

Four ranks are two pipelines of two stages, two ranks one pipeline, and one rank has both stages by itself. The model
learns to tell the sum of the first and the last token of a sequence.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import fastsync
from fastsync.distributed import process_group

NUM_TOKENS, LENGTH, WIDTH = 4, 6, 32
NUM_STAGES, NUM_MICRO_BATCHES = 2, 4
BATCH = 64  # of each pipeline
NUM_STEPS = 100


def block():
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.block = block()

    def forward(self, tokens):
        return self.block(self.embedding(tokens) + self.places)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = block()
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, hidden):
        return self.head(self.block(hidden).mean(dim=1))


def main(device):
    stage_ranks = min(NUM_STAGES, dist.get_world_size())
    mesh = init_device_mesh(
        device.type, (stage_ranks, dist.get_world_size() // stage_ranks), mesh_dim_names=("stage", "data")
    )
    indices = range(mesh.get_local_rank("stage"), NUM_STAGES, stage_ranks)
    torch.manual_seed(0)
    modules = nn.ModuleDict({str(index): [First, Last][index]() for index in indices}).to(device)
    sync = fastsync.attach(modules, "fp16", process_group=mesh["data"], overlap=False)  # the line

    group = mesh.get_group("stage")
    stages = [PipelineStage(modules[str(index)], index, NUM_STAGES, device, group=group) for index in indices]
    schedule = ScheduleInterleaved1F1B(stages, NUM_MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam(modules.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))  # each pipeline its own data
    losses = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(NUM_TOKENS, (BATCH, LENGTH), generator=generator).to(device)
        targets = (tokens[:, 0] + tokens[:, -1]) % NUM_TOKENS
        of_micro_batches = []
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if 0 in indices else []),
            target=targets if NUM_STAGES - 1 in indices else None,
            losses=of_micro_batches,
            return_outputs=False,
        )
        sync.synchronize()  # and this one
        optimizer.step()
        losses += [torch.stack(of_micro_batches).mean().item()] if of_micro_batches else []

    fastsync.check_consistency(modules, process_group=mesh["data"])
    if losses and mesh.get_local_rank("data") == 0:
        stats = sync.stats()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {stats.num_steps} steps over {mesh['data'].size()} pipelines")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
