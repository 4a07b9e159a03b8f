"""PPO as CleanRL's ppo.py goes about it, written anew as the baseline: what is measured is its way of working.

It steps a SyncVectorEnv whose environments record their episodes, fills a rollout of tensors row by row, asks two
separate networks through a Categorical distribution, takes advantages in a loop over the rows, shuffles indices with
NumPy, reads the clipped share of every minibatch on the host, and writes to TensorBoard after every iteration.
Hyperparameters that it shares with every trainer are those of ``benchmarks.baselines.training``; the rest are its
defaults. (https://github.com/vwxyzjn/cleanrl, https://docs.cleanrl.dev/rl-algorithms/ppo/#ppopy)
"""

import tempfile
import time
from dataclasses import replace

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

from benchmarks.baselines.training import Outcome, Training, Watch

MAX_GRAD_NORM, ADAM_EPS = 0.5, 1e-5


class ActorCritic(nn.Module):
    """Two networks of two hidden layers: for the distribution and for the value."""

    def __init__(self, num_inputs: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()
        self.critic = _network(num_inputs, hidden_size, 1, last_gain=1.0)
        self.actor = _network(num_inputs, hidden_size, num_actions, last_gain=0.01)

    def forward(self, observations: Tensor, actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Actions (drawn if not given), their log probabilities, the entropy, and values of shape (rows, 1)."""
        distribution = Categorical(logits=self.actor(observations))
        if actions is None:
            actions = distribution.sample()
        return actions, distribution.log_prob(actions), distribution.entropy(), self.critic(observations)


class Rollout:
    """The experience of num_steps steps of num_envs environments; each tensor has a row a step."""

    def __init__(self, num_steps: int, num_envs: int, num_inputs: int, device: str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_steps, num_envs, *shape, device=device)

        self.observations, self.actions = zeros(num_inputs), zeros()
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
    """Trains for as many whole iterations as fit into ``total_steps``, or until it has come far enough."""
    np.random.seed(chosen.seed)  # noqa: NPY002  the shuffle is NumPy's global one, as it is there
    torch.manual_seed(chosen.seed)
    envs = SyncVectorEnv([lambda: RecordEpisodeStatistics(gymnasium.make(chosen.env))] * chosen.num_envs)
    num_inputs, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    agent = ActorCritic(num_inputs, num_actions, chosen.hidden_size).to(chosen.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=chosen.learning_rate, eps=ADAM_EPS)
    rollout = Rollout(chosen.num_steps, chosen.num_envs, num_inputs, chosen.device)
    num_iterations, returns = chosen.total_steps // chosen.batch_size, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        watch = Watch(chosen)
        observation = torch.Tensor(envs.reset(seed=chosen.seed)[0]).to(chosen.device)
        done = torch.zeros(chosen.num_envs, device=chosen.device)
        for iteration in range(num_iterations):
            remaining = 1.0 - iteration / num_iterations
            optimizer.param_groups[0]["lr"] = chosen.learning_rate * (remaining if chosen.anneal_lr else 1.0)
            now = replace(chosen, clip=chosen.clip * remaining) if chosen.anneal_clip else chosen
            observation, done = _collect(envs, agent, rollout, observation, done, returns)
            with torch.no_grad():
                last_value = agent.critic(observation).reshape(-1)
                advantages = rollout.advantages(last_value, done, chosen.gamma, chosen.gae_lambda)
            losses = _learn(agent, optimizer, rollout, advantages, now)
            steps = (iteration + 1) * chosen.batch_size
            losses["learning_rate"] = optimizer.param_groups[0]["lr"]
            losses["steps_per_second"] = int(steps / (time.perf_counter() - watch.began))
            for name, value in losses.items():
                writer.add_scalar(name, value, steps)
            if watch.look(steps, returns):
                break
        outcome = watch.outcome(num_iterations * chosen.batch_size, returns)
        writer.close()
    envs.close()
    return outcome


def _collect(
    envs: SyncVectorEnv, agent: ActorCritic, rollout: Rollout, observation: Tensor, done: Tensor, returns: list[float]
) -> tuple[Tensor, Tensor]:
    """Fills the rollout and returns what comes after it. Adds the returns of episodes that have ended."""
    for step in range(len(rollout.rewards)):
        rollout.observations[step], rollout.dones[step] = observation, done
        with torch.no_grad():
            action, log_prob, _, value = agent(observation)
            rollout.values[step] = value.flatten()
        rollout.actions[step], rollout.log_probs[step] = action, log_prob
        observed, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
        if "episode" in infos:
            returns += infos["episode"]["r"][infos["_episode"]].tolist()
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
    observations, actions = rollout.observations.flatten(0, 1), rollout.actions.reshape(-1).long()
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
            value_clip = chosen.clip if chosen.clip_value_loss else None
            value_loss = _value_loss(new_values.view(-1), values[batch], returns[batch], value_clip)
            mean_entropy = entropy.mean()
            loss = policy_loss - chosen.entropy * mean_entropy + 2 * chosen.value_coef * value_loss
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


def _value_loss(new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    if clip_coef is None:
        return 0.5 * ((new_values - returns) ** 2).mean()
    near = values + torch.clamp(new_values - values, -clip_coef, clip_coef)
    return 0.5 * torch.max((new_values - returns) ** 2, (near - returns) ** 2).mean()


def _network(num_inputs: int, hidden_size: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    first, second = (_initialized(nn.Linear(inputs, hidden_size), 2**0.5) for inputs in (num_inputs, hidden_size))
    last = _initialized(nn.Linear(hidden_size, num_outputs), last_gain)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def _initialized(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
