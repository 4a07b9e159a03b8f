"""Every private name of torch that this package uses, each behind a function that says what it gives.

``PRIVATE`` has all of them, with the versions of torch in which they were read. A test names those that the installed
torch lacks, and another one finds none of them elsewhere in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.distributed import Store  # type: ignore[attr-defined]


class Private(NamedTuple):
    """A private name of torch."""

    name: str
    """Where it is, from the module on. An attribute of objects follows their class, or the module that sets it."""
    first: str = "2.11"
    last: str = "2.14"
    """The first and the last version that has it, of 2.11, 2.12, 2.13 and 2.14."""


PRIVATE = (
    # process groups
    Private("torch.distributed.distributed_c10d._world.pg_group_ranks"),
    Private("torch.distributed.distributed_c10d._get_default_store"),
    Private("torch.distributed.distributed_c10d._abort_process_group"),
    Private("torch.distributed._broadcast_coalesced"),
    Private("torch.distributed.Backend._plugins"),
    Private("torch.distributed.ProcessGroup._register_backend"),
    Private("torch.distributed.ProcessGroup._set_default_backend"),
    Private("torch.distributed.ProcessGroup._set_group_name"),
    # DistributedDataParallel
    Private("torch.nn.parallel.DistributedDataParallel._comm_hooks"),
    Private("torch.nn.parallel.DistributedDataParallel._use_python_reducer"),
    Private("torch.nn.parallel.DistributedDataParallel._delay_all_reduce_params"),
    Private("torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore"),
    # fully_shard, FullyShardedDataParallel and pipelines
    Private("torch.distributed.fsdp.FSDPModule._get_fsdp_state"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups", first="2.12"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reduce_scatter_process_group"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reduce_scatter_comm"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_comm"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_reduce_hook"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather"),
    Private("torch.distributed.fsdp._common_utils._fsdp_flattened"),
    Private("torch.distributed.fsdp._flat_param._is_flat_param"),
    # modules
    Private("torch.nn.Module._parameters"),
    Private("torch.nn.Module._buffers"),
    Private("torch.nn.Module._modules"),
    Private("torch.nn.Module._non_persistent_buffers_set"),
    Private("torch.nn.Module._forward_hooks"),
    Private("torch.nn.Module._forward_pre_hooks"),
    Private("torch.nn.Module._backward_hooks"),
    Private("torch.nn.Module._backward_pre_hooks"),
    Private("torch.nn.Module._compiled_call_impl"),
    Private("torch.nn.modules.module._has_any_global_hook"),
    Private("torch._dynamo.eval_frame.OptimizedModule._orig_mod"),
    # optimizers
    Private("torch.optim.Adam._step_supports_amp_scaling"),
    Private("torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched"),
    Private("torch.amp.GradScaler._per_optimizer_states"),
    Private("torch.amp.GradScaler._scale"),
    # tensors and autograd
    Private("torch.Tensor._post_accumulate_grad_hooks"),
    Private("torch.Tensor._version"),
    Private("torch._C._current_graph_task_id"),
    Private("torch._C.DisableTorchFunctionSubclass"),
    Private("torch.autograd.grad_mode._unsafe_preserve_version_counter"),
    Private("torch._foreach_add_"),
    Private("torch._foreach_mul_"),
    Private("torch._foreach_copy_"),
    Private("torch._fused_adam_"),
    Private("torch.utils._pytree.tree_map_only"),
    # logs
    Private("torch.utils.tensorboard.SummaryWriter._get_file_writer"),
)

COMPILED = "_orig_mod"
"""The name of a module inside the wrapper that ``torch.compile`` puts around it."""

tree_map_only = _pytree.tree_map_only
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
fused_adam_ = torch._fused_adam_
calls_global_hooks: Callable[[], bool] = _has_any_global_hook


# Process groups.


def known_ranks(group: dist.ProcessGroup) -> set[int]:
    """Returns the group's ranks, as the default group numbers them; none for a group that torch does not list."""
    return set(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))


def default_store() -> Store:
    """Returns the store that the ranks of the default group have met in."""
    return dist.distributed_c10d._get_default_store()


def abort_default_group() -> None:
    """Ends the default group without waiting for what other ranks may never send."""
    dist.distributed_c10d._abort_process_group()


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], num_bytes: int, root: int) -> None:
    """Gives all ranks the tensors of rank ``root``, in buffers of so many bytes, as DDP does."""
    dist._broadcast_coalesced(group, tensors, num_bytes, root)  # type: ignore[attr-defined]


def backend_from_plugin(name: str, store: Store, timeout: timedelta) -> Any:
    """Returns a third party's backend for this rank alone; None if it needs more than torch's first interface."""
    plugin = dist.Backend._plugins.get(name.upper())
    return None if plugin is None or plugin.extended_api else plugin.creator_fn(store, 0, 1, timeout)


