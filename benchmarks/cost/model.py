"""Models what a sync costs, from a few parameters, and what a training step pays of it.

A sync of ``b`` bytes on the wire over ``n`` ranks takes

    T = steps · latency + volume · b / bandwidth + overhead + local bytes / local bandwidth

Steps and volume are the algorithm's (``Route``). The first two terms are the link's, the others the host's: overhead is
what a call costs by itself, local bytes are what a rank reads and writes to pack, unpack and add (``local_bytes``).
The first two terms are Hockney's model of a message (R. Hockney, The communication challenge for MPP, 1994), as
R. Thakur et al. use it for these algorithms (Optimization of collective communication operations in MPICH, 2005).
A shaped link that was idle lets a burst through at once, which is taken off the bytes.

Where more ranks than cores share a machine, they wait for each other's turns on a core: what the host does takes
``crowding`` = ranks / cores times as long, and of a step's latency the part that is its work.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scipy.optimize import brentq

from benchmarks.rivals import compressions
from benchmarks.rivals.compressions import WIRE_BYTES

Algorithm = Literal["ring", "tree", "two-level"]
GRAD_BYTES = 4
"""Gradients are float32."""
COPIES = {
    # Bytes that a rank reads and writes for each element, from the width of the wire, besides those of the addition.
    "all_reduce": lambda wire: 0,
    "ddp": lambda wire: 4 * GRAD_BYTES,  # into a bucket and back
    "fastsync.attach": lambda wire: 2 * (GRAD_BYTES + wire),  # pack and unpack
    "fastsync.register_comm_hook": lambda wire: 4 * GRAD_BYTES + 2 * (GRAD_BYTES + wire),  # both
}
LOWEST, HIGHEST = 1e3, 1e15
"""Bytes per second, between which crossovers are looked for."""


@dataclass(frozen=True)
class Route:
    """The demands of an algorithm on a link."""

    steps: float
    """Messages that follow each other, each of which has to have come before the next one leaves."""
    volume: float
    """What a rank sends, as a multiple of the message."""


def ring(num_ranks: int) -> Route:
    """Reduce-scatter and all-gather around a ring: each rank sends n − 1 of n chunks twice.

    What Gloo does, and NCCL with large messages. (P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for
    clusters of workstations, 2009.)
    """
    return Route(2 * (num_ranks - 1), 2 * (num_ranks - 1) / num_ranks)


def tree(num_ranks: int) -> Route:
    """Reduction and broadcast in a double binary tree: each half of the message in one of two trees.

    A rank is a leaf of one tree and has two children in the other, so it sends at most half a message up twice and
    half a message down twice. (P. Sanders et al., Two-tree algorithms for full bandwidth broadcast, reduction and scan,
    2009.)
    """
    return Route(2 * math.ceil(math.log2(num_ranks)), min(2.0, num_ranks - 1.0))


def one_shot(num_ranks: int) -> Route:
    """Every rank sends all it has to every other, at once."""
    return Route(1, num_ranks - 1)


def two_shot(num_ranks: int) -> Route:
    """Every rank sends each other one of n parts at once, adds up its own, and sends each other the sums."""
    return Route(2, 2 * (num_ranks - 1) / num_ranks)


@dataclass(frozen=True)
class Link:
    latency: float
    """Seconds of a step that pass whoever else is busy."""
    bandwidth: float
    """Bytes per second that a rank can send; of the link between nodes, that all ranks of a node can send."""
    work: float = 0.0
    """Seconds of a step for which a rank needs a core."""

    def time(self, route: Route, nbytes: float, crowding: float = 1.0, burst: float = 0.0) -> float:
        """Seconds of one route, with ``burst`` bytes that the link lets through at once."""
        latency = self.latency + self.work * crowding
        return route.steps * latency + max(0.0, route.volume * nbytes - burst) / self.bandwidth


@dataclass(frozen=True)
class Topology:
    """An algorithm and the links it runs over."""

    algorithm: Algorithm
    link: Link
    """Between ranks; of two levels, between nodes."""
    ranks_per_node: int = 1
    """Of two levels."""
    inner: Link | None = None
    """Of two levels, inside of a node."""

    def __post_init__(self) -> None:
        if self.algorithm == "two-level" and (self.inner is None or self.ranks_per_node < 2):
            raise ValueError("two levels take the link inside of a node, and at least 2 ranks per node")

    def time(self, nbytes: float, num_ranks: int, crowding: float = 1.0, burst: float = 0.0) -> float:
        """Seconds on the links.

        Two levels: a ring inside of a node to scatter what is reduced and later to gather it, and between, for each
        rank's part, a ring of one rank of each node. All ranks of a node share its link to the others.

        Raises:
            ValueError: on two levels ranks do not fill their nodes.
        """
        if self.algorithm == "two-level":
            assert self.inner is not None
            in_node = min(self.ranks_per_node, num_ranks)
            if num_ranks % in_node:
                raise ValueError(f"{num_ranks} ranks do not fill nodes of {in_node}")
            inside = self.inner.time(ring(in_node), nbytes, crowding)
            return inside + self.link.time(ring(num_ranks // in_node), nbytes, crowding, burst)
        return self.link.time(ROUTES[self.algorithm](num_ranks), nbytes, crowding, burst)


ROUTES: Mapping[str, Callable[[int], Route]] = {"ring": ring, "tree": tree}
OWN_ROUTES: Mapping[str, Callable[[int], Route]] = {"one_shot": one_shot, "two_shot": two_shot}
"""Of ways that do not leave the sum to the process group's all_reduce."""


