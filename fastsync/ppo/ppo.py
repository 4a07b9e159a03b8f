"""PPO on one rank or on many, from top to bottom: settings, rollout, rewards, advantages, minibatches, loss, learning
rate, update, loop.

The algorithm: Schulman et al., "Proximal policy optimization algorithms", 2017, https://arxiv.org/abs/1707.06347
Comments give shapes of tensors: T steps of a rollout, N environments of this rank, B rows of a minibatch.

Two parts are elsewhere, because playing and exporting need them without a training: networks, which also normalise
observations (policies.py, normalize.py), and distributions of actions (distributions.py).

Your edits here take effect. On CPUs fused operators of csrc/ppo replace ``ppo_loss`` and, with that loss,
``minibatch_loss``, but only while you have changed neither. The run prints which operators it uses. With ``--no-fused``
it uses none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import DiLoCo, LocalSGD, attach, clip_grad_norm_
from . import fused
from .adam import Adam
from .batches import Rows, as_tensor, blank_unused, check_rewards
from .envs.interface import Environments, Episode, seed_from
from .exchange import Exchange
from .names import check_not_importing, resolve
from .normalize import LIMIT, RunningMoments, mean_and_variance, moments
from .policies import ActorCritic, Policy, autocast, explain_batch_norm, in_eval_mode, make_policy, own_buffers
from .random_streams import RandomStreams
from .runs.metrics import TrainResult, add_infos, mean, mean_of_steps, table_of_steps
from .session import open_session
from .settings import FLAG_OF_BEFORE, RunSettings, own_first

ADAPTIVE_LIMITS = (1e-5, 1e-2)  # of the adaptive learning rate, as in RSL-RL
ADAPTIVE_FACTOR = 1.5
KL_TOLERANCE = 1.5  # learning from a rollout ends at this multiple of target_kl, as in Stable-Baselines3


# --- Settings ---------------------------------------------------------------------------------------------------------
@own_first
@dataclass(frozen=True)
class Settings(RunSettings):
    """PPO's settings, and then those of every run. Counts of environments, steps and minibatches are per rank.

    The defaults are those of CleanRL's ppo.py.
    """

    num_steps: int = 128  # Steps of each environment per rollout.
    gamma: float = 0.99  # Discount factor per step.
    gae_lambda: float = 0.95  # Lambda of generalised advantage estimation.
    norm_advantages: Literal["minibatch", "rollout", "none"] = "minibatch"
    """Normalise advantages to mean 0 and variance 1, over each minibatch or over the rollout, both of all ranks."""
    norm_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted returns of all ranks; clip to [-10, 10]."""

    loss: str | None = None
    """Your own loss in place of fastsync.ppo.ppo_loss, as "module:function"."""
    advantages: str | None = None
    """Your own estimator in place of fastsync.ppo.estimate_advantages, as "module:function"."""
    clip_coef: float = 0.2  # The surrogate objective clips the probability ratio to 1 - clip_coef ... 1 + clip_coef.
    anneal_clip: bool = False  # Lower clip_coef linearly to 0 over the run.
    clip_value_loss: bool = True  # Also clip the change of the value since the rollout to clip_coef.
    vf_coef: float = (
        0.5  # Weight of the value loss, half the squared error as in CleanRL. Stable-Baselines3 has no half.
    )
    ent_coef: float = 0.01  # Weight of the entropy bonus.

    num_epochs: int = 4  # Passes over each rollout.
    num_minibatches: int = 4  # Minibatches per pass, one optimizer step each. It must divide num_envs * num_steps.
    num_micro_batches: int = 1
    """Parts of a minibatch that go through the network in turn, to save memory. Each minibatch sends gradients
    once. For the same bits on any number of ranks take micro_batches."""
    learning_rate: float = 2.5e-4  # Learning rate of Adam at the start. --lr is the same.
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """linear lowers the learning rate to 0 over the run. adaptive divides it by 1.5 if a minibatch's KL divergence is
    over twice target_kl, and multiplies it by 1.5 if under half. It stays in [1e-5, 1e-2]."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the number of ranks (linear), or by its square root (sqrt)."""
    warmup_updates: int = 0  # Updates over which the learning rate rises to its full value.
    max_grad_norm: float = 0.5  # Clip the gradient, averaged over ranks, to this norm.
    target_kl: float | None = None
    """Stop learning from a rollout when the KL divergence of a minibatch, over the ranks, exceeds 1.5 times this. With
    lr_schedule=adaptive it sets the learning rate instead, and does not stop."""

    def __post_init__(self) -> None:
        scope = FLAG_OF_BEFORE.get(self.norm_advantages, self.norm_advantages)  # type: ignore[call-overload]
        object.__setattr__(self, "norm_advantages", scope)
        scopes = ("minibatch", "rollout", "none")
        self._check(f"must be one of {', '.join(scopes)}", lambda value: value in scopes, "norm_advantages")
        counts = ("num_steps", "num_epochs", "num_minibatches", "num_micro_batches")
        self._check("must be at least 1", lambda value: value >= 1, *counts)
        self._check("must be greater than 0", lambda value: value is None or value > 0, "max_grad_norm", "target_kl")
        self._check("must be a finite number greater than 0", lambda v: 0 < v < math.inf, "learning_rate", "clip_coef")
        self._check("must not be negative", lambda value: value >= 0, "ent_coef", "vf_coef", "warmup_updates")
        self._check("must lie in [0, 1]", lambda value: 0 <= value <= 1, "gamma", "gae_lambda")
        super().__post_init__()
        if self.micro_batches is not None and self.lr_scaling != "none":
            raise ValueError(
                f"lr_scaling={self.lr_scaling!r} follows the number of ranks, and with micro_batches nothing does; "
                "leave one of them out"
            )
        if self.lr_schedule == "adaptive" and self.target_kl is None:
            raise ValueError("lr_schedule='adaptive' needs a KL divergence to aim at; set target_kl, such as 0.01")
        num_rows = self.envs_together * self.num_steps
        of_part = "a rank's" if self.micro_batches is None else "a micro-batch's"
        self._check_divides("num_minibatches", num_rows, f"of {of_part} rollout")
        self._check_divides("num_micro_batches", num_rows // self.num_minibatches, "of a minibatch")
        if self.recurrent != "none":  # a minibatch has a sequence of each environment
            self._check_divides("num_minibatches", self.num_steps, "of an environment, for recurrent layers")
            self._check_divides(
                "num_micro_batches", self.envs_together, "of sequences in a minibatch, for recurrent layers"
            )


# --- Rollout ----------------------------------------------------------------------------------------------------------
class Rollout(NamedTuple):
    """T steps of N environments: those of a rank, or of one of its micro-batches. The next rollout overwrites it.

    After an episode ends, the next step only resets the environment. It ignores the action, has reward 0, and is not
    valid. If the last observation of a terminated episode is nan or extreme, its row is 0.
    """

    observations: Tensor  # [T, N, *observation_shape]
    actions: Tensor  # [T, N, *action_shape]
    values: Tensor  # [T, N]: the critic's values of the observations
    rewards: Tensor  # [T, N]
    terminated: Tensor  # [T, N] bool: the step led to a terminal state, whose value is 0
    done: Tensor  # [T, N] bool: the step ended the episode, by termination or truncation
    valid: Tensor  # [T, N] bool: the row is a step of an episode, not a reset
    log_probs: Tensor  # [T, N]: log-probabilities of the actions
    next_values: Tensor  # [T, N]: values of the next observations; at the end of an episode, of its last observation
    episodes: list[Episode]  # the episodes that ended
    infos: dict[str, float]  # means of the numbers that settings.log_info names
    environment_seconds: float  # time in the environments
    policy_seconds: float  # time of everything else, such as the policy's networks
    ended: float  # time.perf_counter() at the end
    states: Tensor | None = None  # [T, N, S]: what recurrent layers remember before each step


class Collector:
    """Collects rollouts: the policy acts, the environments step."""

    def __init__(self, settings: Settings, environments: Environments, policy: Policy, streams: RandomStreams) -> None:
        self.settings, self.environments, self.policy, self.streams = settings, environments, policy, streams
        num_steps, num_envs, distribution = settings.num_steps, environments.num_envs, policy.distribution
        observation_shape = environments.single_observation_space.shape or ()
        action_dtype = policy.dtype if distribution.dtype.is_floating_point else distribution.dtype

        def rows(number: int, *shape: int, dtype: torch.dtype = policy.dtype) -> Rows:
            return Rows(torch.empty(number, num_envs, *shape, dtype=dtype, device=streams.device))

        # Memory for a rollout, which each rollout uses again. Row T is that of the next rollout's first step.
        self.observations = rows(num_steps + 1, *observation_shape, dtype=policy.observation_dtype)
        self.values = rows(num_steps + 1)
        self.actions = rows(num_steps, *distribution.shape, dtype=action_dtype)
        self.outputs = rows(num_steps, distribution.num_outputs)  # parameters of the distribution, such as logits
        self.memory = policy.new_memory(num_envs)  # of the episodes so far, if the policy is recurrent
        self.states = rows(num_steps, self.memory.states.shape[-1])
        size = num_steps, num_envs
        self.rewards: Any = np.empty(size)
        self.flags: Any = np.empty((3, *size), dtype=np.bool_)  # terminated, done, valid
        if environments.takes_tensors:  # nothing of them goes over the host
            self.rewards = torch.empty(size, dtype=policy.dtype, device=streams.device)
            self.flags = torch.empty(3, *size, dtype=torch.bool, device=streams.device)
        self.next_observation = environments.reset()  # [N, *observation_shape]

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Takes T steps in each environment."""
        began, environment_seconds = time.perf_counter(), 0.0
        policy, distribution, num_steps = self.policy, self.policy.distribution, self.settings.num_steps
        shares_layers = policy.trunk is not None or policy.recurrent is not None
        terminated, done, valid = self.flags
        episodes = list[Episode]()
        infos: dict[str, list[float]] = {name: [] for name in self.settings.log_info}
        # Random numbers of the whole rollout, such as Gumbel noise: logits + noise are largest at a sample.
        noises = distribution.noise(self.streams.uniform(num_steps, distribution.num_noise, policy.dtype)).unbind()
        for t in range(num_steps):
            observations = self.observations.write(t, self.next_observation)  # [N, *observation_shape], on the device
            features = policy.features(observations)  # normalised, with norm_observations
            if policy.recurrent is not None:
                self.states[t].copy_(self.memory.states)
                features = self.memory.step(features)
            outputs = policy.allowed(policy.outputs(features), observations)  # [N, num_outputs]
            self.outputs[t].copy_(outputs)
            if shares_layers:
                self.values[t].copy_(policy.value(features))
            self.actions[t].copy_(distribution.sample(outputs, noises[t]))
            stepped = time.perf_counter()
            chosen: Any = distribution.scaled(self.actions[t])
            step = self.environments.step(chosen if self.environments.takes_tensors else chosen.cpu().numpy())
            environment_seconds += time.perf_counter() - stepped
            self.rewards[t], terminated[t], valid[t] = step.rewards, step.terminated, step.valid
            done[t] = step.terminated | step.truncated
            self.memory.reset(~step.valid)  # the next observation is the first of an episode
            self.next_observation = step.observations
            episodes += [episode._replace(row=t) for episode in step.episodes]
            add_infos(infos, step)
        episodes += self.environments.take_episodes()
        check_rewards(as_tensor(self.rewards), first_index=self.environments.first_index)
        last = self.observations.write(num_steps, self.next_observation)
        observations, values = self.observations.tensor, self.values.tensor
        if shares_layers:
            features = policy.features(last)
            if policy.recurrent is not None:  # the next rollout takes this step, too
                features, _ = policy.recurrent.step(features, self.memory.states)
            values[-1] = policy.value(features)
        else:  # a separate critic is evaluated once, for all rows
            rows = observations.flatten(0, 1)  # some layers, such as BatchNorm1d, take [B, D] only
            values.copy_(policy.value(policy.features(rows)).view_as(values))
        flags = dict(
            zip(("terminated", "done", "valid"), torch.as_tensor(self.flags, device=values.device), strict=True)
        )
        outputs, actions = self.outputs.tensor, self.actions.tensor
        blank_unused(observations, values, outputs, actions, **flags, first_index=self.environments.first_index)
        return Rollout(
            observations=observations[:-1],
            actions=actions,
            values=values[:-1],
            rewards=as_tensor(self.rewards).to(values.device, values.dtype),
            **flags,
            log_probs=distribution.log_prob(outputs, actions),
            next_values=values[1:],
            episodes=episodes,
            infos={name: mean(numbers) for name, numbers in infos.items()},
            environment_seconds=environment_seconds,
            policy_seconds=(ended := time.perf_counter()) - began - environment_seconds,
            ended=ended,
            states=None if policy.recurrent is None else self.states.tensor,
        )


# --- Rewards ----------------------------------------------------------------------------------------------------------
def discounted_sums(summands: Tensor, decays: Tensor) -> Tensor:
    """Returns sums [T, N]: ``sums[t] = summands[t] + decays[t] * sums[t + 1]``; the last row equals its summand."""
    sums = summands.clone()
    following, *rows = reversed(sums.unbind())
    for row, decay in zip(rows, decays[:-1].flip(0), strict=True):
        following = row.addcmul_(decay, following)
    return sums


class RewardNormalizer(RunningMoments):
    """Divides rewards by the standard deviation of the discounted return, and clips them to [-10, 10].

    The return at a step is that of the episode so far: ``R[t] = gamma * R[t - 1] + r[t]`` (Engstrom et al.,
    "Implementation Matters in Deep RL", ICLR 2020, B).
    """

    carried: Tensor
    """[rollouts, N]: R of the previous step; 0 at the beginning of an episode."""

    def __init__(self, gamma: float, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(1)
        self._gamma = gamma
        self.register_buffer("carried", torch.zeros(shape, dtype=dtype, device="cpu"), persistent=False)

    def forward(self, rewards: Tensor) -> Tensor:
        deviation = (self.variance + 1e-8).sqrt().to(rewards.dtype)
        return (rewards / deviation).clamp(-LIMIT, LIMIT)

    def discounted_returns(self, rewards: Tensor, done: Tensor, rollout: int) -> Tensor:
        """Returns R at each step [T, N], from rewards [T, N] and ends of episodes [T, N] of one of the rollouts."""
        goes_on = (~done).to(rewards.dtype)
        summands = torch.cat([torch.add(rewards[:1], self.carried[rollout], alpha=self._gamma), rewards[1:]])
        decays = torch.cat([torch.zeros_like(summands[:1]), self._gamma * goes_on[:-1]])
        returns = discounted_sums(summands.flip(0), decays.flip(0)).flip(0)  # over earlier rows, so they are reversed
        self.carried[rollout].copy_(returns[-1] * goes_on[-1])
        return returns


# --- Advantages -------------------------------------------------------------------------------------------------------
def estimate_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, settings: Settings
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., ICLR 2016, https://arxiv.org/abs/1506.02438, equation 16).

    All tensors are [T, N], as in Rollout. The next state has the value 0 if the episode terminated. Otherwise it has
    ``next_values``, even if the episode was truncated. The sum stops at the end of an episode. The results for rows
    that only reset an environment have no meaning, and affect no other row.
    """
    deltas = rewards + settings.gamma * next_values * ~terminated - values
    decays = settings.gamma * settings.gae_lambda * (~done).to(deltas.dtype)
    return discounted_sums(deltas, decays)


def normalize_advantages(advantages: Tensor, moments: Tensor) -> Tensor:
    """Normalises advantages to mean 0 and variance 1, as Stable-Baselines3 does. A single row stays as it is.

    Args:
        advantages: [T, N], or [E, M, B] of M minibatches in E passes.
        moments: count, sum and sum of squares over all ranks: [3], or [3, E, M, 1].
    """
    count, total, squares = moments
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)  # of a sample, as torch.std
    rows = advantages.double()
    return torch.where(count > 1, (rows - mean) / (variance.sqrt() + 1e-8), rows).to(advantages.dtype)