def add_backend(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Lets a backend serve a kind of device in the group."""
    group._register_backend(device, kind, backend)


def set_default_backend(group: dist.ProcessGroup, kind: Any) -> None:
    """Lets backends of this kind serve what names no device, such as a barrier."""
    group._set_default_backend(kind)


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Gives a group that torch does not list its name."""
    group._set_group_name(dist.GroupName(name))


# DistributedDataParallel.


def is_in_python_reducer(parameter: Tensor) -> bool:
    """Whether a DistributedDataParallel averages the parameter by its reducer in Python, that is by a hook."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    names = [getattr(getattr(hook, "func", hook), "__qualname__", "") for hook in hooks.values()]
    return any(name.startswith(f"{DistributedDataParallel.__name__}.") for name in names)


def has_comm_hook(ddp_model: DistributedDataParallel) -> bool:
    """Whether a communication hook was registered from Python."""
    return bool(ddp_model._comm_hooks)


def has_python_reducer(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP averages by its reducer in Python, which runs no C++ hook."""
    return bool(ddp_model._use_python_reducer)


def delays_parameters(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP sends some parameters past its hook."""
    return bool(getattr(ddp_model, "_delay_all_reduce_params", None))


def names_ignored_by_ddp(module: nn.Module) -> Iterable[str]:
    """Returns the names of parameters and buffers that DDP was told to leave alone in a model."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


# fully_shard, FullyShardedDataParallel and pipelines.


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether the module itself went through ``fully_shard``."""
    return hasattr(module, "_get_fsdp_state")


def fsdp_state_of(module: Any) -> object:
    """Returns the state of a module that went through ``fully_shard``. Modules of one call share theirs."""
    return module._get_fsdp_state()


def fsdp_groups_of(module: Any) -> list[Any]:
    """Returns the groups of parameters (FSDPParamGroup) that ``fully_shard`` communicates together for a module."""
    state: Any = fsdp_state_of(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was one at most
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def scattering_group(fsdp_group: Any) -> dist.ProcessGroup:
    """Returns the process group that the gradients of an FSDPParamGroup are reduce-scattered over."""
    return cast(dist.ProcessGroup, fsdp_group._reduce_scatter_process_group)


def reduce_scatter_of(fsdp_group: Any) -> Any:
    """Returns the ReduceScatter of an FSDPParamGroup."""
    return fsdp_group._reduce_scatter_comm


def all_gather_of(fsdp_group: Any) -> Any:
    """Returns the AllGather of an FSDPParamGroup."""
    return fsdp_group._all_gather_comm


def is_default_of_fsdp(collective: object) -> bool:
    """Whether it is the ReduceScatter or AllGather that ``fully_shard`` itself makes."""
    return type(collective).__name__ in ("DefaultReduceScatter", "DefaultAllGather")


def has_all_reduce_hook(fsdp_group: Any) -> bool:
    """Whether a hook averages an FSDPParamGroup's gradients between replicas."""
    return fsdp_group._all_reduce_hook is not None


def is_flat(tensor: Tensor) -> bool:
    """Whether FullyShardedDataParallel has put the tensor in the place of parameters, or parameters into it."""
    return getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False)


# Modules.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's dict of its own parameters, also where ``named_parameters`` is not ``nn.Module``'s."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's dict of its own buffers. Who writes to it replaces a buffer."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's dict of its children."""
    return module._modules


def is_saved(module: nn.Module, name: str) -> bool:
    """Whether one of the module's own buffers is in its state dict."""
    return name not in module._non_persistent_buffers_set


def has_own_call(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks of its own, or a ``forward`` that is not its class's."""
    own = module.__dict__  # faster than its attributes; this runs at every step of an environment
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks) or "forward" in own or "_compiled_call_impl" in own


# Optimizers.


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class can divide gradients by ``optimizer.grad_scale`` in its step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a learning rate scheduler was made for the optimizer. It wraps the optimizer's step, and nobody else."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def states_of_scaler(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """Returns what a GradScaler knows of each optimizer in this step, by the optimizer's id."""
    return scaler._per_optimizer_states


def scale_of_scaler(scaler: GradScaler) -> Tensor | None:
    """Returns the tensor that a GradScaler writes its scale to; None before it has scaled a loss."""
    return scaler._scale


# Autograd.


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def without_torch_function() -> AbstractContextManager[None]:
    """Inside the ``with`` block calls do not go to ``__torch_function__`` of their tensors' classes."""
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: Tensor) -> int:
    """Returns how often autograd has seen a tensor's values change."""
    return tensor._version


def unseen_by_autograd(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside the ``with`` block writes to the tensors leave their version counters as they are."""
    return _unsafe_preserve_version_counter(tuple(tensors))


# Logs.


def file_writer_of(writer: Any) -> Any:
    """Returns what writes events into the file of a SummaryWriter."""
    return writer._get_file_writer()