@dataclass(frozen=True)
class Host:
    """The costs of one way to synchronise besides the link."""

    overhead: float
    """Seconds a call."""
    bandwidth: float
    """Bytes that a rank reads and writes per second; inf where the passes cost nothing that could be measured."""

    def time(self, local_bytes: float, crowding: float = 1.0) -> float:
        return (self.overhead + local_bytes / self.bandwidth) * crowding


def split_way(way: str) -> tuple[str, float] | None:
    """The door and the wire's bytes an element of a way as ``sync`` names it; None if the model does not cover it."""
    door, _, compression = way.partition("/")
    wire, _ = compressions.split(compression)
    widths = {"": 4, "fp32": 4, **WIRE_BYTES}
    covered = door in COPIES and wire in widths and (door == "ddp") == (wire == "")
    return (door, widths[wire]) if covered else None


def algorithm_of(way: str, num_ranks: int) -> str:
    """Names who adds: all_reduce, one_shot or two_shot."""
    door, _, compression = way.partition("/")
    return compressions.algorithm(compression, num_ranks) if door.startswith("fastsync.") else "all_reduce"


def route_of(way: str, num_ranks: int, algorithm: str) -> Route:
    """Returns the demands of a way on a link where the process group's all_reduce is ``algorithm``."""
    return {**OWN_ROUTES, "all_reduce": ROUTES[algorithm]}[algorithm_of(way, num_ranks)](num_ranks)


def local_bytes(way: str, numel: float, num_ranks: int) -> float:
    """Counts bytes that a rank reads and writes in its own memory: copies, what adding takes beyond, and residuals.

    The ring adds n − 1 of n chunks, each to another one. In one_shot, unpack reads n wires instead of one. In two_shot
    a rank reads n shards and writes their sum. A residual is read and written, and in two_shot that of the shard too.
    """
    covered = split_way(way)
    assert covered is not None
    door, wire = covered
    algorithm = algorithm_of(way, num_ranks)
    adding = {
        "all_reduce": 3 * wire * (num_ranks - 1) / num_ranks,
        "one_shot": wire * (num_ranks - 1),
        "two_shot": wire * (1 + 1 / num_ranks),
    }[algorithm]
    residuals = 0.0
    if "ef" in compressions.split(way)[1]:
        residuals = 2 * GRAD_BYTES * (1 + (1 / num_ranks if algorithm == "two_shot" else 0))
    return numel * (COPIES[door](wire) + adding + residuals)


@dataclass(frozen=True)
class Job:
    """One training step of one rank, without communication."""

    numel: int
    compute_time: float
    """Seconds."""
    num_buckets: int = 1
    """1: nothing overlaps."""
    backward_share: float = 2 / 3
    """Of the compute time: backward computes two gradients where forward computes one product."""


