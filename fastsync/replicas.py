"""Makes replicas of one rank's model: tensors of any dtype and strides, broadcast in few messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from . import _C

_BROADCAST_BYTES = 250 * 2**20  # of a flat buffer of several tensors

# Gloo knows these, but no other integers and no float8: those go as bytes.
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}


@torch.no_grad()
def broadcast(
    named: Mapping[str, Tensor], others: Mapping[str, Tensor], group: dist.ProcessGroup, root: int = 0
) -> None:
    """Gives all ranks of the group the tensors of one, in place, once they know that they have the same others.

    Args:
        named: those that the ranks have agreed on.
        others: what else there is, by what it is called.
        root: whose they are, as a rank of the group.

    Raises:
        ValueError: the ranks have different others.
    """
    if others:
        lines = [
            f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
            for name, tensor in others.items()
        ]
        _C.check_agreement(group, "\n".join(lines), next(iter(named.values())).device)
    tensors = [tensor.detach() for tensor in (*named.values(), *others.values())]
    vectors = [_as_vector(tensor) if tensor.dtype in _DTYPES else _as_bytes(tensor) for tensor in tensors]
    sent = [vector.to(_C.device_of_sums(group, vector.device)) for vector in vectors]
    dist._broadcast_coalesced(group, sent, _BROADCAST_BYTES, root)  # type: ignore[attr-defined]  # as DDP does
    for tensor, values in zip(tensors, sent, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def _as_vector(tensor: Tensor) -> Tensor:
    """Its elements as they lie in memory, where they fill a block of it; else the tensor.

    Strides of dimensions of size 1 may be anything, and torch takes some for elements that overlap.
    """
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
