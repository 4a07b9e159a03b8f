"""PPO on one rank or on many, from top to bottom: settings, rollout, advantages, loss, update, loop.

The algorithm: Schulman et al., "Proximal policy optimization algorithms", 2017, https://arxiv.org/abs/1707.06347
Shapes stand beside tensors: T steps of a rollout, N environments of this rank, B rows of a minibatch.

What you edit here is what runs. On CPUs an operator of csrc/ppo computes what ``@fused.Operator`` marks, but only as
long as its source is the one that the operator was proven equal to. The run says so; with ``--no-fused`` none does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from .. import clip_grad_norm_
from ..stats import SyncStats
from ..stopwatch import Stopwatch
from . import fused
from .batches import Batch, Buffers, Shuffler, row_weights
from .envs.interface import Environments, Episode, Step
from .normalize import RewardNormalizer, mean_and_variance, moments, normalize
from .optimizer import LearningRate, kl_of
from .policies import Policy, autocast, make_policy
from .random_streams import RandomStreams
from .runs.metrics import InfoMeans, TrainResult
from .session import open_session
from .settings import RunSettings
from .sync import Exchange, attach_by, outer_steps

KL_TOLERANCE = 1.5  # a minibatch's excess over target_kl that ends the learning from a rollout, as in Stable-Baselines3


# --- Settings ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings(RunSettings):
    """PPO's settings, after those of every run. Counts of environments, steps and minibatches are per rank."""

    num_steps: int = 32  # Steps of each environment per rollout.
    gamma: float = 0.98  # Discount per step.
    gae_lambda: float = 0.95  # Weight of longer returns in generalised advantage estimation.
    norm_advantages: bool = True  # Shift and scale advantages to mean 0 and variance 1 over the rollouts of all ranks.
    norm_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return over all ranks; cut off at 10."""

    clip_coef: float = 0.2
    """How far the probability ratio may move from 1 before the objective stops rewarding it."""
    anneal_clip: bool = False  # Lower clip_coef linearly to 0 over the run.
    clip_value_loss: bool = False  # Also keep the value within clip_coef of what it was when the rollout was made.
    vf_coef: float = 0.5  # Weight of the value loss.
    ent_coef: float = 0.01  # Weight of the entropy bonus.

    num_epochs: int = 10  # Passes over each rollout.
    num_minibatches: int = 4  # Optimizer steps per pass. It must divide num_envs * num_steps.
    num_micro_batches: int = 1
    """Parts that a minibatch goes through the network in, to save memory. Gradients are sent once, with the last."""
    learning_rate: float = 1e-3  # Step size of Adam at the start.
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """linear: to 0 over the run. adaptive: divided or multiplied by 1.5 where the KL divergence of a minibatch is over
    twice, or under half of target_kl, but kept within 1e-5 and 1e-2."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the number of ranks, or by its square root."""
    warmup_updates: int = 0  # Rollouts over which the learning rate rises to its full height.
    max_grad_norm: float = 0.5  # Largest norm of the gradient averaged over ranks; longer ones are scaled down.
    target_kl: float | None = None
    """KL divergence between old and new policy, over all ranks. Without lr_schedule=adaptive a minibatch with more than
    1.5 times as much ends the learning from its rollout."""

    def __post_init__(self) -> None:
        counts = ("num_steps", "num_epochs", "num_minibatches", "num_micro_batches")
        self._check("must be at least 1", lambda value: value >= 1, *counts)
        self._check("must be greater than 0", lambda value: value is None or value > 0, "max_grad_norm", "target_kl")
        self._check("must be a finite number greater than 0", lambda v: 0 < v < math.inf, "learning_rate", "clip_coef")
        self._check("must not be negative", lambda value: value >= 0, "ent_coef", "vf_coef", "warmup_updates")
        self._check("must lie in [0, 1]", lambda value: 0 <= value <= 1, "gamma", "gae_lambda")
        super().__post_init__()
        if self.lr_schedule == "adaptive" and self.target_kl is None:
            raise ValueError("lr_schedule='adaptive' needs the KL divergence to aim at; set target_kl, such as 0.01")
        num_rows = self.num_envs * self.num_steps
        self._check_divides("num_minibatches", num_rows, "of a rank's rollout")
        self._check_divides("num_micro_batches", num_rows // self.num_minibatches, "of a minibatch")


# --- Rollout ----------------------------------------------------------------------------------------------------------
class Rollout(NamedTuple):
    """The outcome of T steps of N environments; the next rollout overwrites these tensors.

    An episode restarts in a step of its own, which ignores the action, has reward 0, and is not valid.
    """

    observations: Tensor  # [T, N, *observation_shape]: what the policy saw
    actions: Tensor  # [T, N, *action_shape]: what it did
    values: Tensor  # [T, N]: the critic's value of the observations
    rewards: Tensor  # [T, N]
    terminated: Tensor  # [T, N] bool: the step led to a terminal state, whose value is 0
    done: Tensor  # [T, N] bool: the step ended the episode, by termination or truncation
    valid: Tensor  # [T, N] bool: the row is a step of an episode, and not a restart
    log_probs: Tensor  # [T, N]: log-probability of the actions
    next_values: Tensor  # [T, N]: of the next observations: where an episode ended, of that episode's last one
    episodes: list[Episode]  # those that ended
    infos: dict[str, float]  # means of what settings.log_info names
    environment_seconds: float
    policy_seconds: float
    ended: float  # when, by time.perf_counter


class Collector:
    """Steps the environments with the policy, whose weights may change between rollouts."""

    def __init__(self, settings: Settings, environments: Environments, policy: Policy, streams: RandomStreams) -> None:
        self.settings, self.environments, self.policy, self.streams = settings, environments, policy, streams
        self.buffers = Buffers(settings.num_steps, environments, policy, streams.device)
        self.next_observation = environments.reset()  # [N, *observation_shape]: goes on into the next rollout

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Acts for T steps."""
        began, environment_seconds = time.perf_counter(), 0.0
        policy, buffers, distribution = self.policy, self.buffers, self.policy.distribution
        uniform = self.streams.uniform(self.settings.num_steps, distribution.num_outputs, policy.dtype)
        noises = distribution.noise(uniform).unbind()  # T of [N, num_outputs]
        episodes, infos = list[Episode](), InfoMeans(self.settings.log_info)
        for row, (seen, outputs, actions, values) in enumerate(buffers.rows):
            seen.copy_(torch.from_numpy(self.next_observation))
            features = policy.features(seen)
            outputs.copy_(said := policy.outputs(features))
            if policy.trunk is not None:
                values.copy_(policy.value(features))
            actions.copy_(distribution.sample(said, noises[row]))
            stepped = time.perf_counter()
            step = self.environments.step(actions.cpu().numpy())
            environment_seconds += time.perf_counter() - stepped
            self._record(row, step, episodes)
            if self.settings.log_info:
                infos.add(step)
        buffers.observations[-1].copy_(torch.from_numpy(self.next_observation))
        if policy.trunk is not None:
            buffers.values[-1] = policy.value(policy.features(buffers.observations[-1]))
        else:  # nothing has asked the critic yet, so it answers for all rows at once
            buffers.values.copy_(policy.value(policy.features(buffers.observations)))
        return Rollout(
            **buffers.columns(),
            log_probs=distribution.log_prob(buffers.outputs, buffers.actions),
            next_values=buffers.values[1:],
            episodes=episodes,
            infos=infos.means(),
            environment_seconds=environment_seconds,
            policy_seconds=(ended := time.perf_counter()) - began - environment_seconds,
            ended=ended,
        )

    def _record(self, row: int, step: Step, episodes: list[Episode]) -> None:
        done = step.terminated | step.truncated
        buffers = self.buffers
        buffers.rewards[row], buffers.terminated[row], buffers.done[row] = step.rewards, step.terminated, done
        buffers.valid[row] = step.valid
        self.next_observation = step.observations
        episodes.extend(episode._replace(row=row) for episode in step.episodes)


# --- Advantages -------------------------------------------------------------------------------------------------------
@fused.Operator
def discounted_sums(summands: Tensor, decays: Tensor) -> Tensor:
    """Sums [T, N] over what is yet to come: ``sums[t] = summands[t] + decays[t] * sums[t + 1]``; the last is itself."""
    sums = torch.empty_like(summands)
    following = torch.zeros_like(summands[0])
    for summand, decay, result in zip(summands.flip(0), decays.flip(0), reversed(sums.unbind()), strict=True):
        following = torch.addcmul(summand, decay, following, out=result)
    return sums


def estimate_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, settings: Settings
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., ICLR 2016, https://arxiv.org/abs/1506.02438, equation 16).

    All are [T, N], as in Rollout. A step's successor is worth 0 where the episode terminated, and ``next_values``
    otherwise: also where it was truncated. No advantage flows back over the end of an episode. Rows that are restarts
    get a number too, which means nothing and reaches no other row.
    """
    deltas = rewards + settings.gamma * next_values * ~terminated - values
    decays = settings.gamma * settings.gae_lambda * (~done).to(deltas.dtype)
    return discounted_sums(deltas, decays)


def normalize_advantages(advantages: Tensor, moments: Tensor) -> Tensor:
    """Shifts and scales advantages [T, N] to the mean 0 and variance 1 of the rows that ``moments`` [3] are of."""
    _, mean, variance = mean_and_variance(moments)
    return ((advantages.double() - mean) / (variance.sqrt() + 1e-8)).to(advantages.dtype)


# --- Loss -------------------------------------------------------------------------------------------------------------
class Evaluated(NamedTuple):
    """What the policy that learns says of a minibatch, with gradients."""

    log_prob: Tensor  # [B]: of the actions that were taken
    entropy: Tensor  # [B], in nats
    values: Tensor  # [B]
    outputs: Tensor  # [B, num_outputs]: what the distribution is made of, such as logits


@fused.Operator
def ppo_loss(new: Evaluated, batch: Batch, settings: Settings, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective with value loss and entropy bonus (Schulman et al., 2017, equation 9), negated.

    Args:
        new: what the policy says now.
        batch: what it said and did when the rollout was made, and how good that was. A sum of rows by ``batch.weights``
            [B] is their mean over the minibatch.
        settings: of the run.
        remaining: what is left of the run, from 1 to 0.

    Returns:
        The loss, 0-dim, and figures to log, 0-dim and without gradients, of which target_kl reads approx_kl.
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
        figures = rows.flatten(1) @ batch.weights.flatten()
    return loss.flatten() @ batch.weights.flatten(), dict(zip(fused.FIGURES, figures.unbind(), strict=True))


PolicyMaker = Callable[..., Policy]
Loss = Callable[[Evaluated, Batch, Settings, float], tuple[Tensor, dict[str, Tensor]]]
Advantages = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Settings], Tensor]


