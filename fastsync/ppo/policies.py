"""Policies: networks of an actor and a critic. Subclass ``Policy`` for one of your own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from ..sync.micro_batches import check_no_batch_norm
from . import fused
from .distributions import make_distribution
from .envs.parts import Parts, PartsSpace, forbids_all
from .envs.spaces import Array, action_translator
from .names import import_from
from .normalize import ObservationNormalizer
from .recurrent import Memory, Recurrent
from .settings import Precision, RunSettings

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}
IMAGE_FEATURES = 512
FORBIDDEN = -1e4
"""The logit of a forbidden action. Its probability is exactly 0, and its entropy is not nan."""

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class Policy(nn.Module):
    """An actor and a critic. A subclass calls ``super().__init__`` and makes ``actor`` and ``critic``.

    It acts in eval mode, in rollouts and in ``fastsync eval``, and learns in train mode. A layer that the subclass
    leaves in eval mode, such as a frozen one, stays in it. With each sync of gradients all ranks take the buffers of
    rank 0, such as the running mean of a BatchNorm. With another ``sync`` they do so whenever weights are averaged.

    Attributes:
        actor: maps observations ``[..., *shape]`` to the distribution's outputs [..., distribution.num_outputs].
        critic: maps observations to values [..., 1].
        distribution: the distribution of actions, chosen by the action space.
        normalizer: normalises observations; None without norm_observations.
        trunk: layers that actor and critic share; their input is its output. None by default.
        recurrent: layers that remember earlier observations, behind the trunk. None by default.
        parts: what a row of observations consists of, if that is more than one vector or image. Else None.
    """

    actor: nn.Module
    critic: nn.Module

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], settings: RunSettings) -> None:
        super().__init__()
        assert isinstance(observation_space, spaces.Box)
        self.parts: Parts | None = getattr(observation_space, "parts", None)
        self._action_space = action_space
        self._observation_shape = observation_space.shape
        self._num_critic = 0 if self.parts is None else self.parts.num_critic
        self._critic_keys = settings.critic_keys
        if self.parts is not None:  # the network's rows have no mask, and those of the environment do
            self._observation_shape = (observation_space.shape[0] + self.parts.mask_size,)
        self._sees_images = len(observation_space.shape) == 3
        self._needs_float64 = not np.can_cast(observation_space.dtype, np.float32)
        self.normalizer: ObservationNormalizer | None = None
        if settings.norm_observations:
            size = observation_space.shape[0] if self.parts is None else self.parts.num_numbers
            self.normalizer = ObservationNormalizer(size)
        self.distribution = make_distribution(action_space, settings)
        self.trunk: nn.Module | None = None
        self.recurrent: Recurrent | None = None

    def forward(
        self, observations: Tensor, states: Tensor | None = None, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs [..., num_outputs] and the values [...] of observations ``[..., *shape]``.

        Args:
            observations: the observations. With recurrent layers they are rows [B, ...] of pieces of episodes.
            states, begins: as in ``Recurrent.forward``. Without them each row is the first one of an episode.
        """
        features = self.features(observations)
        if self.recurrent is not None:
            if states is None or begins is None:
                features = self.new_memory(len(features)).step(features)
            else:
                features = self.recurrent(features, states, begins)
        return self.allowed(self.outputs(features), observations), self.value(features)

    def features(self, observations: Tensor) -> Tensor:
        """Computes the input of actor and critic."""
        if self.parts is not None:
            observations = observations[..., : observations.shape[-1] - self.parts.mask_size]
        if self.normalizer is not None:
            observations = self.normalizer(observations).to(self.dtype)
        return observations if self.trunk is None else self.trunk(observations)

    def outputs(self, features: Tensor) -> Tensor:
        """Computes the distribution's outputs [..., num_outputs], in full precision even under autocast."""
        return self._in_full_precision(self.actor(features[..., self._num_critic :] if self._num_critic else features))

    def allowed(self, outputs: Tensor, observations: Tensor) -> Tensor:
        """Makes the actions impossible that the mask in the observations forbids, if there is one."""
        if self.parts is None or not self.parts.mask_size:
            return outputs
        return outputs.where(observations[..., -self.parts.mask_size :] > 0, FORBIDDEN)

    def value(self, features: Tensor) -> Tensor:
        """Computes values, the expected discounted returns [...], in full precision even under autocast."""
        return self._in_full_precision(self.critic(features)).squeeze(-1)

    def padded(self, rows: Tensor) -> Tensor:
        """Puts zeros in place of numbers that only the critic sees, if rows [..., D] lack them."""
        if not self._num_critic or rows.shape[-1:] == self._observation_shape:
            return rows
        return torch.cat([rows.new_zeros(*rows.shape[:-1], self._num_critic), rows], dim=-1)

    def new_memory(self, num_envs: int = 1) -> Memory:
        """Returns what a policy with recurrent layers remembers at the start of episodes in ``num_envs`` environments.

        Without such layers it is empty.
        """
        return Memory(self.recurrent, num_envs)

    def likeliest(self, observations: Tensor, memory: Memory | None = None) -> Tensor:
        """Returns the likeliest of the allowed actions ``[..., *action_shape]``, as ``Environments.step`` takes them.

        With recurrent layers, observations are ``[N, *shape]``, and the memory of N environments goes on by a step.
        """
        return self.distribution.scaled(self.distribution.mode(self.decide(observations, memory)))

    def decide(self, observations: Tensor, memory: Memory | None = None) -> Tensor:
        """Computes the distribution's outputs [..., num_outputs], of allowed actions. See ``likeliest``."""
        features = self.features(observations)
        if self.recurrent is not None:
            features = (memory or self.new_memory(len(features))).step(features)
        return self.allowed(self.outputs(features), observations)

    def sampled(self, observations: Tensor, memory: Memory | None = None) -> Tensor:
        """Samples allowed actions ``[..., *action_shape]``, by torch's own generator. See ``likeliest``."""
        outputs = self.decide(observations, memory)
        tiny, shape = torch.finfo(outputs.dtype).eps, (*outputs.shape[:-1], self.distribution.num_noise)
        uniform = torch.rand(shape, dtype=outputs.dtype, device=outputs.device)
        noise = self.distribution.noise(uniform.clamp(tiny, 1 - tiny))
        return self.distribution.scaled(self.distribution.sample(outputs, noise))

    @torch.no_grad()
    def act(
        self,
        observations: Array,
        action_mask: Array | tuple[Array, ...] | None = None,
        *,
        deterministic: bool = True,
        memory: Memory | None = None,
    ) -> Array:
        """Chooses the likeliest actions, or samples them, in eval mode.

        Args:
            observations: one observation of the environment, ``[*shape]``, or N of them, ``[N, *shape]``. What only
                the critic sees may be left out.
            action_mask: the mask that came with them, as in ``info["action_mask"]``, ``[num_choices]`` or
                ``[N, num_choices]``. Rows of ``fastsync.ppo.envs.parts.PartsInARow`` hold it already.
            deterministic: take the likeliest actions. Without it actions are samples, as in the training;
                ``torch.manual_seed`` seeds them.
            memory: what a recurrent policy remembers, from ``new_memory(N)``. Call its ``reset`` where episodes begin.

        Returns:
            The action for ``env.step``, ``[*action_shape]``, or N actions, ``[N, *action_shape]``.

        Raises:
            ValueError: the observations have another shape, or a mask is missing, not expected, or forbids all. Or a
                recurrent policy has no memory, or that of another number of environments.
        """
        seen = np.asarray(observations)
        if action_mask is not None:
            seen = self._with_mask(seen, action_mask)
        shape = self._observation_shape
        if self._num_critic and seen.shape[-1:] != shape:
            shape = (shape[0] - self._num_critic,)
        is_one = seen.shape == shape
        if not is_one and seen.shape[1:] != shape:
            raise ValueError(self._why_not_seen(seen.shape))
        mask_size = 0 if self.parts is None else self.parts.mask_size
        if mask_size and forbids_all(seen[..., -mask_size:], self._action_space):
            raise ValueError("action_mask: it forbids every action; allow one, or end the episode")
        rows = torch.from_numpy(seen[None] if is_one else seen).to(next(self.parameters()).device)
        with in_eval_mode(self):
            rows = self.padded(rows.to(self.observation_dtype))
            choose_by = self.likeliest if deterministic else self.sampled
            chosen = choose_by(rows, *self._memory_of(len(rows), memory))
        actions = action_translator(self._action_space)(chosen.cpu().numpy())
        return actions[0] if is_one else actions

    def _memory_of(self, num_rows: int, memory: Memory | None) -> tuple[Memory, ...]:
        if self.recurrent is None:
            return ()
        if memory is None:
            raise ValueError(
                "memory: this policy is recurrent, and needs what it remembers: before the first episode make memory = "
                "policy.new_memory(), give it to each act(..., memory=memory), and call memory.reset() after each "
                "env.reset()"
            )
        if len(memory.states) != num_rows:
            raise ValueError(
                f"memory: it is of {len(memory.states)} environments, and there are {num_rows} observations; make it "
                f"by policy.new_memory({num_rows})"
            )
        return (memory,)

    def _with_mask(self, seen: Array, action_mask: Array | tuple[Array, ...]) -> Array:
        """Returns the rows that the environments of a training have: observations, and then the mask."""
        mask = np.concatenate(action_mask, axis=-1) if isinstance(action_mask, tuple) else np.asarray(action_mask)
        size = 0 if self.parts is None else self.parts.mask_size
        widths = {self._observation_shape[0] - size, self._observation_shape[0] - size - self._num_critic}
        if size and (seen.ndim not in (1, 2) or seen.shape[-1] not in widths):
            raise ValueError(
                f"observations: expected one of shape {(self._observation_shape[0] - size,)}, or several, got "
                f"{seen.shape}; wrap the environment as the training did, in {self._wrapper()}, whose rows hold the "
                "mask already"
            )
        if mask.shape != (*seen.shape[:-1], size):
            needs = f"expected shape {(*seen.shape[:-1], size)}" if size else "the training had none"
            raise ValueError(f"action_mask: {needs}, got shape {mask.shape}")
        return np.concatenate([seen, mask], axis=-1)

    def _why_not_seen(self, shape: tuple[int, ...]) -> str:
        """Returns the message about observations of a wrong shape."""
        if self.parts is not None and shape[-1:] == (self._observation_shape[0] - self.parts.mask_size,):
            return (
                f"action_mask: expected that of the observations, of {self.parts.mask_size} choices, got none; give "
                "info['action_mask']"
            )
        wrapper = f", in {self._wrapper()}" if self.parts is not None else ""
        return (
            f"observations: expected one of shape {self._observation_shape}, or several, got {shape}; wrap the "
            f"environment as the training did{wrapper}"
        )

    def _wrapper(self) -> str:
        """Returns what makes the rows of the training out of observations of several parts."""
        has_masks = self.parts is not None and self.parts.mask_size > 0
        keys = f", critic_keys={self._critic_keys}" if self._num_critic else ""
        return f"fastsync.ppo.envs.parts.PartsInARow(env, masks_in_info={has_masks}{keys})"

    @staticmethod
    def _in_full_precision(outputs: Tensor) -> Tensor:
        """Converts 16-bit outputs of autocast to float32."""
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def observation_dtype(self) -> torch.dtype:
        """The dtype of observations in the rollout: images stay bytes, others have the parameters' dtype.

        With norm_observations, numbers that float32 cannot hold are float64 until the mean is subtracted.
        """
        if self._sees_images:
            return torch.uint8
        return torch.float64 if self.normalizer is not None and self._needs_float64 else self.dtype


