"""The policy network: an actor and a critic, with or without layers in common, convolutions, and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

import fastsync._ppo  # noqa: F401 registers torch.ops.fastsync.perceptron
from fastsync.ppo.actions import make_distribution
from fastsync.ppo.config import Activation, Settings
from fastsync.ppo.envs.dictionaries import PackedSpace, has_images, images_of, numbers_of
from fastsync.ppo.memory import Memory, MemoryState
from fastsync.ppo.normalize import ObservationNormalizer

_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}
_IMAGE_FEATURES = 512

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class ActorCritic(nn.Module):
    """The outputs of an action distribution and a state value, from observations.

    The trunk is what actor and critic share: nothing, or layers, or layers and an LSTM. Weights are orthogonal with
    gain sqrt(2), 0.01 for the distribution's outputs so that the first policy is nearly uniform, and 1 for the value;
    biases are 0 (Engstrom et al., "Implementation Matters in Deep RL", ICLR 2020). Images go through the network of
    Mnih et al. ("Human-level control", Nature 2015). Of a dictionary with images each has such a network of its own,
    and the hidden layers get what these make of them beside the numbers.
    """

    def __init__(
        self,
        observation_space: spaces.Space,  # type: ignore[type-arg]
        action_space: spaces.Space,  # type: ignore[type-arg]
        settings: Settings,
    ) -> None:
        super().__init__()
        assert isinstance(observation_space, spaces.Box)
        shape = observation_space.shape
        sees_images = self._sees_images = has_images(observation_space)
        packed = observation_space if isinstance(observation_space, PackedSpace) else None
        self._num_packed = None if packed is None else packed.num_numbers
        auto_shared = sees_images or settings.is_recurrent
        self.is_shared = settings.network == "shared" or (settings.network == "auto" and auto_shared)

        def body() -> tuple[nn.Sequential, int]:
            if packed is not None:
                extractor = _Extractor(packed)
                sizes = (extractor.num_features, *settings.hidden_sizes)
                return nn.Sequential(extractor, *_layers(sizes, settings.activation)), sizes[-1]
            if sees_images:
                return nn.Sequential(_Convolutions(shape)), _IMAGE_FEATURES
            sizes = (shape[0], *settings.hidden_sizes)
            return _layers(sizes, settings.activation), sizes[-1]

        self.normalizer: ObservationNormalizer | None = None
        if settings.norm_observations and packed is not None:
            self.normalizer = _PackedNormalizer(packed.num_numbers)
        elif settings.norm_observations and not sees_images:
            self.normalizer = ObservationNormalizer(shape[0])
        self.distribution = make_distribution(action_space, log_std_init=settings.log_std_init)
        self.memory: Memory | None = None
        if self.is_shared:
            self.trunk, width = body()
            if settings.is_recurrent:
                self.memory = Memory(width, settings.lstm_size)
                width = settings.lstm_size
            self.actor: nn.Sequential = nn.Sequential()
            self.critic: nn.Sequential = nn.Sequential()
        else:
            self.trunk = nn.Sequential()
            self.actor, width = body()
            self.critic, _ = body()
        self.actor.append(initialized(nn.Linear(width, self.distribution.num_outputs), gain=0.01))
        self.critic.append(initialized(nn.Linear(width, 1), gain=1.0))
        if not sees_images:
            self.actor = Perceptron(self.actor, settings.activation)
            self.critic = Perceptron(self.critic, settings.activation)

    def forward(
        self, observations: Tensor, state: MemoryState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, MemoryState | None]:
        """Asks actor and critic.

        Args:
            observations: [..., *observation_shape]; with a memory [T, N, ...], in the order of time.
            state: with a memory, what it held before the first row.
            starts: with a memory, [T, N] bool: the row is the first of an episode, so the memory begins anew.

        Returns:
            The distribution's outputs [..., num_outputs], the expected discounted return [...], and with a memory its
            state after the last row.
        """
        features, state = self.features(observations, state, starts)
        return self.outputs(features), self.value(features), state

    def features(
        self, observations: Tensor, state: MemoryState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, MemoryState | None]:
        """Computes what actor and critic are given; arguments as in ``forward``."""
        if self.normalizer is not None:
            observations = self.normalizer(observations)
        features = self.trunk(observations) if self.is_shared else observations
        if self.memory is None:
            return features, None
        assert state is not None
        assert starts is not None
        return self.memory(features, state, starts)  # type: ignore[no-any-return]

    def features_of_row(
        self, observations: Tensor, state: MemoryState | None, starts: Tensor
    ) -> tuple[Tensor, MemoryState | None]:
        """Computes ``features`` of a single row [N, ...], and the memory after it."""
        if state is None:
            return self.features(observations)
        features, state = self.features(observations.unsqueeze(0), state, starts.unsqueeze(0))
        return features.squeeze(0), state

    def outputs(self, features: Tensor) -> Tensor:
        """The distribution's outputs [..., num_outputs]. In full precision also under autocast."""
        return _in_full_precision(self.actor(features))

    def value(self, features: Tensor) -> Tensor:
        """Expected discounted return [...]. In full precision also under autocast."""
        return _in_full_precision(self.critic(features)).squeeze(-1)

    def numbers(self, observations: Tensor) -> Tensor:
        """What of observations is normalised: all of vectors, and of dictionaries with images what is no image."""
        return observations if self._num_packed is None else numbers_of(observations, self._num_packed)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        return last.weight.dtype

    @property
    def observation_dtype(self) -> torch.dtype:
        """Of observations that are kept: images, and rows with images in them, as bytes; else as the parameters."""
        return torch.uint8 if self._sees_images else self.dtype