def row_weights(valid: Tensor, num_valid: Tensor, *, world_size: int, num_minibatches: int) -> Tensor:
    """Returns the weight of each row in its minibatch's loss, which is a sum of weighted rows.

    Weights are those of a mean over the average number of valid rows in a minibatch. So each valid row of each rank
    counts the same, even if a minibatch or a rank has more restarts than others. Without valid rows all are 0.
    """
    return valid * (world_size * num_minibatches / num_valid.clamp(min=1))


def explained_variance(moments: Tensor) -> float:
    """Returns which share of the variance of the returns the critic's values explain, from ``moments`` [5].

    ``moments`` are those of advantages and returns. An advantage is what a return differs from its value by. 1 is
    perfect, 0 is as good as a constant. NaN means that all returns are equal, or that there are none.
    """
    unexplained, variance = mean_and_variance(moments)[2].tolist()
    return 1 - unexplained / variance if variance > 0 else math.nan


# --- Minibatches ------------------------------------------------------------------------------------------------------
Normalize = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Batch:
    """B rows of rollouts, in any order."""

    observations: Tensor  # [B, *observation_shape].
    actions: Tensor  # [B, *action_shape].
    log_probs: Tensor  # [B]: log-probabilities of the actions in the rollout.
    values: Tensor  # [B]: values of the critic in the rollout.
    advantages: Tensor  # [B]: normalised, unless norm_advantages is none.
    returns: Tensor  # [B]: targets of the critic.
    weights: Tensor  # [B]: weight of each row in the mean over its minibatch; 0 for restarts, which are no steps.
    states: Tensor | None = None  # [B, S]: for recurrent layers, what they remember before each row.
    begins: Tensor | None = None  # [B] bool: and whether the rows before it are of others. Then rows are in order.

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns a batch with a function applied to each column."""
        return Batch(**{name: change(column) for name, column in vars(self).items() if column is not None})


class Shuffler:
    """Shuffles rollouts and cuts them into minibatches.

    The rows of each environment are shuffled separately. Each minibatch takes the same number of rows from each
    environment, if num_minibatches divides num_steps. So all ranks have equally many rows of a minibatch, and the whole
    minibatch does not depend on how environments are spread over ranks.

    Args:
        num_minibatches: number of minibatches per pass, of equal size.
        streams: random numbers of each rollout's environments, on the batches' device.
        in_sequences: for recurrent layers. Each environment's steps are cut into as many sequences as there are
            minibatches, and each minibatch takes one of each environment, with its rows in order.
    """

    def __init__(self, num_minibatches: int, streams: Sequence[RandomStreams], *, in_sequences: bool = False) -> None:
        self._num_minibatches = num_minibatches
        self._streams = streams
        self._in_sequences = in_sequences

    def minibatches(
        self, batches: Sequence[Batch], num_epochs: int, normalize: Normalize | None = None
    ) -> Iterator[list[Batch]]:
        """Yields the minibatches of each pass over rollouts: of each rollout its part.

        Args:
            batches: the rollouts, one or one of each micro-batch. Their columns are [T, N, ...].
            num_epochs: E, the number of passes.
            normalize: is called once, before the first minibatch, if there are M > 1 minibatches. It gets the
                advantages [E, M, B] of all of them, and whether each row is valid, for each rollout. It returns the
                advantages to use.
        """
        all_rows = [batch.map(lambda column: column.flatten(0, 1)) for batch in batches]
        if self._num_minibatches == 1 and not self._in_sequences:  # the order of rows does not matter
            yield from [all_rows] * num_epochs
            return
        num_steps, num_envs = batches[0].log_probs.shape
        orders_of = self._sequence_orders if self._in_sequences else self._row_orders
        orders = [orders_of(num_steps, num_envs, num_epochs, streams) for streams in self._streams]
        advantages = None
        if normalize is not None and self._num_minibatches > 1:
            at = [torch.stack(list(each)).unflatten(1, (self._num_minibatches, -1)) for each in orders]
            advantages = normalize(
                [rows.advantages[each] for rows, each in zip(all_rows, at, strict=True)],
                [rows.weights[each] > 0 for rows, each in zip(all_rows, at, strict=True)],
            )
        for epoch in range(num_epochs):
            shuffled = [
                rows.map(lambda column, at=order[epoch]: column.index_select(0, at))  # type: ignore[misc]
                for rows, order in zip(all_rows, orders, strict=True)
            ]
            if advantages is not None:
                normalized = [each[epoch].flatten() for each in advantages]
                shuffled = [replace(rows, advantages=each) for rows, each in zip(shuffled, normalized, strict=True)]
            yield from map(list, zip(*(self.cut(rows, self._num_minibatches) for rows in shuffled), strict=True))

    @staticmethod
    def cut(batch: Batch, num_parts: int) -> Iterator[Batch]:
        """Yields equal batches, as views."""
        if num_parts == 1:
            yield batch
            return
        columns = {name: column.chunk(num_parts) for name, column in vars(batch).items() if column is not None}
        for part in range(num_parts):
            yield Batch(**{name: parts[part] for name, parts in columns.items()})

    def _row_orders(self, num_steps: int, num_envs: int, num_epochs: int, streams: RandomStreams) -> Sequence[Tensor]:
        """Returns for each epoch indices [T * N] into the flattened rows [T, N], by sorting random keys."""
        steps = streams.bits(num_steps, num_epochs).argsort(dim=0, stable=True)
        environments = torch.arange(num_envs, device=steps.device).unsqueeze(1).expand_as(steps)
        if num_steps % self._num_minibatches:
            # A minibatch ends within a row of ``steps``, so the environments have to be shuffled, too.
            environments = streams.bits(num_steps, num_epochs).argsort(dim=1, stable=True)
            steps = steps.gather(1, environments)
        return (steps * num_envs + environments).flatten(0, 1).t().contiguous().unbind()

    def _sequence_orders(
        self, num_steps: int, num_envs: int, num_epochs: int, streams: RandomStreams
    ) -> Sequence[Tensor]:
        """Returns indices as ``_row_orders``: for each minibatch, a sequence of each environment."""
        length = num_steps // self._num_minibatches
        chosen = streams.bits(self._num_minibatches, num_epochs).argsort(dim=0, stable=True)  # [M, N, E]
        rows = torch.arange(length, device=chosen.device).view(1, 1, length, 1)
        steps = chosen.unsqueeze(2) * length + rows  # [M, N, L, E]
        environments = torch.arange(num_envs, device=chosen.device).view(1, num_envs, 1, 1)
        return (steps * num_envs + environments).flatten(0, 2).t().contiguous().unbind()

    def begins(self, valid: Tensor) -> Tensor:
        """Returns whether each row [T, N] begins a sequence, or an episode in it, by whether rows are steps."""
        begins = torch.cat([torch.ones_like(valid[:1]), ~valid[:-1]])
        begins[:: len(valid) // self._num_minibatches] = True
        return begins


# --- Loss -------------------------------------------------------------------------------------------------------------
class Evaluated(NamedTuple):
    """Outputs of the current policy for a minibatch, with gradients."""

    log_prob: Tensor  # [B]: log-probabilities of the actions of the rollout
    entropy: Tensor  # [B], in nats
    values: Tensor  # [B]
    outputs: Tensor  # [B, num_outputs]: parameters of the distribution, such as logits


@fused.Operator
def ppo_loss(new: Evaluated, batch: Batch, settings: Settings, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective with value loss and entropy bonus (Schulman et al., 2017, equation 9), negated.

    Args:
        new: outputs of the current policy.
        batch: rows of the rollout. The sum of rows times ``batch.weights`` [B] is their mean over the minibatch.
        settings: settings of the run.
        remaining: the share of the run that is left, from 1 to 0.

    Returns:
        The loss, 0-dim, and metrics to log, 0-dim and without gradients. target_kl uses the metric approx_kl.
    """
    clip = settings.clip_coef * remaining if settings.anneal_clip else settings.clip_coef
    log_ratio = new.log_prob - batch.log_probs  # [B]
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - clip, 1 + clip) * batch.advantages)
    squared_error = (new.values - batch.returns).square()
    if settings.clip_value_loss:
        near = batch.values + (new.values - batch.values).clamp(-clip, clip)
        squared_error = torch.maximum(squared_error, (near - batch.returns).square())
    loss = (0.5 * settings.vf_coef) * squared_error - surrogate - settings.ent_coef * new.entropy
    with torch.no_grad():
        # (r - 1) - log r: never negative and of low variance (Schulman, "Approximating KL Divergence", 2020).
        approx_kl = ratio - 1 - log_ratio
        clipped = ((ratio - 1).abs() > clip).to(ratio.dtype)
        rows = torch.stack([-surrogate, 0.5 * squared_error, new.entropy, approx_kl, clipped])
        metrics = rows.flatten(1) @ batch.weights.flatten()
    return loss.flatten() @ batch.weights.flatten(), dict(zip(fused.METRICS, metrics.unbind(), strict=True))


