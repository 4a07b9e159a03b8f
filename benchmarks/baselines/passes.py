"""The local passes and their baselines: gradients to wire and back, on one device, without communication.

The bytes of a pass are those it must read and write: 4 an element for float32 gradients and the wire's own width for
the wire. The limit is a copy that reads and writes as many.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import passes, reference  # noqa: F401  registers torch.ops.fastsync

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16, "none": torch.float32}
COPY = "copy of as many bytes"
MULTIPLIER = 0.5
"""As over two ranks."""

ops = torch.ops.fastsync


class Buffers:
    """Gradients of ``numel`` float32 values in all, in ``num_tensors`` uneven tensors, and what the methods need."""

    def __init__(self, numel: int, num_tensors: int, wire: torch.dtype, device: torch.device, seed: int = 0) -> None:
        cuts = sorted(random.Random(seed).sample(range(1, numel), num_tensors - 1))
        generator = torch.Generator().manual_seed(seed)
        lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, numel], strict=True)]
        self.grads = [torch.randn(length, generator=generator).to(device) for length in lengths]
        self.wire = torch.zeros(numel, dtype=wire, device=device)
        self.stats = torch.zeros(reference.NUM_STATS, dtype=torch.float64, device=device)
        self.norm = torch.full((), torch.nan, device=device)
        self.limit = reference.saturation_limit(wire, 2)
        self.workspace = 1 + seed  # the same in all calls, as a bucket has it
        self.copy_source = torch.ones(self.nbytes // 2, dtype=torch.int8, device=device)
        self.copy_target = torch.zeros_like(self.copy_source)

    @property
    def nbytes(self) -> int:
        """Bytes that a pass must read and write."""
        return (4 + self.wire.itemsize) * self.wire.numel()

    def copy(self) -> None:
        self.copy_target.copy_(self.copy_source)

    def pack(self) -> None:
        ops.pack(
            self.grads, self.wire, self.stats, None, multiplier=MULTIPLIER, limit=self.limit, workspace=self.workspace
        )

    def pack_cat(self) -> None:
        self.wire = torch.cat([grad.reshape(-1) for grad in self.grads]).mul_(MULTIPLIER).to(self.wire.dtype)

    def pack_foreach(self) -> None:
        torch._foreach_copy_(self._parts(self.wire), torch._foreach_mul(self.grads, MULTIPLIER))

    def unpack(self) -> None:
        ops.unpack(self.wire, self.grads, self.stats, workspace=self.workspace)

    def unpack_split(self) -> None:
        for grad, part in zip(self.grads, self._parts(self.wire.to(torch.float32)), strict=True):
            grad.copy_(part)
        self.norm = torch.nn.utils.get_total_norm(self.grads)

    def unpack_foreach(self) -> None:
        torch._foreach_copy_(self.grads, self._parts(self.wire))
        self.norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.grads)))

    def norm_in_stats(self) -> Tensor:
        return self.stats[reference.SUM_OF_SQUARES].sqrt()

    def norm_by_torch(self) -> Tensor:
        return self.norm.double()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split([grad.numel() for grad in self.grads]))


@dataclass(frozen=True)
class Pass:
    """One implementation of one of the passes."""

    run: Callable[[Buffers], None]
    norm: Callable[[Buffers], Tensor] | None = None
    """Where it has left the gradients' norm, in float64; None if it takes none."""


PACKS = {
    COPY: Pass(Buffers.copy),
    "fastsync.pack": Pass(Buffers.pack),
    "cat + mul + to": Pass(Buffers.pack_cat),
    "_foreach_mul + _foreach_copy": Pass(Buffers.pack_foreach),
}
UNPACKS = {
    COPY: Pass(Buffers.copy),
    "fastsync.unpack, with norm": Pass(Buffers.unpack, Buffers.norm_in_stats),
    "to + split + copy, then norm": Pass(Buffers.unpack_split, Buffers.norm_by_torch),
    "_foreach_copy, then norm": Pass(Buffers.unpack_foreach, Buffers.norm_by_torch),
}
PASSES: Mapping[str, Mapping[str, Pass]] = {"pack": PACKS, "unpack": UNPACKS}


def is_right(name: str, method: Pass, buffers: Buffers) -> bool:
    """Runs ``method`` on fresh buffers and compares every bit with the specification, and the norm to rounding."""
    if method.run is Buffers.copy:
        buffers.copy_target.zero_()
        buffers.copy()
        return torch.equal(buffers.copy_target, buffers.copy_source)
    # What the other direction left there must not pass for a result.
    if name == "pack":
        expected = torch.empty_like(buffers.wire)
        reference.pack(buffers.grads, expected, torch.zeros_like(buffers.stats), multiplier=MULTIPLIER)
        buffers.wire.fill_(torch.nan)
        method.run(buffers)
        return torch.equal(buffers.wire, expected)
    torch._foreach_mul_(buffers.grads, torch.nan)
    method.run(buffers)
    written = torch.cat(buffers.grads)
    if not torch.equal(written, buffers.wire.to(torch.float32)):
        return False
    # A float32 sum of as many squares, in whatever order.
    return method.norm is None or torch.allclose(method.norm(buffers), written.double().norm(), rtol=1e-3)
