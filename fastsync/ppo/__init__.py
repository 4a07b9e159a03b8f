"""Proximal policy optimisation over many ranks. fastsync averages the gradients.

    from fastsync.ppo import Settings, train
    policy, result = train(Settings(env="CartPole-v1"))

``ppo.py`` is the algorithm, from top to bottom.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..doctor import load

if TYPE_CHECKING:
    from .evaluate import load_policy
    from .policies import ActorCritic, Policy, hidden_layers
    from .ppo import Batch, Evaluated, Settings, estimate_advantages, ppo_loss, train

load("_C")
load("_ppo")

__all__ = [
    "ActorCritic", "Batch", "Evaluated", "Policy", "Settings", "estimate_advantages", "hidden_layers", "load_policy",
    "ppo_loss", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, because processes of environments need none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"ActorCritic": "policies", "Policy": "policies", "hidden_layers": "policies", "load_policy": "evaluate"}
    return getattr(import_module(f"{__name__}.{home.get(name, 'ppo')}"), name)
