"""fastsync: gradient synchronisation for PyTorch in the fewest passes over memory."""

import warnings
from importlib.util import find_spec
from typing import NoReturn

import torch  # noqa: F401  the extension links against its libraries, which must be loaded first

from .doctor import is_a_wheel_for_others, load

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "DiLoCo",
    "Elastic",
    "LocalSGD",
    "RankLostError",
    "TopK",
    "all_reduce_gradients",
    "allreduce_hook",
    "attach",
    "bf16_compress_hook",
    "check_consistency",
    "clip_grad_norm_",
    "distributed",
    "fp16_compress_hook",
    "handle_of",
    "register_comm_hook",
    "register_fsdp",
    "register_prepared",
    "shard_optimizer",
    "sync_weights",
]

try:
    load("_C")
except ImportError as error:
    # The package stays importable so that `fastsync doctor` can tell what is wrong; any use of the engine raises.
    _obstacle = str(error)
    if is_a_wheel_for_others():
        warnings.warn(_obstacle, stacklevel=2)

    def __getattr__(name: str) -> NoReturn:
        if name in __all__ or name in ("_C", "_ppo"):
            raise ImportError(_obstacle)
        why = "" if find_spec(f"fastsync.{name}") is None else f", because its modules cannot be loaded: {_obstacle}"
        raise AttributeError(f"module 'fastsync' has no attribute {name!r}{why}")

else:
    from . import data as data
    from . import distributed
    from .backend import register as _register_backend
    from .elastic.elastic import Elastic
    from .errors import RankLostError
    from .integrations.accelerate import register_prepared
    from .optimizer.shard_optimizer import shard_optimizer
    from .outer.diloco import DiLoCo
    from .outer.local_sgd import LocalSGD
    from .outer.topk import TopK
    from .sync.all_reduce import all_reduce_gradients
    from .sync.attach import attach
    from .sync.clip import clip_grad_norm_
    from .sync.compression import Compression
    from .sync.consistency import check_consistency
    from .sync.ddp import allreduce_hook, bf16_compress_hook, fp16_compress_hook, register_comm_hook
    from .sync.fsdp import register_fsdp
    from .sync.handles_in_use import handle_of
    from .sync.sync_weights import sync_weights

    _register_backend()
