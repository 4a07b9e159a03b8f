"""Checks of arguments, before anything is sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ._torch_compat import COMPILED, is_flat
from .messages import did_you_mean


def resolve_group(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the process group itself, that of a one-dimensional mesh, or for None the default group.

    Raises:
        ValueError: it is none of these, there is no default group, or the mesh has several dimensions.
    """
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "process_group: there is no process group yet. Put the training into "
                "`with fastsync.distributed.process_group(timeout=60) as device:`, or call "
                "torch.distributed.init_process_group first, on every rank"
            )
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if not isinstance(process_group, DeviceMesh):
        raise ValueError(
            f"process_group: expected a ProcessGroup that this rank is a member of, a one-dimensional DeviceMesh, or "
            f"None, got {process_group!r}"
        )
    if process_group.ndim != 1:
        raise ValueError(
            f"process_group: the DeviceMesh has {process_group.ndim} dimensions {process_group.mesh_dim_names}; "
            "name the one to average over, as in mesh['dp']"
        )
    return process_group.get_group()


def trainable_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Returns the tensors that can have gradients, by name.

    Raises:
        ValueError: none requires a gradient, or one cannot be synchronised.
    """
    return with_gradients(named_parameters(module_or_params, argument), argument)


def with_gradients(named: Mapping[str, Tensor], argument: str) -> dict[str, Tensor]:
    """Returns the tensors that can have gradients. Raises ValueError if none requires one."""
    able: dict[str, Tensor] = {
        name: p for name, p in named.items() if (p.is_floating_point() or p.is_complex()) and not is_wrapper(p)
    }
    if not any(parameter.requires_grad for parameter in able.values()):
        what = f"none of its {len(named)} parameters requires a gradient" if named else "it has no parameters"
        raise ValueError(
            f"{argument}: {what}; nothing to synchronise. Pass a module or its parameters, not their gradients"
        )
    for name, parameter in able.items():
        if parameter.is_meta:
            raise ValueError(
                f"{argument}: parameter {name} is on the meta device, so it has no values; call "
                "model.to_empty(device=...), and initialise or load it first"
            )
    return able


def check_strided(named: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a tensor in a sparse layout, whose values are not compared and sent."""
    for name, tensor in named.items():
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} has the layout {tensor.layout}, and only dense tensors are compared and sent; leave it to "
                "each rank, by ignored_states of fastsync.attach, or keep it in an attribute that is no buffer"
            )


def without_compiler(name: str) -> str:
    """Returns a parameter's name without what torch.compile's wrapper adds. Checkpoints come from both."""
    return name.replace(f"{COMPILED}.", "")


def _in_place_of(given: object) -> str:
    """Returns the way out for one who gave this in place of a parameter."""
    if isinstance(given, nn.Module):
        return "put several modules into one nn.ModuleList"
    return "pass the module or its parameters, not names"


def named_parameters(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str, but: Container[int] = ()
) -> dict[str, Tensor]:
    """Names a module's parameters, or loose ones by index. Raises ValueError for what cannot be synchronised.

    Args:
        but: the ids of a module's parameters that are left out.
    """
    named: dict[str, Tensor]
    if isinstance(module_or_params, nn.Module):
        _check_unwrapped(module_or_params, argument)
        named = {without_compiler(name): p for name, p in module_or_params.named_parameters() if id(p) not in but}
    else:
        named = {}
        seen: set[int] = set()
        for index, parameter in enumerate(listed(module_or_params, argument)):
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"{argument}: expected a module or tensors, but number {index} is a {type(parameter).__name__}; "
                    f"{_in_place_of(parameter)}"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[str(index)] = parameter
    for name, parameter in named.items():
        if not parameter.is_leaf:
            raise ValueError(
                f"{argument}: tensor {name} is no leaf of the graph (it came from {parameter.grad_fn}), so it has no "
                ".grad; pass the parameters it was computed from"
            )
    check_not_sharded(named, argument)
    return named


def sparse_weights(module_or_params: nn.Module | Iterable[Tensor] | Tensor) -> frozenset[int]:
    """Returns the ids of the weights that get sparse gradients. As for DDP, only modules tell; loose tensors do not."""
    modules = module_or_params.modules() if isinstance(module_or_params, nn.Module) else ()
    return frozenset(
        id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
    )


