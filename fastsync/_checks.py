"""Checks of what a caller passes, before anything is sent, and parts of messages."""

from __future__ import annotations

import difflib
import gc
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

_GRAD_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)

NODE_MESH = ("nodes", "local")
"""The names of the dimensions of a mesh that says which ranks share a node, where they have names."""


def resolve_group(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the process group itself, that of a one-dimensional mesh, or for None the default group.

    Raises:
        ValueError: it is none of these, there is no default group, or the mesh has several dimensions.
    """
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group: the DeviceMesh has {process_group.ndim} dimensions {process_group.mesh_dim_names}; "
                "name the one to average over, as in mesh['dp']"
            )
        return process_group.get_group()
    if process_group is not None:
        raise ValueError(
            f"process_group: expected a ProcessGroup that this rank is a member of, a one-dimensional DeviceMesh, or "
            f"None, got {process_group!r}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "process_group: None stands for the default group, and there is none yet; call "
            "torch.distributed.init_process_group first, or use fastsync.distributed.process_group"
        )
    default = dist.group.WORLD
    assert default is not None
    return default


def resolve_nodes(
    process_group: dist.ProcessGroup | DeviceMesh | None,
) -> tuple[dist.ProcessGroup, int | None]:
    """As ``resolve_group``, and how many ranks a node has where a mesh of the shape (nodes, ranks per node) says it.

    Raises:
        ValueError: as ``resolve_group``; or a mesh of two dimensions has other names, or does not hold the default
            group's ranks in order.
    """
    if not isinstance(process_group, DeviceMesh) or process_group.ndim != 2:
        return resolve_group(process_group), None
    group = resolve_group(None)
    names = process_group.mesh_dim_names
    if names is not None and names != NODE_MESH:
        # Such as data and tensor parallel: an average over both would be wrong, and nobody would be told.
        raise ValueError(
            f"process_group: the DeviceMesh has 2 dimensions {names}; to average over one of them name it, as in "
            f"mesh[{names[0]!r}]; where they are nodes and the ranks of each, name them {NODE_MESH}"
        )
    if process_group.mesh.flatten().tolist() != list(range(group.size())):
        raise ValueError(
            f"process_group: the DeviceMesh has 2 dimensions {process_group.mesh_dim_names}, which stand for (nodes, "
            f"ranks of a node) and have to hold the default group's {group.size()} ranks in order, but hold "
            f"{process_group.mesh.tolist()}; to average over one dimension name it, as in mesh['dp']"
        )
    return group, process_group.size(1)


def check_group(group: dist.ProcessGroup, named: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the group has no backend for a parameter's device, nor one for the host."""
    have = {device.type for device in group._device_types}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        device = parameter.device
        if device.type not in have and ("cpu" not in have or device.type == "meta"):
            raise ValueError(
                f"process_group: it serves {', '.join(sorted(have))}, but parameter {name} is on {device}; use a group "
                "whose backend does (Gloo for cpu, NCCL for cuda)"
            )


def trainable_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Picks those that can have gradients, by name, loose ones by index. Raises ValueError if there are none.

    Args:
        module_or_params: a module, or one or many parameters.
        argument: what the caller calls them, for errors.
    """
    return with_gradients(named_parameters(module_or_params, argument), argument)


def with_gradients(named: Mapping[str, Tensor], argument: str) -> dict[str, Tensor]:
    """Picks those that can have gradients. Raises ValueError if none requires one."""
    able: dict[str, Tensor] = {name: p for name, p in named.items() if p.is_floating_point() or p.is_complex()}
    if not any(parameter.requires_grad for parameter in able.values()):
        raise ValueError(f"{argument}: none of its {len(named)} parameters requires a gradient; nothing to synchronise")
    return able


def named_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Names a module's parameters, or loose ones by index. Raises ValueError for what cannot be synchronised."""
    if isinstance(module_or_params, nn.Module):
        _check_unwrapped(module_or_params, argument)
        check_dense(module_or_params, argument)
        # torch.compile's wrapper must not show in the names, for checkpoints come from models with and without it.
        named: dict[str, Tensor] = {
            name.replace("_orig_mod.", ""): p for name, p in module_or_params.named_parameters()
        }
    else:
        given = listed(module_or_params, argument)
        for index, parameter in enumerate(given):
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"{argument}: expected a module or tensors, but number {index} is a {type(parameter).__name__}"
                    + ("; pass the module or its parameters, not names" if isinstance(parameter, str | tuple) else "")
                    + ("; pass its parameters()" if isinstance(parameter, nn.Module) else "")
                )
        unique = {id(parameter): (str(index), parameter) for index, parameter in reversed(list(enumerate(given)))}
        named = dict(reversed(list(unique.values())))
    for name, parameter in named.items():
        _check_parameter(name, parameter, argument)
    check_not_sharded(named, argument)
    return named


def listed(params: Iterable[Tensor] | Tensor, argument: str) -> list[Tensor]:
    """Lists loose parameters, one or many. Raises ValueError for what is neither, such as an optimizer."""
    if not isinstance(params, Iterable):
        raise ValueError(
            f"{argument}: expected a module or tensors, got {type(params).__name__}; pass the module or its parameters"
        )
    return [params] if isinstance(params, Tensor) else list(params)


