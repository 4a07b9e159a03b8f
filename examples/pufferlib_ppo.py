"""PufferLib 3.0's trainer on CPUs, made data-parallel by one line.

    torchrun --standalone --nproc-per-node=2 examples/pufferlib_ppo.py
    python examples/pufferlib_ppo.py

PufferLib's train() opens an NCCL group and takes a GPU for each rank. Its trainer, PuffeRL, does not: make that, and
attach to the policy. But wherever a group is open PuffeRL adds figures over the default group, whenever a quarter of a
second has passed on that rank. Two things keep ranks from waiting for each other there: gradients have a group of
their own, and every rank is told that it is time in every update.
"""

import tempfile

import gymnasium
import torch
import torch.distributed as dist

import fastsync
from fastsync.distributed import dist_mean, process_group

try:
    import pufferlib.emulation
    import pufferlib.models
    import pufferlib.vector
    from pufferlib import pufferl
except ImportError:
    raise SystemExit("this example needs PufferLib 3.0: see test-trainers in the Makefile") from None

NUM_ENVS = 8
HORIZON = 64
NUM_UPDATES = 40


def make_env(buf=None, seed=0):
    env = pufferlib.EpisodeStats(gymnasium.make("CartPole-v1"))
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def config(device, seed, folder):
    settings = pufferl.load_config("default")["train"]
    return {
        **settings,
        "env": "CartPole-v1",
        "device": device.type,
        "seed": seed,
        "use_rnn": False,
        "optimizer": "adam",
        "learning_rate": 0.003,
        "adam_beta1": 0.9,
        "adam_eps": 1e-8,
        "gamma": 0.98,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "update_epochs": 4,
        "bptt_horizon": HORIZON,
        "batch_size": NUM_ENVS * HORIZON,
        "minibatch_size": NUM_ENVS * HORIZON // 2,
        "total_timesteps": NUM_UPDATES * NUM_ENVS * HORIZON,
        "data_dir": folder,
    }


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # ranks must not act alike
    envs = pufferlib.vector.make(make_env, num_envs=NUM_ENVS, backend=pufferlib.vector.Serial, seed=1 + NUM_ENVS * rank)
    policy = pufferlib.models.Default(envs.driver_env).to(device)
    # The line: weights of rank 0 everywhere now, mean gradients after every backward().
    fastsync.attach(policy, process_group=dist.new_group())
    with tempfile.TemporaryDirectory() as folder:
        trainer = pufferl.PuffeRL(config(device, 1 + NUM_ENVS * rank, folder), envs, policy)
        returns = []
        for _ in range(NUM_UPDATES):
            returns.append(trainer.evaluate()["episode_return"])
            trainer.last_log_time = 0.0  # long ago
            trainer.train()
        envs.close()
        trainer.utilization.stop()

    fastsync.check_consistency(policy)
    last = [value for of_update in returns[-5:] for value in of_update]
    mean_return = dist_mean(torch.tensor(last, device=device).mean()).item()
    if rank == 0:
        print(f"mean return of {world_size} ranks in the last 5 updates: {mean_return:.1f}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
