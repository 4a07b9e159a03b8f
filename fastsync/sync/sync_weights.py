"""``sync_weights``: every rank takes rank 0's parameters and buffers, such as after loading a checkpoint there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._checks import check_not_sharded, check_strided, plain_parts, resolve_group, without_compiler
from .._torch_compat import own_buffers
from ..distributed import broadcast_tensors, every_rank_calls
from .handles_in_use import groups_of, ids_left_to_each_rank


def sync_weights(module: nn.Module, *, process_group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Gives every rank rank 0's parameters and buffers, bit for bit. Every rank must call it, between steps.

    ``attach`` and ``DistributedDataParallel`` do so once, when they take the model. Call this later, such as when rank
    0 alone has loaded a checkpoint. Call it as well if nothing takes the model, as with ``all_reduce_gradients``. The
    ranks compare names, shapes and dtypes first. If they differ, nothing is sent.

    Gradients, the optimizer's state and a handle's ``state_dict()`` stay each rank's own. So load those on every rank.
    What ``attach(ignored_states=)`` leaves to each rank stays each rank's own, too.
    ``DiLoCo`` and ``LocalSGD`` keep a copy of the common weights: make them afterwards.

    Args:
        module: the model, wrapped in ``DistributedDataParallel`` or not.
        process_group: the ranks that take the weights of the group's rank 0: a group or a one-dimensional
            ``DeviceMesh``. By default the group that the module's gradients are averaged over; the default group if
            fastsync does not average them. With ``DiLoCo`` this is the group of one site: to reach the other sites,
            pass a group of all.

    Raises:
        ValueError: it is no module, or a parameter or buffer is sharded. Or the ranks hold different ones. Or its
            gradients are averaged over several groups, and ``process_group`` does not say which is meant.
        RuntimeError: not every rank has called it in time, or one is lost.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a module, got {type(module).__name__}; put several into an nn.ModuleList")
    group = _group_of(module) if process_group is None else resolve_group(process_group)
    left = ids_left_to_each_rank(module, group)
    replace_inference_buffers(module.modules(), but=left)
    # Only some ranks may have compiled the model, so the names leave out torch.compile's wrapper.
    named: dict[str, Tensor] = {
        without_compiler(name): tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if id(tensor) not in left
    }
    check_not_sharded(named, "module", "Let every rank load its own part, as by torch.distributed.checkpoint")
    with every_rank_calls("sync_weights", group):
        broadcast_named(named, group, what=f"the weights of {type(module).__name__}")


def _group_of(module: nn.Module) -> dist.ProcessGroup:
    groups = groups_of(module.parameters())
    if len(groups) > 1:
        raise ValueError(
            f"module: the gradients of this {type(module).__name__} are averaged over {len(groups)} process groups; "
            "call this for each part that has one group, or pass process_group"
        )
    return next(iter(groups), None) or resolve_group(None)


def broadcast_named(
    named: Mapping[str, Tensor], group: dist.ProcessGroup, root: int = 0, *, what: str = "what to synchronise"
) -> None:
    """Gives all ranks of the group the tensors of rank ``root``, in place. It writes inside tensors that wrap others.

    Raises:
        ValueError: on every rank, before anything is sent, if names, shapes, strides or dtypes differ.
    """
    named = plain_parts(named)
    check_strided(named)
    check_can_be_written(named)
    lines = [
        f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
        for name, tensor in named.items()
    ]
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    _C.check_agreement(group, "\n".join(lines), device, what)
    if named:
        broadcast_tensors(named.values(), group, root)


def check_can_be_written(named: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a tensor that was made under ``torch.inference_mode``, which nobody may write to."""
    for name, tensor in named.items():
        if tensor.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode(), so it may not be written to, or trained; make the "
                "model outside of it, or under torch.no_grad()"
            )


def replace_inference_buffers(modules: Iterable[nn.Module], but: Container[int] = ()) -> None:
    """Puts normal tensors in the places of buffers that an evaluation has made under ``torch.inference_mode``.

    Args:
        but: the ids of buffers that stay.
    """
    normal: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old ones, so that no id comes twice
    for module in modules:
        for name, buffer in own_buffers(module).items():
            if buffer is None or not buffer.is_inference() or id(buffer) in but:
                continue
            if id(buffer) not in normal:
                with torch.inference_mode(False), torch.no_grad():
                    normal[id(buffer)] = buffer, buffer.clone()
            own_buffers(module)[name] = normal[id(buffer)][1]
