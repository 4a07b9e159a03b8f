"""PPO as CleanRL's ppo.py goes about it, written anew as the baseline: what is measured is its way of working.

Normal actions and normalising wrappers are those of its ppo_continuous_action.py, convolutions those of ppo_atari.py.

It steps a SyncVectorEnv whose environments record their episodes, fills a rollout of tensors row by row, asks two
separate networks through a Categorical distribution, takes advantages in a loop over the rows, shuffles indices with
NumPy, reads the clipped share of every minibatch on the host, and writes to TensorBoard after every iteration.
Hyperparameters that it shares with every trainer are those of ``benchmarks.baselines.trainers``; the rest are its
defaults. (https://github.com/vwxyzjn/cleanrl, https://docs.cleanrl.dev/rl-algorithms/ppo/#ppopy)
"""

import tempfile
import time
from functools import partial
from itertools import pairwise

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import (
    ClipAction,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TransformObservation,
    TransformReward,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter

from benchmarks.baselines.trainers import GAE_LAMBDA, GAMMA, Outcome, Training
from fastsync.ppo.envs.lookup import find_env

VALUE_COEF, MAX_GRAD_NORM, ADAM_EPS = 0.5, 0.5, 1e-5
LIMIT = 10.0
"""Of normalised observations and rewards."""
NUM_FEATURES = 512


class ActorCritic(nn.Module):
    """Two networks of two hidden layers, or heads on convolutions in common: for the distribution and for the value."""

    def __init__(self, observation_space: Box, action_space: Box | Discrete, hidden_size: int) -> None:
        super().__init__()
        is_continuous = isinstance(action_space, Box)
        num_outputs = action_space.shape[0] if isinstance(action_space, Box) else int(action_space.n)
        self.features: nn.Module = nn.Identity()
        if len(observation_space.shape) == 3:
            self.features = _convolutions()
            self.critic, self.actor = _network(NUM_FEATURES, (), 1, 1.0), _network(NUM_FEATURES, (), num_outputs, 0.01)
        else:
            num_inputs, hidden = observation_space.shape[0], (hidden_size, hidden_size)
            self.critic = _network(num_inputs, hidden, 1, last_gain=1.0)
            self.actor = _network(num_inputs, hidden, num_outputs, last_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(1, num_outputs)) if is_continuous else None

    def forward(self, observations: Tensor, actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Actions (drawn if not given), their log probabilities, the entropy, and values of shape (rows, 1)."""
        features = self.features(observations)
        distribution = self._distribution(self.actor(features))
        if actions is None:
            actions = distribution.sample()
        return actions, distribution.log_prob(actions), distribution.entropy(), self.critic(features)

    def value(self, observations: Tensor) -> Tensor:
        """Of shape (rows, 1)."""
        return self.critic(self.features(observations))

    def _distribution(self, outputs: Tensor) -> Distribution:
        if self.log_std is None:
            return Categorical(logits=outputs)
        return Independent(Normal(outputs, self.log_std.expand_as(outputs).exp()), 1)


class Rollout:
    """The experience of num_steps steps of num_envs environments; each tensor has a row a step."""

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_shape: tuple[int, ...],
        action_shape: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_steps, num_envs, *shape, device=device)

        self.observations, self.actions = zeros(*observation_shape), zeros(*action_shape)
        self.log_probs, self.rewards, self.dones, self.values = (zeros() for _ in range(4))

    def advantages(self, last_value: Tensor, last_done: Tensor, gamma: float, gae_lambda: float) -> Tensor:
        """Generalised advantage estimation, from the last row to the first (Schulman et al., 2016)."""
        advantages = torch.zeros_like(self.rewards)
        following = torch.zeros_like(last_done)
        next_value, continues = last_value, 1.0 - last_done
        for step in range(len(self.rewards) - 1, -1, -1):
            surprise = self.rewards[step] + gamma * next_value * continues - self.values[step]
            following = surprise + gamma * gae_lambda * continues * following
            advantages[step] = following
            next_value, continues = self.values[step], 1.0 - self.dones[step]
        return advantages


def train(chosen: Training) -> Outcome:
    """Trains for as many whole iterations as fit into ``total_steps``."""
    np.random.seed(chosen.seed)  # noqa: NPY002  the shuffle is NumPy's global one, as it is there
    torch.manual_seed(chosen.seed)
    envs = SyncVectorEnv([partial(_make_env, chosen)] * chosen.num_envs)
    observations, actions = envs.single_observation_space, envs.single_action_space
    agent = ActorCritic(observations, actions, chosen.hidden_size).to(chosen.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=chosen.learning_rate, eps=ADAM_EPS)
    rollout = Rollout(chosen.num_steps, chosen.num_envs, observations.shape, actions.shape, chosen.device)
    num_iterations = chosen.total_steps // chosen.batch_size
    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        began = time.perf_counter()
        observation = torch.Tensor(envs.reset(seed=chosen.seed)[0]).to(chosen.device)
        done = torch.zeros(chosen.num_envs, device=chosen.device)
        for iteration in range(num_iterations):
            optimizer.param_groups[0]["lr"] = chosen.learning_rate * (1.0 - iteration / num_iterations)
            observation, done = _collect(envs, agent, rollout, observation, done)
            with torch.no_grad():
                last_value = agent.value(observation).reshape(-1)
                advantages = rollout.advantages(last_value, done, GAMMA, GAE_LAMBDA)
            losses = _learn(agent, optimizer, rollout, advantages, chosen)
            steps = (iteration + 1) * chosen.batch_size
            losses["learning_rate"] = optimizer.param_groups[0]["lr"]
            losses["steps_per_second"] = int(steps / (time.perf_counter() - began))
            for name, value in losses.items():
                writer.add_scalar(name, value, steps)
        seconds = time.perf_counter() - began
        writer.close()
    returns = [episode for env in envs.envs for episode in env.get_wrapper_attr("return_queue")]
    envs.close()
    mean_return = float(np.mean(returns)) if returns else None  # of the newest episodes
    return Outcome(num_iterations * chosen.batch_size, seconds, mean_return)


def _collect(
    envs: SyncVectorEnv, agent: ActorCritic, rollout: Rollout, observation: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Fills the rollout and returns what comes after it."""
    for step in range(len(rollout.rewards)):
        rollout.observations[step], rollout.dones[step] = observation, done
        with torch.no_grad():
            action, log_prob, _, value = agent(observation)
            rollout.values[step] = value.flatten()
        rollout.actions[step], rollout.log_probs[step] = action, log_prob
        observed, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
        rollout.rewards[step] = torch.tensor(reward).view(-1)
        observation = torch.Tensor(observed).to(observation.device)
        done = torch.Tensor(np.logical_or(terminated, truncated)).to(done.device)
    return observation, done


def _learn(
    agent: ActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Tensor,
    chosen: Training,
) -> dict[str, float]:
    """Updates the agent and returns what is logged."""
    observations, actions = rollout.observations.flatten(0, 1), rollout.actions.flatten(0, 1)
    actions = actions if agent.log_std is not None else actions.long()
    log_probs, values = rollout.log_probs.reshape(-1), rollout.values.reshape(-1)
    returns, advantages = (advantages + rollout.values).reshape(-1), advantages.reshape(-1)
    indices = np.arange(chosen.batch_size)
    clipped_shares = []
    for _ in range(chosen.num_epochs):
        np.random.shuffle(indices)  # noqa: NPY002
        for batch in np.split(indices, range(chosen.minibatch_size, chosen.batch_size, chosen.minibatch_size)):
            _, new_log_probs, entropy, new_values = agent(observations[batch], actions[batch])
            log_ratio = new_log_probs - log_probs[batch]
            ratio = log_ratio.exp()
            with torch.no_grad():
                old_kl, kl = (-log_ratio).mean(), ((ratio - 1) - log_ratio).mean()
                clipped_shares.append(((ratio - 1.0).abs() > chosen.clip).float().mean().item())
            advantage = advantages[batch]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy_loss = _policy_loss(advantage, ratio, chosen.clip)
            value_loss = _value_loss(new_values.view(-1), values[batch], returns[batch], chosen.clip)
            mean_entropy = entropy.mean()
            loss = policy_loss - chosen.entropy * mean_entropy + VALUE_COEF * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()
    predicted, true = values.cpu().numpy(), returns.cpu().numpy()
    variance = np.var(true)
    return {
        "value_loss": value_loss.item(),
        "policy_loss": policy_loss.item(),
        "entropy": mean_entropy.item(),
        "old_approx_kl": old_kl.item(),
        "approx_kl": kl.item(),
        "clip_fraction": float(np.mean(clipped_shares)),
        "explained_variance": float("nan") if variance == 0 else 1 - float(np.var(true - predicted) / variance),
    }


def _policy_loss(advantage: Tensor, ratio: Tensor, clip_coef: float) -> Tensor:
    clipped = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantage * ratio, -advantage * clipped).mean()


def _value_loss(new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    near = values + torch.clamp(new_values - values, -clip_coef, clip_coef)
    return 0.5 * torch.max((new_values - returns) ** 2, (near - returns) ** 2).mean()


def _make_env(chosen: Training) -> gymnasium.Env:
    if chosen.is_atari:
        return find_env(chosen.env).make(RecordEpisodeStatistics)
    env: gymnasium.Env = RecordEpisodeStatistics(gymnasium.make(chosen.env))
    if not chosen.normalize:
        return env
    env = NormalizeObservation(ClipAction(env))
    env = TransformObservation(env, lambda seen: np.clip(seen, -LIMIT, LIMIT), env.observation_space)
    return TransformReward(NormalizeReward(env, gamma=GAMMA), lambda reward: np.clip(reward, -LIMIT, LIMIT))


class _Scaled(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images / 255.0


def _convolutions() -> nn.Sequential:
    """Features of four pictures of 84 x 84 (Mnih et al., 2015)."""
    layers: list[nn.Module] = [_Scaled()]
    for layer in (nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)):
        layers += [_initialized(layer, 2**0.5), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), _initialized(nn.Linear(64 * 7 * 7, NUM_FEATURES), 2**0.5), nn.ReLU())


def _network(num_inputs: int, hidden_sizes: tuple[int, ...], num_outputs: int, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([num_inputs, *hidden_sizes]):
        layers += [_initialized(nn.Linear(inputs, outputs), 2**0.5), nn.Tanh()]
    last = nn.Linear(hidden_sizes[-1] if hidden_sizes else num_inputs, num_outputs)
    return nn.Sequential(*layers, _initialized(last, last_gain))


def _initialized(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
