"""A small GPT between sites that exchange how far their weights have moved, every 20 steps; gradients never travel.

    torchrun --standalone --nproc-per-node=2 examples/diloco_gpt.py
    python examples/diloco_gpt.py

Each rank is a site, and learns to write Python's manual from its own part of it. `--sync-every 50` shows what fewer
exchanges cost, `--compression top-k` what fewer values cost.
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import fastsync
from fastsync.distributed import dist_mean, process_group

WIDTH, LAYERS, LENGTH, BATCH = 64, 2, 64, 16
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
COMPRESSIONS = {"int8": fastsync.Compression("int8", error_feedback=True), "top-k": fastsync.TopK()}


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text):
        hidden = self.tokens(text) + self.places.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def loss_of(model, text, generator):
    first = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    samples = text[first + torch.arange(LENGTH + 1)].long()
    return cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


def main(device, arguments=None):
    parser = argparse.ArgumentParser(description="A small GPT between sites, by DiLoCo.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="int8")
    options = parser.parse_args(arguments)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    unseen, *parts = text.split(len(text) // (dist.get_world_size() + 1))  # each site its own part
    part = parts[dist.get_rank()].to(device)

    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    compression = COMPRESSIONS[options.compression]
    with fastsync.DiLoCo(model, optimizer, sync_every=options.sync_every, compression=compression):  # the line
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss_of(model, part, generator).backward()
            optimizer.step()
    with torch.no_grad():
        loss = dist_mean(torch.stack([loss_of(model, unseen.to(device), generator) for _ in range(8)]).mean())
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f} on unseen text, after {options.steps // options.sync_every} exchanges")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