def listed(params: Iterable[Tensor] | Tensor, argument: str) -> list[Tensor]:
    """Lists loose parameters, one or many. Raises ValueError for what is neither."""
    if not hasattr(params, "__iter__"):
        raise ValueError(f"{argument}: expected a module or its parameters, got {type(params).__name__}")
    return [params] if isinstance(params, Tensor) else list(params)


def _check_unwrapped(module: nn.Module, argument: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{argument}: {name or 'the module'} is wrapped in DistributedDataParallel, which averages gradients "
                "itself; use fastsync.register_comm_hook(ddp_model), or attach to the model without the wrapper"
            )


LARGEST_WEIGHT = 1e300  # the sum over any number of ranks is finite


def as_weight(weight: Any) -> float:
    """Returns the weight of a rank's gradients. Raises ValueError if it is none."""
    try:
        number = float(weight)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= LARGEST_WEIGHT:
        raise ValueError(f"weight: expected a number that is 0 or more, up to {LARGEST_WEIGHT:g}, got {weight!r}")
    return number


def is_positive(number: object) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(number, Real) and 0 < float(number) < math.inf


MEAN_OF_USED = "mean_of_used"


def check_op(op: str, *more: str) -> None:
    """Raises ValueError for what gradients cannot become. ``more`` names what they may become beside mean and sum."""
    known = ("mean", *more, "sum")
    if op not in known:
        expected = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ValueError(f"op: expected {expected}, got {op!r}{did_you_mean(str(op), known)}")


def check_bool(value: object, argument: str) -> None:
    """Raises ValueError for what is neither True nor False."""
    if value not in (True, False):
        raise ValueError(f"{argument}: expected True or False, got {value!r}")


def check_carries(wire: str, named: Mapping[str, Tensor]) -> None:
    """Raises ValueError for complex parameters with a wire other than "none"."""
    for name, parameter in named.items():
        if wire != "none" and parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"compression: {wire!r} cannot carry parameter {name}, which is {parameter.dtype}; use "
                "compression='none' for models with complex parameters"
            )


_SHARDED_WAY_OUT = (
    "Use fastsync.register_fsdp for models under fully_shard. After tensor parallelism call fully_shard with the "
    "data-parallel dimension of the mesh first, or, for whole replicas, with one of a single rank, and pass these "
    "as process_group to fastsync.register_fsdp"
)


def check_not_sharded(named: Mapping[str, Tensor], argument: str, way_out: str = _SHARDED_WAY_OUT) -> None:
    """Raises ValueError for tensors that this rank may hold only a shard of, and for trained ones that wrap others."""
    for name, tensor in named.items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) or tensor.requires_grad else "buffer"
        if is_sharded(tensor):
            what = "a DTensor" if _is_dtensor(tensor) else "sharded by FullyShardedDataParallel"
            raise ValueError(
                f"{argument}: {kind} {name} is {what}, and this handles plain tensors that every rank holds whole. "
                f"{way_out}"
            )
        if tensor.requires_grad and is_wrapper(tensor):
            raise ValueError(
                f"{argument}: parameter {name} is a {type(tensor).__name__}, which wraps other tensors and has no "
                "memory of its own. fastsync leaves such a one alone where it is frozen, as a quantised base is: "
                "freeze it with requires_grad_(False), or make it a plain tensor"
            )


def is_sharded(tensor: Tensor) -> bool:
    """Tells whether this rank may hold only a shard of the tensor."""
    return is_flat(tensor) or any(map(_is_dtensor, plain_parts({"": tensor}).values()))


def is_wrapper(tensor: Tensor) -> bool:
    """Tells whether a tensor wraps others and has no memory of its own, as quantised ones do."""
    return type(tensor) not in (Tensor, nn.Parameter) and (
        hasattr(tensor, "__tensor_flatten__") or not _has_memory(tensor)
    )


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except (RuntimeError, NotImplementedError):  # those that _make_wrapper_subclass has made may refuse to tell
        return False


def plain_parts(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces tensors that wrap others by the tensors inside, which hold the values and can be written.

    It leaves out those whose class does not tell what is inside.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if is_wrapper(tensor) and not _is_dtensor(tensor):
            parts |= plain_parts({f"{name}.{each}": getattr(tensor, each) for each in _names_inside(tensor)})
        else:
            parts[name] = tensor
    return parts


def _names_inside(tensor: Tensor) -> list[str]:
    """Returns the attributes that hold the tensors inside; none if the class does not tell them."""
    try:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):
        return []
    return list(names)


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes long
    return module is not None and isinstance(tensor, module.DTensor)
