"""A mixture of experts: all ranks have the dense layers, and each expert is on some ranks only. One norm clips both.

    torchrun --standalone --nproc-per-node=4 examples/mixture_of_experts.py
    torchrun --standalone --nproc-per-node=2 examples/mixture_of_experts.py
    python examples/mixture_of_experts.py

On four ranks, ranks 0 and 1 have two of the four experts each, and ranks 2 and 3 have the same again. A token travels
to the rank of its expert and back. The inputs come in four kinds, and each kind has a function of its own to be learnt.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import fastsync
from fastsync.distributed import dist_mean, process_group

NUM_EXPERTS, SIZE, WIDTH = 4, 8, 32
BATCH = 256  # of all ranks together
NUM_STEPS = 150


class Experts(nn.Module):
    """The experts of this rank. The ranks of the group have all of them."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        num_local = NUM_EXPERTS // group.size()
        self.local = nn.ModuleList()
        for index in range(group.rank() * num_local, (group.rank() + 1) * num_local):
            torch.manual_seed(1 + index)  # an expert begins alike wherever it is
            self.local.append(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)))

    def forward(self, tokens, chosen):
        """Takes tokens [n, WIDTH] and the expert of each [n], and returns what the experts make of them."""
        num_ranks, num_local = self.group.size(), len(self.local)
        leaving = chosen.bincount(minlength=NUM_EXPERTS)  # how many, for each expert
        arriving = torch.empty_like(leaving)  # how many from each rank, for each expert of this rank
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, received = (counts.view(num_ranks, num_local).sum(1).tolist() for counts in (leaving, arriving))

        by_rank = chosen.argsort(stable=True)
        here = all_to_all_single_autograd(tokens[by_rank], received, sent, self.group)
        local = torch.arange(num_local, device=chosen.device).repeat(num_ranks).repeat_interleave(arriving)
        by_expert = local.argsort(stable=True)
        parts = here[by_expert].split(local.bincount(minlength=num_local).tolist())
        # An expert without tokens takes part with none, so that its gradients are zeros and every rank has some.
        made = torch.cat([expert(part) for expert, part in zip(self.local, parts, strict=True)])[by_expert.argsort()]
        return all_to_all_single_autograd(made, sent, received, self.group)[by_rank.argsort()]


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.last = nn.Linear(SIZE, WIDTH), nn.Linear(SIZE, NUM_EXPERTS), nn.Linear(WIDTH, SIZE)

    def forward(self, inputs, experts):
        probability, chosen = self.gate(inputs).softmax(dim=1).max(dim=1)
        hidden = self.first(inputs)
        return self.last(hidden + probability[:, None] * experts(hidden, chosen))


def main(device):
    expert_ranks = min(2, dist.get_world_size())
    shape = (dist.get_world_size() // expert_ranks, expert_ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copy", "expert"))
    dense, experts = Dense().to(device), Experts(mesh.get_group("expert")).to(device)

    # An expert gets tokens, and so gradients, from several ranks. If each loss is divided by the number of all ranks,
    # all gradients are sums: over all ranks, or over the ranks that have the same experts.
    of_dense = fastsync.attach(dense, op="sum")
    of_experts = fastsync.attach(experts, op="sum", process_group=mesh["copy"])
    optimizer = torch.optim.Adam([*dense.parameters(), *experts.parameters()], lr=5e-3)

    generator = torch.Generator().manual_seed(0)
    functions = torch.randn(NUM_EXPERTS, SIZE, SIZE, generator=generator)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        kinds = torch.randint(NUM_EXPERTS, (BATCH,), generator=generator)
        inputs = torch.randn(BATCH, SIZE, generator=generator)
        inputs[range(BATCH), kinds] += 4.0
        targets = torch.einsum("ni,nij->nj", inputs, functions[kinds]).tanh()
        mine, wanted = (each.chunk(dist.get_world_size())[dist.get_rank()].to(device) for each in (inputs, targets))

        loss = nn.functional.mse_loss(dense(mine, experts), wanted)
        optimizer.zero_grad()
        (loss / dist.get_world_size()).backward()
        norms.append(fastsync.clip_grad_norm_([of_dense, of_experts], max_norm=1.0))
        optimizer.step()
        losses.append(dist_mean(loss))

    fastsync.check_consistency(dense)
    fastsync.check_consistency(experts, process_group=mesh["copy"])
    if dist.get_rank() == 0:
        where = f"{len(experts.local)} of {NUM_EXPERTS} experts a rank"
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; norm of the first step {norms[0]:.4f}, {where}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
