"""Statistics of a sync: of the gradients that it averaged, and of what it cost."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from ..messages import format_bytes

SUM_OF_SQUARES, NUM_NONFINITE, NUM_SATURATED = range(3)
"""Indices in the engine's statistics."""

WORTH_TELLING = 1e-3
"""Seconds a step that ranks wait for one of them."""

Transport: TypeAlias = Literal["process_group", "shared_memory", "two_level"]


class GradStats:
    """Statistics of the newest averaged gradients, from the pass that unpacked them.

    They are 0-dim tensors on the gradients' device. Reading one on the host (``.item()``, ``print``) waits for the
    device; nothing else here does.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums  # [4] float64: the engine's statistics, summed over buckets

    def __repr__(self) -> str:
        return (
            f"GradStats(grad_norm={self.grad_norm.item():.6g}, num_nonfinite={self.num_nonfinite.item()}, "
            f"num_saturated={self.num_saturated.item()})"
        )

    @property
    def grad_norm(self) -> Tensor:
        """2-norm over all synchronised gradients, float32; inf or nan if a gradient is."""
        return self._sums[SUM_OF_SQUARES].sqrt().float()

    @property
    def num_nonfinite(self) -> Tensor:
        """Number of averaged values that are inf or nan, int64. The same on all ranks."""
        return self._sums[NUM_NONFINITE].long()

    @property
    def num_saturated(self) -> Tensor:
        """Number of values of this rank that did not fit the wire and were sent as the largest that does, int64.

        Every rank also counts sums (``op="sum"``) that the gradients' own dtype does not hold.
        """
        return self._sums[NUM_SATURATED].long()


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """The cost of synchronising one bucket, as sums over its syncs so far; times in seconds."""

    numel: int
    """Gradient values in one step; of a sparse gradient those that this rank had in the newest step."""
    num_syncs: int
    wire_bytes: int
    """Bytes this rank handed to the process group, with what is piggybacked; or wrote for others in shared memory, or
    sent to other hosts or nodes. A single rank on a CPU sends nothing."""
    pack_time: float
    """In the pass before the collective: scale, cast, gather."""
    collective_time: float
    """From handing a bucket to the process group until it is reduced, summed over buckets (they overlap)."""
    unpack_time: float
    """In the pass after the collective: cast, unscale, scatter, statistics. Where ranks add themselves, this is a large
    bucket's last chunk: the other chunks are unpacked during waits."""
    transport: Transport | None = None
    """How gradients got to other ranks in the newest sync: through ``"shared_memory"`` of one host, by the
    ``"process_group"``, or ``"two_level"``: shared memory inside each host, the process group between them. None before
    the first step."""
    num_hosts: int = 1
    """Hosts that exchange sums; more than 1 only if ranks share memory inside each host."""
    transport_reason: str = ""
    """The reason why CPU ranks do not share memory; empty if they do, or if it does not apply."""
    kernels: str = ""
    """The kernels that pack and unpack: "fused", or "generic" for torch's operations; empty before the first step."""
    is_sparse: bool = False
    """Whether the bucket holds one sparse gradient, whose rows travel by the process group."""

    def describe_transport(self) -> str:
        """Says in words how gradients get to other ranks."""
        if self.transport == "process_group":
            return "process group" + (f" (no shared memory: {self.transport_reason})" if self.transport_reason else "")
        between = f", process group between {self.num_hosts} hosts" if self.transport == "two_level" else ""
        return f"shared memory{between}" if self.transport else "nothing yet"


@dataclass(frozen=True, repr=False, kw_only=True)
class SyncStats(BucketStats):
    """The cost of synchronisation on this rank: of all buckets, as sums since the beginning; times in seconds."""

    num_steps: int
    """Backward passes that were synchronised."""
    parameter_wire_bytes: int = 0
    """Bytes of parameters that this rank sent, with ``shard_optimizer`` or under ``fully_shard``; they are not in
    ``wire_bytes``."""
    exposed_time: float
    """From sending the last bucket of a step until all buckets were unpacked: the time that backward did not hide."""
    buckets: tuple[BucketStats, ...]
    """The buckets of the newest step, in the order they are sent."""
    waited_for: tuple[float, ...] = ()
    """For each rank of a group on CPUs the seconds a step that the others have waited for it, over some hundred steps.
    Empty in the first 16 steps, with weights, inside join() and some 32 steps behind it, on a GPU, and for other
    handles than attach's."""

    def __repr__(self) -> str:
        steps = max(self.num_steps, 1)
        parts = ("pack", "collective", "unpack", "exposed")
        times = ", ".join(f"{part} {getattr(self, f'{part}_time') / steps * 1e3:.3g} ms" for part in parts)
        buckets = "1 bucket" if len(self.buckets) == 1 else f"{len(self.buckets)} buckets"
        latest = max(self.waited_for, default=0.0)
        rank = f"rank {self.waited_for.index(latest)}" if latest >= WORTH_TELLING else ""
        late = f"; the others wait {latest * 1e3:.3g} ms a step for {rank}" if rank else ""
        of_parameters = self.parameter_wire_bytes / steps
        and_parameters = f" and {format_bytes(of_parameters)} of parameters" if of_parameters else ""
        return (
            f"SyncStats({self.num_steps} steps through {self.describe_transport()}; in each {buckets} of "
            f"{self.numel:,} values, {format_bytes(self.wire_bytes / steps)}{and_parameters} sent, {times}{late})"
        )