@dataclass(frozen=True)
class CostModel:
    topology: Topology
    hosts: Mapping[str, Host]
    """By way."""

    def sync_time(self, way: str, numel: float, num_ranks: int, crowding: float = 1.0, burst: float = 0.0) -> float:
        """Seconds of one sync on its own."""
        link = self.link_time(way, numel, num_ranks, crowding, burst)
        return link + self.host_time(way, numel, num_ranks, crowding)

    def link_time(self, way: str, numel: float, num_ranks: int, crowding: float = 1.0, burst: float = 0.0) -> float:
        covered = split_way(way)
        assert covered is not None
        nbytes, topology = numel * covered[1], self.topology
        if topology.algorithm == "two-level":  # which every way is taken to follow
            return topology.time(nbytes, num_ranks, crowding, burst)
        return topology.link.time(route_of(way, num_ranks, topology.algorithm), nbytes, crowding, burst)

    def host_time(self, way: str, numel: float, num_ranks: int, crowding: float = 1.0) -> float:
        return self.hosts[way].time(local_bytes(way, numel, num_ranks), crowding)

    def exposed_time(self, way: str, job: Job, num_ranks: int, slower: float = 1.0) -> float:
        """Seconds that synchronisation adds to a step, if every sync takes ``slower`` times what the model says.

        Equal buckets become ready at equal distances during backward, and travel one after the other. The first
        bucket's compute and the last one's communication hide nothing; what the host does is hidden by nothing either,
        because it takes the device that computes. The last bucket ends at the later of: the first one ready and all
        that travel behind it without a pause; the last one ready and travelling alone. Backward hides the same time of
        a slower link, so that what is exposed grows by more than ``slower``.
        """
        if math.isinf(slower):
            return math.inf
        in_bucket = job.numel / job.num_buckets
        link = slower * self.link_time(way, in_bucket, num_ranks)
        hidden = job.compute_time * job.backward_share * (1 - 1 / job.num_buckets)
        travelling = max(link, job.num_buckets * link - hidden)
        return travelling + job.num_buckets * slower * self.host_time(way, in_bucket, num_ranks)

    def over(self, bandwidth: float) -> "CostModel":
        """The same, with another bandwidth of the link, between nodes if there are two levels."""
        link = replace(self.topology.link, bandwidth=bandwidth)
        return replace(self, topology=replace(self.topology, link=link))

    def crossover(
        self, way: str, other: str, job: Job, num_ranks: int, slower: float = 1.0, other_slower: float = 1.0
    ) -> float:
        """The link's bandwidth, in bytes per second, at which a step takes as long with both ways.

        ``way`` sends fewer bytes, so it is ahead below. The difference of the exposed times falls with the bandwidth,
        because the way that sends more never hides a larger part of it, so there is one crossing or none. Every sync of
        ``way`` takes ``slower`` times what the model says, every one of the other ``other_slower`` times.

        Returns:
            inf if ``way`` is ahead over any link, 0 if it is behind over slow ones already.
        """

        def lead(log_bandwidth: float) -> float:
            model = self.over(math.exp(log_bandwidth))
            behind = model.exposed_time(other, job, num_ranks, other_slower)
            return behind - model.exposed_time(way, job, num_ranks, slower)

        lowest, highest = math.log(LOWEST), math.log(HIGHEST)
        if lead(lowest) <= 0:
            return 0.0
        if lead(highest) >= 0:
            return math.inf
        return math.exp(brentq(lead, lowest, highest, xtol=1e-9))

    def crossover_range(self, way: str, other: str, job: Job, num_ranks: int, error: float) -> tuple[float, float]:
        """The crossing where ``way`` is slower than predicted and ``other`` faster, and the other way round."""
        fast, slow = slower(error)
        if math.isinf(slow):
            return 0.0, math.inf
        return (
            self.crossover(way, other, job, num_ranks, slow, fast),
            self.crossover(way, other, job, num_ranks, fast, slow),
        )


def slower(error: float) -> tuple[float, float]:
    """Returns the factors of a prediction, at least and at most, where predictions were off by up to ``error``.

    What was predicted with a relative error of e took 1 / (1 + e) of that, so from an error of 100 % on without limit.
    """
    return 1 / (1 + error), 1 / (1 - error) if error < 1 else math.inf


def efficiency(job: Job, exposed: float) -> float:
    """Of weak scaling: a step's time without communication over its time with what of it is exposed."""
    return job.compute_time / (job.compute_time + exposed)
