"""Which optimizers and parameters ``shard_optimizer`` takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..sync.compression import LOW_RANK, Auto, Compression
from ..sync.optimizer_steps import innermost
from ..sync.synchronizer import GradientSynchronizer
from .registry import kind_of

_WITHOUT = "shard_optimizer out, on every rank: then each rank steps all parameters"
WAY_OUT = f"Leave {_WITHOUT}"
OR_ELSE = f"Or leave {_WITHOUT}"
"""The same after another way out."""


def check_attached(sync: object) -> None:
    """Raises ValueError unless it is a handle of ``attach`` that has averaged nothing yet."""
    if not isinstance(sync, GradientSynchronizer):
        raise ValueError(
            f"sync: expected what fastsync.attach() returns, got {type(sync).__name__}; DDP and fully_shard make "
            "means of their own, so attach the model in place of wrapping it"
        )
    if not sync._is_attached:
        raise ValueError("sync: detach() was called; pass the handle of a new attach(), on every rank")
    if sync._op != "mean":
        raise ValueError(
            f"sync: expected a handle of attach(op='mean'), because ranks keep means of the gradients, got {sync._op!r}"
        )
    sync._engine.end_interrupted()
    if num_steps := sync._engine.num_steps():
        raise ValueError(
            f"sync: it has averaged gradients {num_steps} times already, and they are in .grad. Call shard_optimizer "
            "right after attach(); or call sync.detach(), and attach again before it, on every rank"
        )


def check_can_wait(sync: GradientSynchronizer) -> None:
    """Raises ValueError if a module would use parameters without waiting for their new values."""
    for known in sync._searched:
        if isinstance(module := known(), torch.jit.ScriptModule):
            raise ValueError(
                f"overlap_gather: a {type(module).__name__} of TorchScript uses parameters without waiting for them. "
                "Leave overlap_gather out, on every rank"
            )


def check_dense(sync: GradientSynchronizer) -> None:
    """Raises ValueError if some of the trained parameters have sparse gradients."""
    for name in sorted(sync._sparse):
        if sync._named[name].requires_grad:
            raise ValueError(
                f"sync: ranks step shards of dense gradients, and those of parameter {name} are sparse; use "
                f"sparse=False in the embedding. {WAY_OUT}"
            )


def check_optimizer(given: object, named: Mapping[str, Tensor]) -> Optimizer:
    """Returns the optimizer, out of its wrappers. Raises ValueError if ranks cannot step shards with it."""
    if not isinstance(given, Optimizer):
        hint = "; attach the parameters of each apart, and shard each" if isinstance(given, (list, tuple)) else ""
        raise ValueError(f"optimizer: expected a torch.optim.Optimizer, got {type(given).__name__}{hint}")
    optimizer = innermost(given)
    if kind_of(optimizer) is None:
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer: expected one of those that ranks can step together, such as AdamW, SGD or Muon, got {name}. "
            f"If each value steps by itself, call fastsync.optimizer.register_elementwise({name}, state=...) before; "
            f"if each tensor does, register_tensorwise. {OR_ELSE}"
        )
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise ValueError(f"optimizer: {flag}=True does not go with shards. {WAY_OUT}")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in named.values()):
        raise ValueError("optimizer: it has none of the parameters that are attached. Was it made from another model?")
    spans: dict[int, list[tuple[int, int, str]]] = {}  # the bytes that parameters take, by storage
    device_of: dict[torch.device, str] = {}
    for name, parameter in named.items():
        if parameter.numel() == 0:
            continue
        if id(parameter) not in stepped:
            if parameter.requires_grad:
                raise ValueError(
                    f"optimizer: it does not have parameter {name}, so nobody would see its mean. Attach the "
                    "optimizer's parameters in place of their module, or give it all of them"
                )
            continue
        if obstacle := _obstacle(parameter):
            raise ValueError(f"optimizer: parameter {name} {obstacle}. {WAY_OUT}")
        device_of.setdefault(parameter.device, name)
        begin, length = parameter.data_ptr(), parameter.numel() * parameter.element_size()
        of_storage = spans.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_begin, other_end, other in of_storage:
            # On a device parameters stay where they are, side by side in one tensor as cuDNN's LSTMs have them.
            if parameter.is_cpu or (begin < other_end and other_begin < begin + length):
                raise ValueError(f"optimizer: parameters {other} and {name} are views of one tensor. {WAY_OUT}")
        of_storage.append((begin, begin + length, name))
    if len(device_of) > 1:
        where = ", ".join(f"{name} is on {device}" for device, name in device_of.items())
        raise ValueError(f"optimizer: its parameters have to be on one device, and {where}. {WAY_OUT}")
    return optimizer


def check_compression(compression: Compression | Auto) -> None:
    """Raises ValueError if ranks cannot keep shards of means that travel with this compression."""
    if isinstance(compression, Compression) and compression.wire == LOW_RANK:
        raise ValueError(
            f"compression: {LOW_RANK!r} needs whole matrices, and with shard_optimizer a rank keeps shards of the "
            f"means; take 'int8+ef'. {WAY_OUT}"
        )


def _obstacle(parameter: Tensor) -> str:
    """Tells why ranks cannot step pieces of a parameter; empty if they can."""
    if type(parameter) not in (nn.Parameter, Tensor) or parameter.layout != torch.strided:
        return f"is a {type(parameter).__name__} of layout {parameter.layout}, and no plain dense tensor"
    if not parameter.is_floating_point() or parameter.grad_dtype not in (None, parameter.dtype):
        return f"is of {parameter.dtype}, with gradients of {parameter.grad_dtype}: expected one real dtype"
    if parameter.is_cpu and parameter.is_shared():
        return (
            "is in memory of share_memory(), and shard_optimizer would move it to memory of its own, so that other "
            "processes keep the first weights. Share a copy of the model, and write to it after steps"
        )
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return "" if is_dense else "is a view with gaps"
