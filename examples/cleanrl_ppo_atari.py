"""PPO on Atari as CleanRL's ppo_atari_multigpu writes it, with one call in place of its all-reduce.

    torchrun --standalone --nproc-per-node=2 examples/cleanrl_ppo_atari.py
    python examples/cleanrl_ppo_atari.py

CleanRL concatenates all gradients after backward(), all-reduces them, and copies them back divided by the number of
ranks. fastsync.all_reduce_gradients(agent.parameters()) does that in one pass each way, and leaves the same gradients.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import ale_py
    import cv2  # noqa: F401, gymnasium's preprocessing takes it
    import gymnasium
    import tyro
except ImportError:
    raise SystemExit(
        "this example needs ALE: pip install 'gymnasium>=1.4' ale-py opencv-python-headless tyro"
    ) from None


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    total_timesteps: int = 10_000_000
    """steps of all environments of all ranks together"""
    num_envs: int = 8
    """environments of all ranks together"""
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 4
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.1
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    seed: int = 1


def make_env(env_id):
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))
    env = gymnasium.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.TransformReward(env, np.sign), 4)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, num_actions):
        super().__init__()
        convolutions = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]  # channels in and out, kernel, stride
        layers = [part for sizes in convolutions for part in (layer_init(nn.Conv2d(*sizes)), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU())
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def forward(self, images):
        hidden = self.network(images / 255.0)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_envs = args.num_envs // world_size
    gymnasium.register_envs(ale_py)
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs = gymnasium.vector.SyncVectorEnv([lambda: make_env(args.env_id)] * num_envs, **same_step)
    torch.manual_seed(args.seed)  # the same weights everywhere
    agent = Agent(envs.single_action_space.n).to(device)
    torch.manual_seed(args.seed + rank)  # but not the same actions
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    rows = (args.num_steps, num_envs)
    obs = torch.zeros(*rows, 4, 84, 84, dtype=torch.uint8, device=device)
    actions = torch.zeros(rows, dtype=torch.long, device=device)
    log_probs, rewards, dones, values = (torch.zeros(rows, device=device) for _ in range(4))
    next_obs = torch.as_tensor(envs.reset(seed=args.seed + rank * num_envs)[0], device=device)
    next_done = torch.zeros(num_envs, device=device)
    returns_of_games = deque(maxlen=100)

    num_updates = args.total_timesteps // (args.num_steps * args.num_envs)
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / num_updates)
        for t in range(args.num_steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                policy, values[t] = agent(next_obs)
            actions[t] = policy.sample()
            log_probs[t] = policy.log_prob(actions[t])
            step = envs.step(actions[t].cpu().numpy())
            next_obs, rewards[t] = (torch.as_tensor(x, device=device) for x in step[:2])
            next_done = torch.as_tensor(step[2] | step[3], dtype=torch.float32, device=device)
            ended = step[4].get("final_info", {})
            returns_of_games.extend(ended["episode"]["r"][ended["_episode"]] if "episode" in ended else [])

        with torch.no_grad():
            next_value = agent(next_obs)[1]
        advantages, advantage = torch.zeros_like(rewards), 0
        for t in reversed(range(args.num_steps)):
            goes_on = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
            following = next_value if t == args.num_steps - 1 else values[t + 1]
            delta = rewards[t] + args.gamma * following * goes_on - values[t]
            advantages[t] = advantage = delta + args.gamma * args.gae_lambda * goes_on * advantage

        batch = [x.flatten(0, 1) for x in (obs, actions, log_probs, advantages, advantages + values)]
        for _ in range(args.update_epochs):
            for chosen in torch.randperm(args.num_steps * num_envs, device=device).chunk(args.num_minibatches):
                mb_obs, mb_actions, mb_log_probs, mb_advantages, mb_returns = (x[chosen] for x in batch)
                policy, value = agent(mb_obs)
                ratio = (policy.log_prob(mb_actions) - mb_log_probs).exp()
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.minimum(ratio * mb_advantages, clipped * mb_advantages).mean()
                value_loss = 0.5 * (value - mb_returns).square().mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                fastsync.all_reduce_gradients(agent.parameters())  # the line
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    fastsync.check_consistency(agent)
    mean_return = dist_mean(torch.tensor(sum(returns_of_games) / max(1, len(returns_of_games)), device=device)).item()
    if rank == 0:
        steps = num_updates * args.num_steps * args.num_envs
        print(f"{steps} steps of {args.env_id} on {world_size} ranks: mean return of the last games {mean_return:.1f}")
    return agent


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    with process_group(timeout=60) as device:
        main(arguments, device)
