"""The learner: policy, optimizer and all that decides how rollouts become better weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from fastsync.ppo.adam import Adam
from fastsync.ppo.advantages import estimate_advantages, normalize_advantages
from fastsync.ppo.config import Settings
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.gradient_sync import make_gradient_sync
from fastsync.ppo.minibatches import Batch, Shuffler
from fastsync.ppo.normalize import RewardNormalizer, moments
from fastsync.ppo.policy import ActorCritic
from fastsync.ppo.random_streams import RandomStreams
from fastsync.ppo.rollout import Rollout
from fastsync.ppo.step_sizes import StepSizes
from fastsync.ppo.update import Updater, row_weights
from fastsync.stopwatch import Stopwatch


class Learner:
    """Turns rollouts into updates, together with the learners of all other ranks.

    Args:
        settings: of the run, the same on every rank.
        policy: to be improved, on its device.
        streams: random numbers of this rank's environments.
        exchange: with the other ranks.
        world_size: number of ranks.
    """

    def __init__(
        self, settings: Settings, policy: ActorCritic, streams: RandomStreams, exchange: Exchange, *, world_size: int
    ) -> None:
        self._settings = settings
        self._world_size = world_size
        self._streams = streams
        self._exchange = exchange
        device = streams.device
        self.policy = policy
        self.sync = make_gradient_sync(settings, policy)
        self._optimizer = Adam(policy.parameters(), lr=torch.tensor(settings.learning_rate, device=device), eps=1e-5)
        self._scaler = GradScaler(device.type, enabled=settings.precision == "fp16")
        self._step_sizes = StepSizes(settings, world_size, device)
        self._rewards = RewardNormalizer(settings.gamma).to(device) if settings.norm_rewards else None
        self._discounted_return = torch.zeros(settings.num_envs, dtype=policy.dtype, device=device)
        self._stopwatch = Stopwatch(device)
        self._updater = Updater(
            settings=settings,
            sync=self.sync,
            distribution=policy.distribution,
            optimizer=self._optimizer,
            scaler=self._scaler,
            step_sizes=self._step_sizes,
            shuffler=Shuffler(settings.num_minibatches, streams),
            device=device,
        )

    def learn(self, rollout: Rollout, *, step: int, update: int) -> tuple[int, dict[str, float]]:
        """Learns from the rollouts of all ranks. Every rank must call it.

        Args:
            rollout: this rank's.
            step: environment steps done before it, over all ranks.
            update: number of rollouts learnt from before.

        Returns:
            Environment steps in the rollouts of all ranks, and figures of the update.
        """
        settings = self._settings
        rewards, observation_moments = self._normalize(rollout)
        advantages = estimate_advantages(
            rewards,
            rollout.values,
            rollout.next_values,
            rollout.terminated,
            rollout.done,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )
        over_all_ranks = self._sum_over_ranks(moments(advantages.unsqueeze(-1), rollout.valid))
        num_valid = over_all_ranks[0]
        weights = row_weights(
            rollout.valid, num_valid, world_size=self._world_size, num_minibatches=settings.num_minibatches
        )
        batch = Batch(
            observations=rollout.observations,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=rollout.values,
            advantages=normalize_advantages(advantages, over_all_ranks) if settings.norm_advantages else advantages,
            returns=advantages + rollout.values,
            weights=weights.to(advantages.dtype),
            starts=rollout.starts if settings.is_recurrent else None,
            memory=rollout.memory,
        )
        self._step_sizes.start_update(self._optimizer, step=step, update=update)
        metrics = self._updater.update(batch)
        metrics["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
        if self.policy.normalizer is not None and observation_moments is not None:
            # Not before: the rollout's log-probabilities are those of observations normalised as they were.
            self.policy.normalizer.update(observation_moments)
        return int(num_valid), metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped; the same on every rank."""
        return {
            "model": self.policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "sync": self.sync.state_dict(),
            "schedule": self._step_sizes.state_dict(),
            "rewards": self._rewards.state_dict() if self._rewards is not None else {},
            "num_draws": self._streams.num_draws,
        }

    def load_state_dict(self, state: dict[str, Any], residuals: dict[str, Any]) -> None:
        """Goes on from ``state_dict()``, also of other settings, and from what error feedback has not sent yet."""
        self.policy.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"].to(self._streams.device)
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if state["sync"]:
            self.sync.load_state_dict(state["sync"], residuals)
        self._step_sizes.load_state_dict(state["schedule"])
        if self._rewards is not None and state["rewards"]:
            self._rewards.load_state_dict(state["rewards"])
        self._streams.num_draws = state["num_draws"]

    def waiting_seconds(self) -> float:
        """Time in collectives other than the gradients' so far; on a GPU it waits for those that are under way."""
        return self._stopwatch.seconds()

    def environment_state(self) -> dict[str, Tensor]:
        """Returns what it keeps for each of this rank's environments, one row each, on the CPU."""
        return {"discounted_return": self._discounted_return.cpu()}

    def load_environment_state(self, columns: dict[str, Tensor]) -> None:
        """Goes on from ``environment_state()``."""
        self._discounted_return.copy_(columns["discounted_return"])

    def _sum_over_ranks(self, moments: Tensor) -> Tensor:
        with self._stopwatch:
            return self._exchange.sum(moments)

    def _normalize(self, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        """The rewards to learn from, and the moments of all ranks' observations if they are normalised."""
        returns = None
        if self._rewards is not None:
            returns = self._rewards.discounted_returns(rollout.rewards, rollout.done, self._discounted_return)
        mine = []
        if returns is not None:
            mine.append(moments(returns.unsqueeze(-1), rollout.valid))
        if self.policy.normalizer is not None:
            mine.append(moments(self.policy.numbers(rollout.observations), rollout.valid))
        if not mine:
            return rollout.rewards, None
        over_all_ranks = list(self._sum_over_ranks(torch.cat(mine)).split([len(part) for part in mine]))
        rewards = rollout.rewards
        if self._rewards is not None:
            self._rewards.update(over_all_ranks.pop(0))
            rewards = self._rewards(rewards)
        return rewards, over_all_ranks[0] if over_all_ranks else None
