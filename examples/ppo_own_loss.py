"""PPO with an entropy bonus that is annealed, and a KL penalty.

    python examples/ppo_own_loss.py --env Acrobot-v1
    torchrun --standalone --nproc-per-node=2 examples/ppo_own_loss.py

All settings of ``fastsync train`` can follow.
"""

import tyro
from torch import Tensor

from fastsync.ppo import Batch, Evaluated, Settings, ppo_loss, train

KL_WEIGHT = 0.5


def annealed_and_penalised(
    new: Evaluated, batch: Batch, settings: Settings, remaining: float
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = ppo_loss(new, batch, settings, remaining)
    entropy = (new.entropy * batch.weights).sum()  # the mean over the minibatch; remaining goes from 1 to 0
    loss = loss + settings.ent_coef * (1 - remaining) * entropy
    log_ratio = new.log_prob - batch.log_probs
    kl = ((log_ratio.exp() - 1 - log_ratio) * batch.weights).sum()
    return loss + KL_WEIGHT * kl, metrics | {"kl_penalty": KL_WEIGHT * kl}


if __name__ == "__main__":
    train(tyro.cli(Settings), loss=annealed_and_penalised)
