"""Statistics of a sync: of the gradients that it averaged, and of what it cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from .reference import NUM_NONFINITE, NUM_SATURATED, SUM_OF_SQUARES
from .wording import format_bytes

if TYPE_CHECKING:
    from . import _C

Transport: TypeAlias = Literal["process_group", "shared_memory", "two_level"]


class GradStats:
    """The newest averaged gradients, found out in the pass that unpacked them.

    0-dim tensors on the gradients' device: reading one on the host (``.item()``, ``print``) waits for the device, and
    nothing else here does.

    Args:
        rows: the engine's statistics, float64 [buckets, reference.NUM_STATS].
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __repr__(self) -> str:
        return (
            f"GradStats(grad_norm={self.grad_norm.item():.6g}, num_nonfinite={self.num_nonfinite.item()}, "
            f"num_saturated={self.num_saturated.item()})"
        )

    @property
    def grad_norm(self) -> Tensor:
        """2-norm over all synchronised gradients, float32; inf or nan if a gradient is."""
        return self._rows.select(1, SUM_OF_SQUARES).sum().sqrt().float()

    @property
    def num_nonfinite(self) -> Tensor:
        """Number of averaged values that are inf or nan, int64. The same on all ranks."""
        return self._rows[:, NUM_NONFINITE].sum().long()

    @property
    def num_saturated(self) -> Tensor:
        """Number of values of this rank that did not fit the wire and were sent as the largest that does, int64.

        So are sums (``op="sum"``) that the gradients' own dtype does not hold; they are counted on every rank.
        """
        return self._rows[:, NUM_SATURATED].sum().long()


@dataclass(frozen=True)
class BucketStats:
    """One bucket's share of ``SyncStats``. Sums over its syncs so far; times in seconds."""

    numel: int
    wire_bytes: int
    num_syncs: int
    pack_time: float
    collective_time: float
    unpack_time: float
    transport: Transport
    """How the newest sync's gradients got to other ranks, see ``SyncStats``."""
    num_hosts: int
    transport_reason: str

    @classmethod
    def _from_totals(cls, totals: "_C.BucketTotals") -> "BucketStats":
        # On a GPU a sync goes untimed when the device has not finished it while its events are kept: scale up.
        scale = totals.num_syncs / totals.num_timed if totals.num_timed else 0.0
        return cls(
            numel=totals.elements,
            wire_bytes=totals.wire_bytes,
            num_syncs=totals.num_syncs,
            pack_time=totals.pack_time * scale,
            collective_time=totals.collective_time * scale,
            unpack_time=totals.unpack_time * scale,
            transport=_transport(totals),
            num_hosts=max(1, totals.num_hosts),
            transport_reason=totals.why_not_shared,
        )


def _transport(totals: "_C.BucketTotals") -> Transport:
    if not totals.shares_memory:
        return "process_group"
    return "two_level" if totals.num_hosts > 1 else "shared_memory"


def describe_transport(stats: "SyncStats | BucketStats") -> str:
    """Says in words how gradients get to other ranks."""
    if stats.transport == "process_group":
        return "process group" + (f" (no shared memory: {stats.transport_reason})" if stats.transport_reason else "")
    between = f", process group between {stats.num_hosts} hosts" if stats.transport == "two_level" else ""
    return f"shared memory{between}" if stats.transport else "nothing yet"


@dataclass(frozen=True, repr=False)
class SyncStats:
    """The cost of synchronisation on this rank so far. Sums since the beginning; times in seconds, bytes of payload."""

    num_steps: int
    """Backward passes that were synchronised."""
    num_syncs: int
    """Buckets that were synchronised, all steps together."""
    numel: int
    """Gradient values in one step."""
    wire_bytes: int
    """Bytes this rank handed to the process group: values times their size on the wire. ``attach`` adds what is
    piggybacked, and one element a parameter that tells whether there is a gradient. With two levels it is what it sent
    inside its node and to other nodes in all. In shared memory it is what it wrote for others; where that spans several
    hosts, what it sent to the others. Alone on a CPU it hands over nothing."""
    pack_time: float
    """In the pass before the collective: scale, cast, gather."""
    collective_time: float
    """From the moment a bucket is with the process group until it is reduced, summed over buckets (they overlap)."""
    unpack_time: float
    """In the pass after the collective: cast, unscale, scatter, statistics. Where ranks add up themselves, large
    buckets come in pieces, and this is the last one's: the others are unpacked while there is something to wait for."""
    exposed_time: float
    """From the moment the last bucket of a step was on its way until all were unpacked: what backward did not hide."""
    buckets: tuple[BucketStats, ...]
    """The buckets of the newest step, in the order they are sent."""
    transport: Transport | None = None
    """How gradients get to other ranks: through ``"shared_memory"`` of one host, by the ``"process_group"``, or
    ``"two_level"``: shared memory inside each of several hosts and the process group between them. None before the
    first step."""
    num_hosts: int = 1
    """Hosts between which a sum travels; more than 1 only where ranks share memory inside each."""
    transport_reason: str = ""
    """Why ranks on a CPU, which tried, do not share memory; empty where they do, or where it does not apply."""
    kernels: str = ""
    """What packs and unpacks: "fused" kernels, made for the gradients' device, or "generic" ones, of torch's own
    operations."""

    def __repr__(self) -> str:
        steps = max(self.num_steps, 1)
        parts = ("pack", "collective", "unpack", "exposed")
        times = ", ".join(f"{part} {getattr(self, f'{part}_time') / steps * 1e3:.3g} ms" for part in parts)
        return (
            f"SyncStats({self.num_steps} steps through {describe_transport(self)}; in each {len(self.buckets)} "
            f"buckets of {self.numel:,} values, {format_bytes(self.wire_bytes / steps)} sent, {times})"
        )

    @classmethod
    def from_totals(cls, totals: "_C.SyncTotals") -> "SyncStats":
        """From the engine's own counters."""
        everything = BucketStats._from_totals(totals.all)
        buckets = tuple(BucketStats._from_totals(bucket) for bucket in totals.buckets)
        timed_share = totals.num_timed_steps / totals.num_steps if totals.num_steps else 0.0
        return cls(
            num_steps=totals.num_steps,
            num_syncs=everything.num_syncs,
            numel=sum(bucket.numel for bucket in buckets),
            wire_bytes=everything.wire_bytes,
            pack_time=everything.pack_time,
            collective_time=everything.collective_time,
            unpack_time=everything.unpack_time,
            exposed_time=totals.exposed_time / timed_share if timed_share else 0.0,
            buckets=buckets,
            transport=buckets[-1].transport if buckets else None,
            num_hosts=buckets[-1].num_hosts if buckets else 1,
            transport_reason=buckets[-1].transport_reason if buckets else "",
            kernels=totals.buckets[-1].kernels if buckets else "",
        )