class ActorCritic(Policy):
    """The network that the settings describe.

    Weights are orthogonal and biases 0. The gain is sqrt(2) in hidden layers, 1 for the value, and 0.01 for the
    distribution's outputs. So the first policy is nearly uniform (Engstrom et al., "Implementation Matters in Deep RL",
    ICLR 2020). Without ``ortho_init`` they are torch's own. The convolutions for images are those of Mnih et al.
    ("Human-level control", Nature 2015).
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], settings: RunSettings) -> None:
        super().__init__(observation_space, action_space, settings)
        actor, critic = nn.Sequential(), nn.Sequential()
        sees_images = self._sees_images or bool(self.parts and self.parts.images)
        is_recurrent = settings.recurrent != "none"
        shares_by_itself = settings.network == "auto" and sees_images and not settings.critic_keys
        if settings.network == "shared" or is_recurrent or shares_by_itself:
            self.trunk, width = _body(observation_space, settings)
            critic_width = width
        else:
            seen = observation_space.for_actor() if isinstance(observation_space, PartsSpace) else observation_space
            actor, width = _body(seen, settings)
            critic, critic_width = _body(observation_space, settings)
        self.actor = actor.append(initialized(nn.Linear(width, self.distribution.num_outputs), gain=0.01))
        self.critic = critic.append(initialized(nn.Linear(critic_width, 1), gain=1.0))
        if settings.recurrent != "none":
            self.recurrent = Recurrent(settings.recurrent, width, width)
            for name, parameter in self.recurrent.named_parameters():
                for gate in parameter.chunk(len(parameter) // width):
                    nn.init.zeros_(gate) if "bias" in name else nn.init.orthogonal_(gate)
        if not settings.ortho_init:
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv2d | nn.RNNBase):
                    module.reset_parameters()


@contextmanager
def in_eval_mode(policy: nn.Module) -> Iterator[None]:
    """Sets the policy and its layers to eval mode inside a ``with`` block, and restores each mode afterwards."""
    modes = [(module, module.training) for module in policy.modules()]
    policy.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # outer ones first, because they also change the inner ones
            if module.training != mode:
                module.train(mode)


def own_buffers(policy: Policy) -> dict[str, Tensor]:
    """Returns the buffers of a user's layers by name. The normalizer's buffers are equal on all ranks anyway."""
    return {name: buffer for name, buffer in policy.named_buffers() if not name.startswith("normalizer.")}


def make_policy(
    settings: RunSettings,
    observation_space: Space[Any],
    action_space: Space[Any],
    kind: Callable[..., Policy] | None = None,
) -> Policy:
    """Makes a policy in float32 on the CPU, with weights from torch's global generator.

    torch's default dtype and device have no effect, because an environment's module may have changed them.

    Args:
        settings: settings of the run. ``settings.policy`` names the class if ``kind`` is None.
        observation_space: the observation space of ``make_environments``.
        action_space: its action space.
        kind: a subclass of Policy, or a function that returns one, of both spaces and the settings.

    Raises:
        ValueError: there is no such class, the result is not a Policy, it has no actor or critic, or its parameters
            are of 16 bits.
    """
    name: Any = kind
    if kind is None:
        name = settings.policy
        kind = ActorCritic if name is None else import_from("policy", name)
    inputs = observation_space.without_mask() if isinstance(observation_space, PartsSpace) else observation_space
    with _torchs_defaults():
        policy = kind(inputs, action_space, settings)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy={name!r} made a {type(policy).__name__}; it has to be a fastsync.ppo.Policy")
    for part, method in (("actor", "outputs"), ("critic", "value")):
        if not hasattr(policy, part) and getattr(type(policy), method) is getattr(Policy, method):
            raise ValueError(
                f"policy={name!r} has no {part}; set self.{part} in its __init__, a module as in ActorCritic"
            )
    if (policy.recurrent is not None) != (settings.recurrent != "none"):
        has = "no recurrent layers" if policy.recurrent is None else "recurrent layers"
        raise ValueError(
            f"recurrent={settings.recurrent!r}, but policy={name!r} has {has}; set self.recurrent in its __init__ as "
            "in ActorCritic, and the setting recurrent, or neither"
        )
    if policy._num_critic and policy.trunk is not None:
        raise ValueError(
            f"critic_keys={list(settings.critic_keys)} are for the critic alone, and policy={name!r} has a trunk, "
            "which the actor shares; give it two networks"
        )
    if settings.precision == "fp64":
        policy.double()
    for dtype in {parameter.dtype for parameter in policy.parameters()} - {torch.float32, torch.float64}:
        raise ValueError(f"policy={name!r} has parameters of {dtype}; leave them in float32, and set precision")
    if settings.fused and not policy._sees_images:  # with images convolutions take most of the time
        fused.fuse(policy)
    return policy


def try_policy(
    settings: RunSettings,
    observation_space: Space[Any],
    action_space: Space[Any],
    observations: Tensor,
    rows_per_pass: int,
) -> Tensor:
    """Makes the policy that the settings name, and tries it on one observation, before ranks start.

    Args:
        settings, observation_space, action_space: see ``make_policy``.
        observations: observations [1, *shape].
        rows_per_pass: number of rows that the policy learns from at once.

    Returns:
        The likeliest actions [1, ...].

    Raises:
        ValueError: the policy cannot be made, raises an error, or has results of other shapes than it has to. Or
            it has a BatchNorm that does not go with micro_batches.
    """
    try:
        policy = make_policy(settings, observation_space, action_space)
        if settings.micro_batches is not None:
            check_no_batch_norm(policy.modules())
        observations = observations.to(policy.observation_dtype)
        with torch.no_grad():
            with in_eval_mode(policy):
                outputs, values = policy(observations)
            if rows_per_pass == 1:
                with explain_batch_norm(policy, rows_per_pass):
                    policy(observations)
    except ValueError:
        raise
    except Exception as error:  # any error of the user's class
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy={settings.policy!r} cannot be used: {reason}") from error
    expected = (1, policy.distribution.num_outputs)
    if (outputs.shape, values.shape) != (expected, (1,)):
        raise ValueError(
            f"policy={settings.policy!r} computes outputs {tuple(outputs.shape)} and values {tuple(values.shape)} of "
            f"one observation; they must be {expected} and (1,): check the last layers of actor and critic"
        )
    return policy.distribution.scaled(policy.distribution.mode(outputs))


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextmanager
def explain_batch_norm(policy: nn.Module, num_rows: int) -> Iterator[None]:
    """Says what to do where the policy's BatchNorm gets one row inside a ``with`` block, as ValueError."""
    try:
        yield
    except ValueError as error:
        if num_rows != 1 or not any(isinstance(each, BATCH_NORMS) and each.training for each in policy.modules()):
            raise
        raise ValueError(
            f"BatchNorm cannot learn from one row, and a minibatch has {num_rows} on each rank: it has "
            "num_envs * num_steps / (num_minibatches * num_micro_batches). Lower --num-minibatches or "
            "--num-micro-batches, or raise --num-envs or --num-steps"
        ) from error