PolicyMaker = Callable[..., Policy]
Loss = Callable[[Evaluated, Batch, Settings, float], tuple[Tensor, dict[str, Tensor]]]
Advantages = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Settings], Tensor]


def minibatch_loss(
    policy: Policy, batch: Batch, settings: Settings, remaining: float, loss: Loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Evaluates the policy on a minibatch, and then the loss."""
    remembered = () if batch.states is None else (batch.states, batch.begins)
    # The loss stays in fp32, because sums in 16 bits are coarse.
    with autocast(settings.precision, batch.log_probs.device):
        outputs, values = policy(batch.observations, *remembered)
    log_prob, entropy = policy.distribution.log_prob_and_entropy(outputs, batch.actions)
    result = loss(Evaluated(log_prob, entropy, values, outputs), batch, settings, remaining)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"the loss must return (loss, metrics), a 0-dim tensor and a dict; it returned {type(result)}")
    return result


# --- Learning rate ----------------------------------------------------------------------------------------------------
class LearningRate:
    """Sets the learning rate of an optimizer, whose ``lr`` must be a 0-dim tensor, by the settings."""

    def __init__(self, settings: Settings, world_size: int, optimizer: Optimizer) -> None:
        self._settings, self._optimizer, self._warmup = settings, optimizer, 1.0
        self._peak = self._peak_of(world_size)
        device = optimizer.param_groups[0]["lr"].device
        self._adaptive = torch.tensor(self._peak, dtype=torch.float64, device=device)

    def _peak_of(self, world_size: int) -> float:
        # The batch grows with the number of ranks. linear keeps the change per row (Goyal et al., 2017), and sqrt keeps
        # the noise of a step (Krizhevsky, 2014).
        factors = {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": world_size}
        return self._settings.learning_rate * factors[self._settings.lr_scaling]

    def scale_to(self, world_size: int) -> None:
        """Goes on with another number of ranks."""
        before, self._peak = self._peak, self._peak_of(world_size)
        self._adaptive *= self._peak / before

    def start_update(self, *, remaining: float, update: int) -> None:
        """Sets the rate for an update, counted from 0. ``remaining`` goes from 1 to 0 over the run."""
        self._warmup = min(1.0, (update + 1) / (self._settings.warmup_updates + 1))
        if self._settings.lr_schedule == "adaptive":
            self._set(self._adaptive)
        else:
            self._set(self._peak * (remaining if self._settings.lr_schedule == "linear" else 1.0))

    def adapt(self, kl: Tensor) -> None:
        """Changes an adaptive rate by the KL divergence over all ranks, a 0-dim tensor. The host does not read it."""
        target = self._settings.target_kl
        assert target is not None
        smaller = (kl > 2 * target).double()
        larger = ((kl < 0.5 * target) & (kl > 0)).double()
        self._adaptive.mul_(ADAPTIVE_FACTOR ** (larger - smaller)).clamp_(*ADAPTIVE_LIMITS)
        self._set(self._adaptive)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the adaptive rate, and the learning rate that it started from."""
        return {"adaptive": self._adaptive, "peak": torch.tensor(self._peak, dtype=torch.float64, device="cpu")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores ``state_dict()``, unless the settings now ask for another learning rate."""
        if state["peak"] == self._peak:
            self.put_back(state)

    def put_back(self, state: dict[str, Tensor]) -> None:
        """Becomes what it was at ``state_dict()``."""
        self._peak = float(state["peak"])
        self._adaptive.copy_(state["adaptive"])

    def _set(self, learning_rate: Tensor | float) -> None:
        if not isinstance(learning_rate, Tensor):
            learning_rate = torch.tensor(learning_rate, dtype=torch.float32, device="cpu")
        for group in self._optimizer.param_groups:
            group["lr"].copy_(learning_rate * self._warmup)


# --- Update -----------------------------------------------------------------------------------------------------------
class PPO:
    """Collects rollouts, and learns from them together with the other ranks.

    A rank has one rollout at a time. With micro_batches it has one for each micro-batch that falls to it. Whatever
    adds up over rollouts then does so in an order that does not depend on the ranks.
    """

    def __init__(
        self, settings: Settings, environments: Sequence[Environments], device: torch.device,
        policy: PolicyMaker | None = None, loss: Loss = ppo_loss, advantages: Advantages = estimate_advantages,
    ) -> None:  # fmt: skip
        torch.manual_seed(settings.seed)
        self.settings, self.environments, self.device = settings, environments, device
        self.loss, self.estimate_advantages = loss, advantages
        # On CPUs one operator does all of minibatch_loss with ppo_loss, while you have changed neither.
        is_fused = settings.fused and loss is ppo_loss
        self.minibatch_loss = fused.Operator(minibatch_loss) if is_fused else minibatch_loss
        self.step = 0  # environment steps so far, over all ranks
        self.update = 0  # updates so far, one per rollout
        self.streams = [
            RandomStreams(settings.seed, first_index=each.first_index, num_envs=each.num_envs, device=device)
            for each in environments
        ]
        spaces = environments[0].single_observation_space, environments[0].single_action_space
        self.policy = make_policy(settings, *spaces, policy).to(device)
        torch.manual_seed(seed_from(settings.seed, dist.get_rank()))  # ranks draw different Dropout masks
        self.exchange = Exchange(device, settings.micro_batches, names_missing=settings.on_lost_rank == "stop")
        lr = torch.tensor(settings.learning_rate, dtype=torch.float32, device=device)
        self.parameters = list(self.policy.parameters())
        self.optimizer = Adam(self.parameters, lr=lr, eps=1e-5)  # torch.optim.Adam(fused=True), with less overhead
        self.outer: DiLoCo | None = None  # averages weights, if gradients are not averaged
        # From here on all ranks have the weights of rank 0, and backward() averages gradients over the group of
        # self.sync. With micro_batches the end of the loop over them does.
        if settings.sync == "gradients":
            self.sync = attach(
                self.policy, settings.compression, bucket_cap_mb=settings.bucket_cap_mb,
                broadcast_buffers=settings.micro_batches is None and bool(own_buffers(self.policy)),
                micro_batches=settings.micro_batches,
            )  # fmt: skip
        else:
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self.sync = attach(self.policy, process_group=alone)
            kind = DiLoCo if settings.sync == "diloco" else LocalSGD
            self.outer = kind(
                self.policy, self.optimizer, sync_every=1, compression=settings.compression, timeout=settings.timeout
            )
        if settings.on_lost_rank == "continue":
            self.sync.make_revocable()  # averaging then fails as soon as a rank is lost
        self.scaler = GradScaler(device.type, enabled=settings.precision == "fp16")
        self.learning_rate = LearningRate(settings, dist.get_world_size(), self.optimizer)
        is_recurrent = self.policy.recurrent is not None
        self.shuffler = Shuffler(settings.num_minibatches, self.streams, in_sequences=is_recurrent)
        self.reward_normalizer: RewardNormalizer | None = None
        if settings.norm_rewards:
            shape = len(environments), environments[0].num_envs
            self.reward_normalizer = RewardNormalizer(settings.gamma, shape, self.policy.dtype).to(device)
        self.collectors = [
            Collector(settings, each, self.policy, streams)
            for each, streams in zip(environments, self.streams, strict=True)
        ]

    def collect(self) -> list[Rollout]:
        """Collects this rank's rollouts. The policy acts in eval mode."""
        with autocast(self.settings.precision, self.device), in_eval_mode(self.policy):
            return [collector.collect() for collector in self.collectors]

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learns from the rollouts of all ranks. Every rank must call it. Returns metrics of the update."""
        settings, valid = self.settings, [rollout.valid for rollout in rollouts]
        rewards = [rollout.rewards for rollout in rollouts]
        if self.reward_normalizer is not None:
            discounted = [
                self.reward_normalizer.discounted_returns(rollout.rewards, rollout.done, index)
                for index, rollout in enumerate(rollouts)
            ]
            self.reward_normalizer.update(self._moments([each.unsqueeze(-1) for each in discounted], valid))
            rewards = [self.reward_normalizer(each) for each in rewards]
        advantages = [
            self.estimate_advantages(
                own, rollout.values, rollout.next_values, rollout.terminated, rollout.done, settings
            )
            for own, rollout in zip(rewards, rollouts, strict=True)
        ]  # each is [T, N]
        returns = [
            own + rollout.values for own, rollout in zip(advantages, rollouts, strict=True)
        ]  # the critic's targets
        both = [torch.stack(each, -1) for each in zip(advantages, returns, strict=True)]
        both_moments = self._moments(both, valid)  # [5]
        advantage_moments = both_moments[[0, 1, 3]]
        num_valid, num_minibatches = advantage_moments[0], settings.num_minibatches
        if settings.norm_advantages == "rollout" or (settings.norm_advantages == "minibatch" and num_minibatches == 1):
            advantages = [normalize_advantages(each, advantage_moments) for each in advantages]
        num_parts = settings.micro_batches or self.exchange.world_size  # over which gradients are means
        batches = [
            Batch(
                observations=rollout.observations,
                actions=rollout.actions,
                log_probs=rollout.log_probs,
                values=rollout.values,
                advantages=own_advantages,
                returns=own_returns,
                weights=row_weights(rollout.valid, num_valid, world_size=num_parts, num_minibatches=num_minibatches).to(
                    own_advantages.dtype
                ),
                states=rollout.states,
                begins=None if rollout.states is None else self.shuffler.begins(rollout.valid),
            )  # each column is [T, N, ...]
            for rollout, own_advantages, own_returns in zip(rollouts, advantages, returns, strict=True)
        ]
        remaining = max(0.0, 1 - self.step / settings.total_steps)
        self.learning_rate.start_update(remaining=remaining, update=self.update)
        if num_valid:
            metrics = self._update(batches, remaining)
        else:  # all ranks only reset environments, such as with num_steps=1 and episodes that end together
            metrics = dict.fromkeys((*fused.METRICS, "grad_norm"), math.nan) | {"optimizer_steps": 0.0}
        metrics["explained_variance"] = explained_variance(both_moments)
        metrics["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        if self.policy.normalizer is not None:
            # The rollout's log-probabilities belong to the old normalisation, so it is updated only now.
            self.policy.normalizer.learn([rollout.observations for rollout in rollouts], valid, self._moments)
        self.step += int(num_valid)
        self.update += 1
        if self.outer is not None and (self.update % settings.sync_every == 0 or self.step >= settings.total_steps):
            self.outer.step()  # the last update counts, too, so that all ranks end with common weights
            if buffers := own_buffers(self.policy):  # DiLoCo does not average all buffers, such as counts
                self.exchange.broadcast(buffers)
        return metrics

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Goes on with the ranks of another group, in which all have learnt the same so far."""
        self.sync.use_group(group, init_sync=False)
        self.sync.make_revocable()
        self.exchange.use_group(group)
        self.learning_rate.scale_to(group.size())

    def _moments(self, values: Sequence[Tensor], valid: Sequence[Tensor]) -> Tensor:
        """Returns count, sum and sum of squares [1 + 2 D] of valid rows of ``values`` [T, N, D], over all rollouts."""
        return self.exchange.sum_parts([moments(*each) for each in zip(values, valid, strict=True)])

    def _normalize_minibatches(self, advantages: Sequence[Tensor], valid: Sequence[Tensor]) -> list[Tensor]:
        """Normalises the advantages [E, M, B] of each minibatch over the valid rows of all rollouts, by one sum."""

        def moments_of(rows: Tensor, counts: Tensor) -> Tensor:
            counted = rows.double() * counts
            return torch.stack([counts.double(), counted, counted.square()]).sum(-1, keepdim=True)  # [3, E, M, 1]

        parts = [moments_of(*each) for each in zip(advantages, valid, strict=True)]
        of_all = self.exchange.sum_parts(parts)
        return [normalize_advantages(each, of_all) for each in advantages]

    @fused.look_once()
    def _update(self, batches: Sequence[Batch], remaining: float) -> dict[str, float]:
        """Learns from epochs of minibatches. Returns the means of metrics over optimizer steps; NaN without steps."""
        settings, steps = self.settings, [list[list[Tensor]]() for _ in batches]
        normalize = self._normalize_minibatches if settings.norm_advantages == "minibatch" else None
        for minibatches in self.shuffler.minibatches(batches, settings.num_epochs, normalize):
            for parameter in self.parameters:  # zero_grad() takes longer
                parameter.grad = None
            with explain_batch_norm(self.policy, len(minibatches[0].log_probs) // settings.num_micro_batches):
                metrics = self._backward(minibatches, remaining)
            if settings.target_kl is not None:
                kl = self._mean_kl(metrics)  # over ranks that average gradients, so these decide alike
                if settings.lr_schedule == "adaptive":
                    self.learning_rate.adapt(kl)
                elif kl > KL_TOLERANCE * settings.target_kl:
                    break
            norm = self._take_step()
            for rows, of_part in zip(steps, metrics, strict=True):
                rows.append([*of_part.values(), norm])
        # GradScaler skips steps whose gradients are not finite. At a scale of 0 the training is lost, so all count.
        skips = self.scaler.is_enabled() and self.scaler.get_scale() > 0.0
        names = (*metrics[0], "grad_norm")
        tables = [table_of_steps(rows, names, self.device) for rows in steps]
        return mean_of_steps(self.exchange.mean_parts(tables), names, only_finite=skips)

    def _backward(self, minibatches: Sequence[Batch], remaining: float) -> list[dict[str, Tensor]]:
        """Computes gradients, which are means over ranks. Returns the metrics of this rank's rollouts."""
        if self.settings.micro_batches is not None:
            parts = iter(minibatches)
            return [self._backward_of(next(parts), remaining) for _ in self.sync.micro_batches(self.settings.seed)]
        return [self._backward_of(minibatches[0], remaining)]

    def _backward_of(self, minibatch: Batch, remaining: float) -> dict[str, Tensor]:
        """Adds up gradients over the parts of a minibatch. Returns its metrics."""
        settings, part_metrics = self.settings, []
        *first, last = Shuffler.cut(minibatch, settings.num_micro_batches)
        for part in first:
            with self.sync.no_sync() if settings.micro_batches is None else nullcontext():
                loss, metrics = self.minibatch_loss(self.policy, part, settings, remaining, self.loss)
                self.scaler.scale(loss).backward()
            part_metrics.append(metrics)
        loss, metrics = self.minibatch_loss(self.policy, last, settings, remaining, self.loss)
        for others in part_metrics:
            metrics = {name: others[name] + value for name, value in metrics.items()}  # sums of weighted rows
        if settings.target_kl is not None:
            if "approx_kl" not in metrics:
                needs = f"target_kl={settings.target_kl} needs the loss to return a metric called approx_kl"
                raise ValueError(f"{needs}; it returned {', '.join(metrics) or 'none'}")
            if settings.micro_batches is None:
                self.sync.piggyback("kl", metrics["approx_kl"].detach().float())  # travels with the gradients
        self.scaler.scale(loss).backward()
        return metrics

    def _mean_kl(self, metrics: Sequence[dict[str, Tensor]]) -> Tensor:
        """Returns the KL divergence of a minibatch, 0-dim."""
        if self.settings.micro_batches is None:
            return self.sync.piggybacked()["kl"]
        return self.exchange.mean_parts([each["approx_kl"].detach().float() for each in metrics])

    def _take_step(self) -> Tensor:
        """Takes a step of Adam, equal on every rank. The host does not wait for it. Returns the gradient norm."""
        grad_norm = clip_grad_norm_(
            self.sync, self.settings.max_grad_norm, optimizer=self.optimizer, scaler=self.scaler
        )
        self.scaler.step(self.optimizer)  # optimizer.step(), unless precision is fp16
        self.scaler.update()
        return grad_norm


# --- Loop -------------------------------------------------------------------------------------------------------------
def train(
    settings: Settings,
    device: torch.device | None = None,
    *,
    policy: PolicyMaker | None = None,
    loss: Loss | None = None,
    advantages: Advantages | None = None,
) -> tuple[Policy, TrainResult]:
    """Trains a policy with PPO. Every rank must call it with the same arguments. A single process is one rank.

    Rank 0 prints progress, and writes logs and checkpoints into the run's folder. SIGTERM or SIGUSR1 on any rank ends
    the run on all ranks after the current update, with a checkpoint.

    Args:
        settings: settings of the run.
        device: device of this rank; by default ``fastsync.distributed.process_group`` chooses it.
        policy: a subclass of Policy, or a function of the same arguments (observation space, action space, settings)
            that returns a Policy. By default ``settings.policy`` or, without it, ``ActorCritic``.
        loss: replaces ``ppo_loss``. The metrics that it returns go into every log. By default ``settings.loss``.
        advantages: replaces ``estimate_advantages``. By default ``settings.advantages``.

    The run's settings keep the names of all three, by which ``fastsync train --resume auto`` finds them again.

    Returns:
        The policy, the same on every rank, and how the run ended.

    Raises:
        ValueError: the environment, the policy or the run folder does not suit, or the run cannot be resumed. Or a
            function is given here, and the settings name another one.
        RuntimeError: a rank was lost, and ``settings.on_lost_rank`` is stop. Or the ranks' weights differ at the end.
            Or a module that a setting names calls this function while it is imported.
    """
    check_not_importing("fastsync.ppo.train()")
    settings, loss, advantages = resolve(
        settings, (policy, ActorCritic), (loss, ppo_loss), (advantages, estimate_advantages)
    )
    fused.enable(settings.fused, own=[loss, advantages, *([] if loss is ppo_loss else [minibatch_loss])])
    with open_session(settings, device) as session:
        ppo = PPO(settings, session.environments, session.device, policy, loss, advantages)
        session.begin(ppo)
        while not session.is_over:
            rollouts = ppo.collect()
            session.update(ppo.learn, rollouts)  # learns, and reports it; again if a rank is lost meanwhile
        return ppo.policy, session.finish()
