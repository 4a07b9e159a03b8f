"""Tells of parameters that a DistributedDataParallel averages, by the hooks that it has put on them."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from torch import Tensor

from .. import _C
from .._torch_compat import is_in_python_reducer

_ATTACH_OR_DDP = "use fastsync.register_comm_hook(ddp_model), or attach to the model without the wrapper"


def check_not_in_ddp(named: Mapping[str, Tensor], argument: str, way_out: str = _ATTACH_OR_DDP) -> None:
    """Raises ValueError if a DistributedDataParallel that lives averages one of these.

    It does not average parameters that it was told to ignore, or that came into the model later.
    """
    if not _in_ddp(named):
        return
    gc.collect()  # DDP models are in reference cycles, so one may be garbage that was not collected yet
    for name in _in_ddp(named):
        raise ValueError(
            f"{argument}: parameter {name} is in a DistributedDataParallel, which averages gradients itself; {way_out}"
        )


def _in_ddp(named: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of those that have a hook of DistributedDataParallel."""
    in_reducers = _C.are_in_reducers([*named.values()])
    return [name for name, is_in in zip(named, in_reducers, strict=True) if is_in or is_in_python_reducer(named[name])]