def make_policy(
    settings: Settings,
    observation_space: spaces.Space,  # type: ignore[type-arg]
    action_space: spaces.Space,  # type: ignore[type-arg]
) -> ActorCritic:
    """A policy as the settings want it, on the CPU, with weights from torch's global generator."""
    policy = ActorCritic(observation_space, action_space, settings)
    return policy.double() if settings.precision == "fp64" else policy


def initialized(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """The layer with orthogonal weights of that gain and biases of 0."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _in_full_precision(outputs: Tensor) -> Tensor:
    """Converts what autocast has made 16 bits wide to float32."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


class Perceptron(nn.Sequential):
    """Linear layers with an activation between them, computed by one operator and not module by module.

    Small layers take less time to compute than to call one by one, forward and backward. It is a plain
    ``nn.Sequential`` under autocast, whose casts belong to each layer, while it is traced, and as soon as one of its
    modules is another one or has hooks.

    Args:
        layers: linear, activation, linear, ... linear.
        activation: what stands between them.
    """

    def __init__(self, layers: nn.Sequential, activation: Activation) -> None:
        super().__init__(*layers)
        self._activation = activation
        self._types = [type(layer) for layer in layers]

    def forward(self, rows: Tensor) -> Tensor:
        """[..., outputs] of [..., inputs]."""
        layers = list(self._modules.values())
        if (
            torch.is_autocast_enabled(rows.device.type)
            or torch.compiler.is_compiling()
            or not self._are_as_built(layers)
        ):
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        # Where the layers keep their parameters, which is quicker than to ask the layers.
        linear = [layer._parameters for layer in layers[::2]]
        weights, biases = [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]
        outputs: Tensor = torch.ops.fastsync.perceptron.default(rows, weights, biases, self._activation)
        return outputs

    def _are_as_built(self, layers: list[nn.Module]) -> bool:
        if len(layers) != len(self._types):
            return False
        for layer, built in zip(layers, self._types, strict=True):
            if type(layer) is not built or layer._forward_hooks or layer._forward_pre_hooks:
                return False
        return True


def _layers(sizes: Sequence[int], activation: Activation) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        layers += [initialized(nn.Linear(num_inputs, num_outputs)), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


class _Convolutions(nn.Module):
    """Features [..., 512] of images [..., C, H, W] of bytes."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        channels, height, width = shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise ValueError(
                f"observations of shape {tuple(shape)} are too small for the convolutions; 36 x 36 is the least"
            )
        self.layers = nn.Sequential(
            initialized(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            initialized(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            initialized(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            initialized(nn.Linear(64 * height * width, _IMAGE_FEATURES)),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        flat = images.reshape(-1, *images.shape[-3:])
        features: Tensor = self.layers(flat.to(next(self.parameters()).dtype) / 255)
        return features.reshape(*images.shape[:-3], _IMAGE_FEATURES)


class _Extractor(nn.Module):
    """Features [..., num_features] of packed rows [..., size]: the numbers as they are, and those of each image."""

    def __init__(self, space: PackedSpace) -> None:
        super().__init__()
        self._space = space
        self.convolutions = nn.ModuleList(_Convolutions(shape) for shape in space.images.values())
        self.num_features = space.num_numbers + len(space.images) * _IMAGE_FEATURES

    def forward(self, rows: Tensor) -> Tensor:
        images = images_of(rows, self._space)
        seen = [layers(image) for layers, image in zip(self.convolutions, images, strict=True)]
        return torch.cat([numbers_of(rows, self._space.num_numbers), *seen], dim=-1)


class _PackedNormalizer(ObservationNormalizer):
    """Normalises the numbers of packed rows, and leaves the images."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.clone()
        numbers = numbers_of(rows, len(self.mean))
        numbers.copy_(super().forward(numbers))
        return rows
