"""PPO with a loss of one's own: an entropy bonus that is annealed, a KL penalty, and a metric in every log.

    python examples/ppo_own_loss.py
    torchrun --standalone --nproc-per-node=2 examples/ppo_own_loss.py

All settings of ``fastsync train`` can be typed behind it.
"""

import tyro
from torch import Tensor

from fastsync.ppo import Batch, Evaluated, Settings, ppo_loss, train

KL_WEIGHT = 0.5


def annealed_and_penalised(
    new: Evaluated, batch: Batch, settings: Settings, remaining: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """``remaining`` goes from 1 to 0 over the run; a sum of rows by ``batch.weights`` is their mean."""
    loss, figures = ppo_loss(new, batch, settings, remaining)
    entropy = (new.entropy * batch.weights).sum()
    log_ratio = new.log_prob - batch.log_probs
    kl = ((log_ratio.exp() - 1 - log_ratio) * batch.weights).sum()
    value_error = ((new.values - batch.returns).abs() * batch.weights).sum()
    # ppo_loss has taken the whole bonus off.
    loss = loss + settings.ent_coef * (1 - remaining) * entropy + KL_WEIGHT * kl
    return loss, figures | {"kl_penalty": KL_WEIGHT * kl, "value_error": value_error}


if __name__ == "__main__":
    train(tyro.cli(Settings), loss=annealed_and_penalised)
