"""skrl's PPO on CPUs, made data-parallel by one line.

    torchrun --standalone --nproc-per-node=2 examples/skrl_ppo.py
    python examples/skrl_ppo.py

Told of several ranks, skrl opens an NCCL group and takes a GPU for each as soon as it is imported. So open the group
first, take what torchrun has set out of the environment, and import skrl then. What it would have averaged besides, the
KL divergence that KLAdaptiveLR goes by, is not needed here.
"""

import os
from collections import deque

import gymnasium
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import dist_mean, process_group

NUM_ENVS = 8
ROLLOUT = 128
NUM_UPDATES = 20


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    try:
        from skrl.agents.torch.ppo import PPO
        from skrl.envs.wrappers.torch import wrap_env
        from skrl.memories.torch import RandomMemory
        from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    except ImportError:
        raise SystemExit("this example needs skrl: pip install skrl 'gymnasium>=1.4'") from None

    def network(num_outputs):
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))

    class Policy(CategoricalMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = network(2)

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = network(1)

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {}

    torch.manual_seed(rank)  # ranks must not act alike
    vector = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")
    vector.reset(seed=1 + NUM_ENVS * rank)
    env = wrap_env(vector, wrapper="gymnasium")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": device}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    # The line: weights of rank 0 everywhere now, mean gradients after every backward().
    fastsync.attach(nn.ModuleDict(models))
    settings = {"rollouts": ROLLOUT, "learning_epochs": 8, "mini_batches": 4, "learning_rate": 1e-3}
    quiet = {"write_interval": 0, "checkpoint_interval": 0}
    memory = RandomMemory(memory_size=ROLLOUT, num_envs=NUM_ENVS, device=device)
    agent = PPO(models=models, memory=memory, cfg={**settings, "experiment": quiet}, **spaces)
    agent.init()
    agent.enable_training_mode(True)

    observations, _ = env.reset()
    states, num_steps = None, NUM_UPDATES * ROLLOUT
    lengths, finished = torch.zeros(NUM_ENVS, 1), deque(maxlen=50)
    for step in range(num_steps):  # as skrl's trainers do
        agent.pre_interaction(timestep=step, timesteps=num_steps)
        with torch.no_grad():
            actions, _ = agent.act(observations, states, timestep=step, timesteps=num_steps)
            following, rewards, terminated, truncated, infos = env.step(actions)
            agent.record_transition(
                observations=observations,
                states=states,
                actions=actions,
                rewards=rewards,
                next_observations=following,
                next_states=states,
                terminated=terminated,
                truncated=truncated,
                infos=infos,
                timestep=step,
                timesteps=num_steps,
            )
        agent.post_interaction(timestep=step, timesteps=num_steps)
        observations = following
        lengths += rewards.cpu()
        ended = (terminated | truncated).cpu()
        finished.extend(lengths[ended].tolist())
        lengths[ended] = 0

    for model in models.values():
        fastsync.check_consistency(model)
    mean_return = dist_mean(torch.tensor(finished, device=device).mean()).item()
    if rank == 0:
        print(f"mean return of the last {len(finished)} episodes of each rank, {world_size} ranks: {mean_return:.1f}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