def minibatch_loss(
    model: torch.nn.Module, policy: Policy, batch: Batch, settings: Settings, remaining: float, loss: Loss = ppo_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Asks the policy (``model`` is it, maybe in DDP) about a minibatch, and the loss about its answers."""
    with autocast(settings.precision, batch.log_probs.device):  # the model alone: sums of 16 bits would be coarse
        outputs, values = model(batch.observations)
    log_prob, entropy = policy.distribution.log_prob_and_entropy(outputs, batch.actions)
    return loss(Evaluated(log_prob, entropy, values, outputs), batch, settings, remaining)


# --- Update -----------------------------------------------------------------------------------------------------------
class PPO:
    """Rollouts, and learning from them together with the other ranks."""

    def __init__(
        self, settings: Settings, environments: Environments, device: torch.device, policy: PolicyMaker | None = None,
        loss: Loss = ppo_loss, advantages: Advantages = estimate_advantages,
    ) -> None:  # fmt: skip
        torch.manual_seed(settings.seed)
        self.settings, self.environments, self.device = settings, environments, device
        self.loss, self.estimate_advantages = loss, advantages
        self.step = 0  # environment steps done, over all ranks
        self.update = 0  # rollouts learnt from
        first, num_envs = environments.first_index, environments.num_envs
        self.streams = RandomStreams(settings.seed, first_index=first, num_envs=num_envs, device=device)
        spaces = environments.single_observation_space, environments.single_action_space
        self.policy = make_policy(settings, *spaces, policy).to(device)
        self.exchange = Exchange(device)
        self.sync = attach_by(settings, self.policy)  # all ranks hold rank 0's weights now
        lr = torch.tensor(settings.learning_rate, device=device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr, eps=1e-5, fused=True)
        self.outer = outer_steps(settings, self.policy, self.optimizer)  # None where gradients are averaged
        self.scaler = GradScaler(device.type, enabled=settings.precision == "fp16")
        self.learning_rate = LearningRate(settings, dist.get_world_size(), self.optimizer)
        self.shuffler = Shuffler(settings.num_minibatches, self.streams)
        self.reward_normalizer: RewardNormalizer | None = None
        if settings.norm_rewards:
            self.reward_normalizer = RewardNormalizer(settings.gamma, num_envs, self.policy.dtype).to(device)
        self.waiting = Stopwatch(device)  # for other ranks, except for their gradients
        self.collector = Collector(settings, environments, self.policy, self.streams)

    def collect(self) -> Rollout:
        """A rollout of this rank."""
        with autocast(self.settings.precision, self.device):
            return self.collector.collect()

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Learns from the rollouts of all ranks. Every rank must call it. Returns figures of the update."""
        settings = self.settings
        rewards, observation_moments = normalize(
            rollout, self.policy, self.reward_normalizer, self._sum_over_ranks, discounted_sums
        )
        advantages = self.estimate_advantages(
            rewards, rollout.values, rollout.next_values, rollout.terminated, rollout.done, settings
        )  # [T, N]
        over_all_ranks = self._sum_over_ranks(moments(advantages.unsqueeze(-1), rollout.valid))  # [3]
        num_valid, spread = over_all_ranks[0], {"world_size": dist.get_world_size()}
        weights = row_weights(rollout.valid, num_valid, **spread, num_minibatches=settings.num_minibatches)
        batch = Batch(
            observations=rollout.observations,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=rollout.values,
            advantages=normalize_advantages(advantages, over_all_ranks) if settings.norm_advantages else advantages,
            returns=advantages + rollout.values,
            weights=weights.to(advantages.dtype),
        )  # of columns [T, N, ...]
        remaining = max(0.0, 1 - self.step / settings.total_steps)
        self.learning_rate.start_update(remaining=remaining, update=self.update)
        figures = self._update(batch, remaining)
        figures["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        if self.policy.normalizer is not None and observation_moments is not None:
            # Not before: the rollout's log-probabilities are those of observations normalised as they were.
            self.policy.normalizer.update(observation_moments)
        self.step += int(num_valid)
        self.update += 1
        if self.outer is not None:
            is_last = self.step >= settings.total_steps
            for _ in range(1 + is_last * (-self.update % settings.sync_every)):  # at the end all get common weights
                self.outer.step()
        return figures

    def sync_stats(self) -> SyncStats:
        """What synchronising has taken so far."""
        return self.sync.stats() if self.outer is None else self.outer.stats()[0]

    def _sum_over_ranks(self, moments: Tensor) -> Tensor:
        with self.waiting:
            return self.exchange.sum(moments)

    def _update(self, batch: Batch, remaining: float) -> dict[str, float]:
        """Epochs of minibatches. Returns means over the steps that were taken; NaN where none was."""
        settings, steps = self.settings, list[list[Tensor]]()
        for minibatch in self.shuffler.minibatches(batch, settings.num_epochs):
            self.optimizer.zero_grad()
            figures, kl = self._backward(minibatch, remaining)
            if kl is not None and settings.lr_schedule == "adaptive":
                self.learning_rate.adapt(kl)
            elif kl is not None and kl > KL_TOLERANCE * (settings.target_kl or math.inf):
                break  # on every rank alike, for kl is alike
            grad_norm = self._take_step()
            if grad_norm is not None:
                steps.append([*figures.values(), grad_norm])
        names = (*figures, "grad_norm")
        logged = [value.detach().float() for of_step in steps for value in of_step]
        means = torch.stack(logged).view(len(steps), -1).mean(0).tolist() if steps else [math.nan] * len(names)
        return dict(zip(names, means, strict=True)) | {"optimizer_steps": len(steps)}

    def _take_step(self) -> Tensor | None:
        """An optimizer step, the same on every rank. Returns the gradient's norm; None where GradScaler refused."""
        max_norm, scale = self.settings.max_grad_norm, self.scaler.get_scale()
        grad_norm = clip_grad_norm_(self.sync, max_norm, optimizer=self.optimizer, scaler=self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return grad_norm if self.scaler.get_scale() >= scale else None

    def _backward(self, minibatch: Batch, remaining: float) -> tuple[dict[str, Tensor], Tensor | None]:
        """The figures of the minibatch on this rank, and with target_kl the KL divergence over all ranks."""
        *first, last = Shuffler.cut(minibatch, self.settings.num_micro_batches)
        of_parts = []
        for part in first:
            with self.sync.no_sync():
                loss, figures = self._loss(part, remaining)
                self.scaler.scale(loss).backward()
            of_parts.append(figures)
        loss, figures = self._loss(last, remaining)
        for others in of_parts:
            figures = {name: others[name] + figure for name, figure in figures.items()}
        kl = kl_of(figures, self.settings.target_kl)
        if kl is not None:
            self.sync.piggyback("kl", kl)  # travels with the gradients
        self.scaler.scale(loss).backward()  # when it returns, gradients are means over ranks
        return figures, None if kl is None else self.sync.piggybacked()["kl"]

    def _loss(self, part: Batch, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
        return minibatch_loss(self.policy, self.policy, part, self.settings, remaining, self.loss)


# --- Loop -------------------------------------------------------------------------------------------------------------
def train(
    settings: Settings,
    device: torch.device | None = None,
    *,
    policy: PolicyMaker | None = None,
    loss: Loss = ppo_loss,
    advantages: Advantages = estimate_advantages,
) -> tuple[Policy, TrainResult]:
    """Trains a policy with PPO. Every rank must call it with the same arguments; one process alone is a rank, too.

    Rank 0 shows progress and writes logs, learning curve and checkpoints into the run's folder. SIGTERM or SIGUSR1 on
    any rank ends the run in order on all of them after the update they are in, with a checkpoint.

    Args:
        settings: of the run.
        device: of this rank; by default as ``fastsync.distributed.process_group`` chooses.
        policy: makes it of the spaces of observations and actions and the settings: a subclass of Policy does.
        loss: in the place of ``ppo_loss``. What figures it returns go into every log.
        advantages: in the place of ``estimate_advantages``.

    Returns:
        The policy, the same on every rank, and how the run ended.

    Raises:
        ValueError: an environment, a policy or a run folder that will not do, or a run that cannot be gone on with.
        RuntimeError: a rank was lost, or the ranks' weights differ at the end.
    """
    fused.enable(settings.fused)
    with open_session(settings, device) as session:
        ppo = PPO(settings, session.environments, session.device, policy=policy, loss=loss, advantages=advantages)
        session.begin(ppo, fused.what_runs(ppo.policy, [loss, advantages], session.device))
        while not session.is_over:
            rollout = ppo.collect()
            figures = ppo.learn(rollout)
            session.tell(rollout, figures)
        return ppo.policy, session.finish()
