"""Models to be trained, with synthetic data: a policy of perceptrons, and a GPT.

Written out, so that they need no other package; shapes are those of the papers at scale "full", and
small enough for a laptop's CPU at "small".
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from benchmarks.baselines.gradients import Gradients

Scale = Literal["small", "full"]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Training:
    """A model, its data, and its optimizer."""

    module: Callable[[], nn.Module]
    """Makes it, from torch's global generator. Its forward takes a batch and returns the loss."""
    batch: Callable[[int, torch.Generator], Batch]
    """Makes that many samples on the CPU."""
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    """With a learning rate of 0. It does all of its work, and the weights stay as they are, so that the gradients of
    every step can be compared with the same mean."""
    batch_size: int
    """Samples in each rank's batch by default."""
    repetitions: int
    """How many steps are timed by default."""
    dimensions: Mapping[str, int]
    """What the scale means, for the rows."""


class ModelGradients(Gradients):
    """The gradients of a model on batches that differ between ranks, from one backward a batch."""

    def __init__(self, training: Training, batch_size: int, device: torch.device, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._module = training.module().to(device)

        def batch_of(rank: int) -> Batch:
            generator = torch.Generator().manual_seed(seed + 1 + rank)
            return tuple(tensor.to(device) for tensor in training.batch(batch_size, generator))

        self._batch = batch_of(dist.get_rank())
        # On a GPU some sums have no fixed order; on a CPU the difference is 0.
        noise = (self._backward(self._batch) - self._backward(self._batch)).abs().max().item()
        ranks = range(dist.get_world_size())
        # The largest difference of one repetition is not the largest there can be.
        lengths = [shape.numel() for shape in self.shapes]
        super().__init__((self._backward(batch_of(rank)) for rank in ranks), lengths, device, 8 * noise)
        self._module.zero_grad()

    def model(self) -> nn.Module:
        return _OnOneBatch(copy.deepcopy(self._module), self._batch)

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the parameters."""
        return [parameter.shape for parameter in self._module.parameters()]

    def _backward(self, batch: Batch) -> Tensor:
        model = _OnOneBatch(copy.deepcopy(self._module), batch)  # buffers change in a forward
        model().backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


class _OnOneBatch(nn.Module):
    def __init__(self, module: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.module, self.batch = module, batch

    def forward(self) -> Tensor:
        return self.module(*self.batch)


class Policy(nn.Module):
    """An actor and a critic of two hidden layers each, as policies for vectors have, with a loss for both."""

    def __init__(self, num_inputs: int, num_actions: int, width: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(num_inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
            )
            for outputs in (num_actions, 1)
        )

    def forward(self, observations: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.actor(observations), actions) + F.mse_loss(self.critic(observations), targets)


def _policy(num_inputs: int, num_actions: int, width: int, batch_size: int, repetitions: int) -> Training:
    def batch(size: int, generator: torch.Generator) -> Batch:
        actions = torch.randint(num_actions, (size,), generator=generator)
        observations, targets = (torch.randn(size, n, generator=generator) for n in (num_inputs, 1))
        return observations, actions, targets

    return Training(
        module=lambda: Policy(num_inputs, num_actions, width),
        batch=batch,
        optimizer=lambda parameters: Adam(parameters, lr=0.0, eps=1e-5),
        batch_size=batch_size,
        repetitions=repetitions,
        dimensions={"inputs": num_inputs, "width": width, "actions": num_actions},
    )


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, features: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm1(features)).unflatten(-1, (3, self._num_heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, position, width of a head]
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        features = features + self.projection(attended.transpose(1, 2).flatten(2))
        return features + self.perceptron(self.norm2(features))


class GPT(nn.Module):
    """Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout, with its loss.

    Args:
        vocabulary: number of tokens; 50,257 in the paper.
        context: longest sequence.
        num_layers: blocks.
        width: of the features.
        num_heads: of the attention.
    """

    def __init__(self, vocabulary: int, context: int, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        features = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(features)), self.tokens.weight)  # the embedding's weights, once more
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


def _gpt(
    vocabulary: int, context: int, num_layers: int, width: int, num_heads: int, batch_size: int, repetitions: int
) -> Training:
    def batch(size: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (size, context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Training(
        module=lambda: GPT(vocabulary, context, num_layers, width, num_heads),
        batch=batch,
        optimizer=lambda parameters: AdamW(parameters, lr=0.0),
        batch_size=batch_size,
        repetitions=repetitions,
        dimensions={"layers": num_layers, "width": width, "vocabulary": vocabulary, "context": context},
    )


TRAININGS: dict[str, dict[Scale, Training]] = {
    "mlp": {
        "small": _policy(4, 2, width=64, batch_size=256, repetitions=200),
        "full": _policy(376, 17, width=256, batch_size=4096, repetitions=100),
    },
    "gpt2": {
        "small": _gpt(8192, 64, num_layers=4, width=256, num_heads=4, batch_size=2, repetitions=10),
        "full": _gpt(50257, 1024, num_layers=12, width=768, num_heads=12, batch_size=4, repetitions=10),
    },
}