def _check_unwrapped(module: nn.Module, argument: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{argument}: {name or 'the module'} is wrapped in DistributedDataParallel, which averages gradients "
                "itself; use fastsync.register_comm_hook(ddp_model), or attach to the model without the wrapper"
            )


def _check_parameter(name: str, parameter: Tensor, argument: str) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"{argument}: parameter {name} is not initialised yet; run a forward first")
    if not parameter.is_leaf:
        raise ValueError(
            f"{argument}: tensor {name} is no leaf of the graph (it came from {parameter.grad_fn}), so it has no "
            ".grad; pass the parameters it was computed from"
        )
    if shares_memory(parameter):
        raise ValueError(
            f"{argument}: elements of parameter {name} share memory (shape {list(parameter.shape)}, strides "
            f"{list(parameter.stride())}), so no optimizer can step it; attach what it was expanded from"
        )


def check_dense(module: nn.Module, argument: str) -> None:
    """Raises ValueError where the module has embeddings with sparse gradients."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{argument}: {name}.weight gets sparse gradients ({type(child).__name__} with sparse=True), which "
                "fastsync does not handle; build it with sparse=False"
            )


def check_dtypes(named: Mapping[str, Tensor], wire: str, argument: str) -> None:
    """Raises ValueError for parameters of a dtype that the engine, or the wire, does not carry."""
    for name, parameter in named.items():
        if not parameter.requires_grad or parameter.dtype in _GRAD_DTYPES:
            continue
        if parameter.dtype not in _COMPLEX_DTYPES:
            raise ValueError(
                f"{argument}: parameter {name} is {parameter.dtype}; fastsync handles float32, float64, float16, "
                "bfloat16 and complex gradients"
            )
        if wire != "none":
            raise ValueError(
                f"compression: {wire!r} cannot carry parameter {name}, which is {parameter.dtype}; use "
                "compression='none' for models with complex parameters"
            )


def check_not_sharded(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError for parameters of which this rank holds a part only, or might."""
    for name, parameter in named.items():
        if is_sharded_by_fsdp1(parameter):
            raise ValueError(
                f"{argument}: parameter {name} is sharded by FullyShardedDataParallel, which gives every rank another "
                "part of the model and averages gradients itself; use fastsync with a model that every rank holds whole"
            )
        if is_wrapper(parameter):
            raise ValueError(
                f"{argument}: parameter {name} is a {type(parameter).__name__}, which wraps other tensors, as those "
                "that fully_shard or tensor parallelism hands out do; this handles plain tensors that every rank holds "
                "whole. Use fastsync.register_reduce_scatter for models under fully_shard; after tensor parallelism "
                "call fully_shard with the data-parallel dimension of the mesh first, or, where ranks are to hold "
                "whole replicas, with one of a single rank, and fastsync.register_all_reduce_hook"
            )


def is_sharded_by_fsdp1(parameter: Tensor) -> bool:
    """Tells whether it is FullyShardedDataParallel's: a flat parameter, or a view of one in the original's place."""
    return bool(getattr(parameter, "_fsdp_flattened", False) or getattr(parameter, "_is_flat_param", False))


def is_wrapper(tensor: Tensor) -> bool:
    """Tells whether it is of a subclass that wraps other tensors, such as DTensor, and has no memory of its own."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


def shares_memory(tensor: Tensor) -> bool:
    """Tells whether elements of a strided tensor lie at one place, as those of an expanded one do."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_a_stage_of(parameters: Iterable[Tensor]) -> bool:
    """Tells whether any of them is part of a stage of ``torch.distributed.pipelining``.

    Where there may be stages it looks for them among all objects: call it once.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return False
    ours = {id(parameter) for parameter in parameters}
    stages = [each for each in gc.get_objects() if issubclass(type(each), module._PipelineStageBase)]
    return any(id(parameter) in ours for stage in stages for parameter in stage.submod.parameters())


def check_no_stage(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError where gradients of a pipeline's stage would be averaged as backward goes on."""
    if has_a_stage_of(parameters):
        raise ValueError(
            "overlap: these are the parameters of a pipeline's stage, whose schedule runs a backward for every "
            "micro-batch, or computes gradients past all hooks, as zero-bubble schedules do; use "
            "fastsync.attach(..., overlap=False), and call synchronize() after schedule.step()"
        )


def check_at_least(options: Any, **least: int) -> None:
    """Raises ValueError for an option below its least; None, where an option has a default of its own, is none."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Asks, at the end of a sentence, for the names most like this one; empty if none is like it."""
    known = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known) or difflib.get_close_matches(
        name.lower(), known, cutoff=0.5
    )
    return f"; did you mean {' or '.join(known[found] for found in near)}?" if near else ""


def format_bytes(count: float | None) -> str:
    """Formats a number of bytes, such as "1.5 MB"; a dash for what was not measured."""
    if count is None or math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