@contextmanager
def _torchs_defaults() -> Iterator[None]:
    """Makes new tensors float32 on the CPU inside a ``with`` block, unless the caller says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _body(space: Space[Any], settings: RunSettings) -> tuple[nn.Sequential, int]:
    """Returns all layers except the last one, and their width."""
    assert space.shape
    if isinstance(space, PartsSpace) and space.parts.images:
        body = _PartsBody(space.parts, settings)
        return nn.Sequential(body), body.width
    if len(space.shape) == 3:
        return nn.Sequential(_Convolutions(space.shape)), IMAGE_FEATURES
    sizes = (space.shape[0], *settings.hidden_sizes)
    return hidden_layers(sizes, settings.activation), sizes[-1]


def hidden_layers(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Makes linear layers from each size to the next, each with the activation after it."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        layers += [initialized(nn.Linear(num_inputs, num_outputs)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def initialized(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Sets orthogonal weights with this gain, and biases of 0. Returns the layer."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class _Convolutions(nn.Module):
    """Maps images [..., C, H, W] of bytes to features [..., 512]."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        channels, height, width = shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.layers = nn.Sequential(
            initialized(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            initialized(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            initialized(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            initialized(nn.Linear(64 * height * width, IMAGE_FEATURES)),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        flat = images.reshape(-1, *images.shape[-3:])
        features: Tensor = self.layers(flat.to(next(self.parameters()).dtype) / 255)
        return features.reshape(*images.shape[:-3], IMAGE_FEATURES)


class _PartsBody(nn.Module):
    """Maps rows [..., D] to features: convolutions for each image, hidden layers for the numbers, side by side."""

    def __init__(self, parts: Parts, settings: RunSettings) -> None:
        super().__init__()
        self._parts = parts
        sizes = (parts.num_numbers, *settings.hidden_sizes)
        self.numbers = hidden_layers(sizes, settings.activation) if parts.num_numbers else None
        self.images = nn.ModuleList(_Convolutions(shape) for shape in parts.images)
        self.width = IMAGE_FEATURES * len(parts.images) + (sizes[-1] if parts.num_numbers else 0)

    def forward(self, rows: Tensor) -> Tensor:
        numbers, images = self._parts.split(rows)
        features = [network(image) for network, image in zip(self.images, images, strict=True)]
        return torch.cat(features if self.numbers is None else [self.numbers(numbers), *features], dim=-1)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Returns the context of forward passes: autocast with bf16 and fp16, else none."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes[precision]) if precision in dtypes else nullcontext()
