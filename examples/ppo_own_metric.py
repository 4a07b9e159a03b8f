"""PPO with a metric of one's own, the critic's mean error, in the console and in every log.

    python examples/ppo_own_metric.py --env Acrobot-v1
    torchrun --standalone --nproc-per-node=2 examples/ppo_own_metric.py

All settings of ``fastsync train`` can follow.
"""

import tyro
from torch import Tensor

from fastsync.ppo import Batch, Evaluated, Settings, ppo_loss, train


def with_value_error(
    new: Evaluated, batch: Batch, settings: Settings, remaining: float
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = ppo_loss(new, batch, settings, remaining)
    error = (new.values - batch.returns).abs()  # [B]
    return loss, metrics | {"value_error": (error * batch.weights).sum()}


if __name__ == "__main__":
    train(tyro.cli(Settings), loss=with_value_error)
