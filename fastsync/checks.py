"""Checks before anything is sent: groups, models and parameters that the engine cannot serve."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .compression import Compression

_GRAD_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)


NODE_MESH = ("nodes", "local")
"""What the dimensions of a mesh are named that says which ranks share a node, if they are named at all."""


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


def check_dense(module: nn.Module, argument: str) -> None:
    """Raises ValueError where the module has embeddings with sparse gradients."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{argument}: {name}.weight gets sparse gradients ({type(child).__name__} with sparse=True), which "
                "fastsync does not handle; build it with sparse=False"
            )


def check_parameters(named: Mapping[str, Tensor], compression: Compression, argument: str) -> None:
    """Raises ValueError for parameters of a dtype that the engine, or the wire, does not carry."""
    for name, parameter in named.items():
        if not parameter.requires_grad or parameter.dtype in _GRAD_DTYPES:
            continue
        if parameter.dtype not in _COMPLEX_DTYPES:
            raise ValueError(
                f"{argument}: parameter {name} is {parameter.dtype}; fastsync handles float32, float64, float16, "
                "bfloat16 and complex gradients"
            )
        if compression.wire != "none":
            raise ValueError(
                f"compression: {compression.wire!r} cannot carry parameter {name}, which is {parameter.dtype}; use "
                "compression='none' for models with complex parameters"
            )


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
