"""``check_consistency``: do all ranks hold the same parameters and buffers?"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._checks import check_not_sharded, check_strided, plain_parts, resolve_group
from ..distributed import as_bytes, every_rank_calls
from .handles_in_use import ids_left_to_each_rank
from .ignored_states import states_of


def check_consistency(
    module: nn.Module, *, process_group: dist.ProcessGroup | DeviceMesh | None = None, buffers: bool = True
) -> None:
    """Checks that all ranks hold bitwise equal parameters and buffers. Every rank must call it. Only hashes are sent.

    It leaves out what ``attach(ignored_states=)`` leaves to each rank.

    Args:
        module: the model. The tensors of its state dict are compared.
        process_group: the group whose ranks are compared; None for the default group.
        buffers: whether to compare buffers, too. Running statistics, such as BatchNorm's, differ after the first
            forward, because every rank takes them from its own samples.

    Raises:
        ValueError: it is no module, or a parameter is sharded, so that ranks are meant to hold different ones.
        RuntimeError: on every rank. Ranks differ: the message names the first tensor that differs, and which ranks
            agree on it. Or not every rank has called it in time.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a module, got {type(module).__name__}; put several into an nn.ModuleList")
    group = resolve_group(process_group)
    left = ids_left_to_each_rank(module, group)
    check_not_sharded({name: each for name, each in module.named_parameters() if id(each) not in left}, "module")
    names_left = {name for name, each in states_of(module) if id(each) in left}
    names_of_buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)} - names_left
    state = {name: value for name, value in module.state_dict().items() if name not in names_left}
    saved = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tensors = plain_parts({name: each for name, each in saved.items() if buffers or name not in names_of_buffers})
    check_strided(tensors)
    lines = [f"{name} {_digest(each)}" for name, each in tensors.items()]
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    try:
        with every_rank_calls("check_consistency", group):
            _C.check_agreement(group, "\n".join(lines), device, f"the tensors of {type(module).__name__}")
    except ValueError as error:
        way_out = (
            ". A buffer that every rank takes from its own samples, as BatchNorm and normalisers do, is left out with "
            "buffers=False. Or all ranks take rank 0's, with fastsync.attach(..., broadcast_buffers=True), or share "
            "theirs, as torch.nn.SyncBatchNorm does"
        )
        raise RuntimeError(f"{error}{way_out if buffers and names_of_buffers else ''}") from None


def _digest(tensor: Tensor) -> str:
    """Hashes the bytes, dtype and shape."""
    raw = as_bytes(tensor.detach().cpu()).numpy().tobytes()
    return f"sha256 {hashlib.sha256(f'{tensor.dtype} {tuple(tensor.shape)}'.encode() + raw).hexdigest()[:16]}"
