"""The cost model against closed forms and simulation, and fits on data with a known answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cost.fit import Fit, HeldBack, Point, crowding, fit, fit_model, points_of
from benchmarks.cost.model import (
    CostModel,
    Host,
    Job,
    Link,
    Route,
    Topology,
    efficiency,
    local_bytes,
    ring,
    route_of,
    split_way,
    tree,
)
from benchmarks.harness.records import Record

LINK = Link(latency=50e-6, bandwidth=1e9)
NONE, FP16 = "fastsync.attach/none", "fastsync.attach/fp16"
MODEL = CostModel(Topology("ring", LINK), {NONE: Host(20e-6, 8e9), FP16: Host(30e-6, 4e9)})
SLOW = replace(MODEL, topology=Topology("ring", Link(latency=300e-6, bandwidth=12.5e6, work=100e-6)))
NUMELS = (1_000, 16_000, 250_000, 1_000_000, 4_000_000)


@pytest.mark.parametrize(
    ("algorithm", "num_ranks", "steps", "volume"),
    [
        (ring, 1, 0, 0),
        (ring, 2, 2, 1),
        (ring, 8, 14, 1.75),
        (tree, 1, 0, 0),
        (tree, 2, 2, 1),
        (tree, 8, 6, 2),
        (tree, 9, 8, 2),
    ],
)
def test_routes(algorithm, num_ranks: int, steps: float, volume: float):
    route = algorithm(num_ranks)
    assert (route.steps, route.volume) == (steps, volume)


def test_a_ring_takes_latency_and_bytes():
    assert LINK.time(ring(4), 1e6) == pytest.approx(6 * 50e-6 + 1.5e6 / 1e9)
    assert LINK.time(ring(1), 1e6) == 0


def test_an_idle_link_lets_a_burst_through_at_once():
    assert LINK.time(ring(2), 1e6, burst=1e5) == pytest.approx(2 * 50e-6 + 0.9e6 / 1e9)
    assert LINK.time(ring(2), 1e4, burst=1e5) == pytest.approx(2 * 50e-6)
    assert MODEL.sync_time(NONE, 1e6, 2, burst=1e5) == pytest.approx(MODEL.sync_time(NONE, 1e6, 2) - 1e5 / 1e9)


def test_crowded_ranks_wait_for_their_turns_on_a_core_and_not_for_the_link():
    link = Link(latency=1.0, bandwidth=10.0, work=0.5)
    assert link.time(ring(2), 20, crowding=3) == pytest.approx(2 * (1.0 + 1.5) + 2.0)
    assert Host(1.0, 10.0).time(20.0, crowding=3) == 9.0


def test_two_levels_are_rings_inside_and_between():
    inner = Link(latency=1e-6, bandwidth=1e11)
    topology = Topology("two-level", LINK, ranks_per_node=8, inner=inner)
    inside = 14 * 1e-6 + 1.75 * 1e8 / 1e11
    between = 6 * 50e-6 + 1.5 * 1e8 / 1e9
    assert topology.time(1e8, 32) == pytest.approx(inside + between)
    assert topology.time(1e8, 8) == pytest.approx(inside)
    assert topology.time(1e8, 2) == pytest.approx(2 * 1e-6 + 1e8 / 1e11)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8"):
        topology.time(1e8, 12)
    with pytest.raises(ValueError, match="the link inside of a node"):
        Topology("two-level", LINK)


def test_local_bytes_are_copies_and_additions():
    assert local_bytes("all_reduce/fp32", 100, 4) == 100 * 3 * 4 * 3 / 4
    assert local_bytes("fastsync.attach/fp16", 100, 1) == 100 * (4 + 2 + 2 + 4)
    assert local_bytes("ddp", 100, 1) == 100 * 16
    assert local_bytes("fastsync.register_comm_hook/none", 100, 1) == 100 * 32
    # Unpack reads four wires; or three of four shards are read and one written; or residuals are, too.
    assert local_bytes("fastsync.attach/fp16+one_shot", 100, 4) == 100 * (4 + 2 + 4 * 2 + 4)
    assert local_bytes("fastsync.attach/fp16+two_shot", 100, 4) == 100 * (4 + 2 + 2 + 2 / 4 + 2 + 4)
    int8 = 132 / 128
    assert local_bytes("fastsync.attach/int8+ef", 100, 2) == pytest.approx(100 * (4 + int8 + 2 * int8 + 4 + 8))
    assert local_bytes("fastsync.attach/int8+ef", 100, 4) == pytest.approx(100 * (8 + int8 * 3.25 + 8 * 1.25))


def test_sums_of_the_engine_take_routes_of_their_own():
    assert route_of("fastsync.attach/fp16", 8, "ring") == ring(8)
    assert route_of("all_reduce/fp16", 8, "tree") == tree(8)
    assert route_of("fastsync.attach/fp16+one_shot", 8, "ring") == Route(1, 7)
    assert route_of("fastsync.register_comm_hook/none+two_shot", 8, "ring") == Route(2, 1.75)
    assert [route_of("fastsync.attach/int8+ef", n, "ring") for n in (2, 4)] == [Route(1, 1), Route(2, 1.5)]
    model = CostModel(Topology("ring", LINK), {"fastsync.attach/int8": Host(0.0, math.inf)})
    sent = 1.5 * 1000 * 132 / 128
    assert model.link_time("fastsync.attach/int8", 1000, 4) == pytest.approx(2 * 50e-6 + sent / 1e9)


def test_ways_that_are_no_single_ring_are_not_covered():
    assert split_way("ddp") == ("ddp", 4)
    assert split_way("all_reduce/bf16") == ("all_reduce", 2)
    assert split_way("fastsync.attach/int8+ef+two_shot") == ("fastsync.attach", 132 / 128)
    uncovered = ("no_sync", "per_parameter", "ddp/powerSGD_hook", "ddp/fp16_compress_hook")
    for way in (*uncovered, "fastsync.attach/fp8", "fastsync.attach/auto"):
        assert split_way(way) is None


def simulated_exposed_time(backward: float, link: float, host: float, num_buckets: int) -> float:
    """Buckets one by one: each is sent when it is ready and the one before has arrived."""
    arrived = 0.0
    for index in range(num_buckets):
        arrived = max(arrived, backward * (index + 1) / num_buckets) + link
    return arrived - backward + num_buckets * host


@pytest.mark.parametrize("num_buckets", [1, 2, 7])
@pytest.mark.parametrize("compute_time", [1e-4, 5e-3, 0.05, 1.0])
def test_overlap_is_that_of_a_simulation(num_buckets: int, compute_time: float):
    job = Job(1_400_000, compute_time, num_buckets)
    link, host = (time(FP16, job.numel / num_buckets, 4) for time in (MODEL.link_time, MODEL.host_time))
    expected = simulated_exposed_time(compute_time * job.backward_share, link, host, num_buckets)
    assert MODEL.exposed_time(FP16, job, 4) == pytest.approx(expected)


def test_efficiency():
    job = Job(1_000_000, compute_time=0.1)
    assert efficiency(job, 0.0) == 1
    exposed = MODEL.exposed_time(NONE, job, 4)
    assert efficiency(job, exposed) == pytest.approx(0.1 / (0.1 + MODEL.sync_time(NONE, 1_000_000, 4)))


def test_the_crossover_is_that_of_the_closed_form():
    job, num_ranks = Job(1_000_000, compute_time=0.1), 4
    more_on_the_wire = 1.5 * (4 - 2) * job.numel
    more_on_the_host = MODEL.host_time(FP16, job.numel, num_ranks) - MODEL.host_time(NONE, job.numel, num_ranks)
    assert more_on_the_host > 0
    crossover = MODEL.crossover(FP16, NONE, job, num_ranks)
    assert crossover == pytest.approx(more_on_the_wire / more_on_the_host)
    for factor, ahead in ((0.5, True), (2.0, False)):
        model = MODEL.over(crossover * factor)
        assert (model.exposed_time(FP16, job, num_ranks) < model.exposed_time(NONE, job, num_ranks)) == ahead


def test_the_crossover_with_overlap_is_where_both_take_as_long():
    job = Job(40_000_000, compute_time=0.3, num_buckets=7)
    crossover = MODEL.crossover(FP16, NONE, job, 16)
    model = MODEL.over(crossover)
    assert 0 < crossover < math.inf
    assert model.exposed_time(FP16, job, 16) == pytest.approx(model.exposed_time(NONE, job, 16))


def test_backward_hides_no_more_of_a_slower_link():
    """10 buckets behind 100 ms of backward: a sync that takes a tenth longer exposes nearly twice as much."""
    job = Job(10_000_000, compute_time=0.15, num_buckets=10)
    model = CostModel(Topology("ring", Link(latency=0.0, bandwidth=78.75e6 / 0.101)), {NONE: Host(0.0, math.inf)})
    link = model.link_time(NONE, 1_000_000, 64)
    assert 10 * link == pytest.approx(0.101)
    exposed, slower = (model.exposed_time(NONE, job, 64, factor) for factor in (1.0, 1.1))
    assert exposed == pytest.approx(10 * link - 0.09)
    assert slower == pytest.approx(11 * link - 0.09)
    assert slower / exposed > 1.86
    assert model.exposed_time(NONE, job, 64, math.inf) == math.inf
    assert model.exposed_time(NONE, job, 64, 0.0) == 0


def test_a_slower_way_pays_below_a_lower_bandwidth():
    job, num_ranks = Job(1_000_000, compute_time=0.1), 4
    found = [MODEL.crossover(FP16, NONE, job, num_ranks, *factors) for factors in ((1.1, 0.9), (1, 1), (0.9, 1.1))]
    assert found == sorted(found)
    assert found[0] < found[1] < found[2]
    assert MODEL.crossover(FP16, NONE, job, num_ranks, 2.5, 1.0) == 0
    assert MODEL.crossover(FP16, NONE, job, num_ranks, 0.1, 1.0) == math.inf


def test_no_crossover():
    job = Job(1_000_000, compute_time=0.1)
    free = replace(MODEL, hosts={NONE: Host(20e-6, 8e9), FP16: Host(20e-6, 8e9)})
    assert free.crossover(FP16, NONE, job, 4) == math.inf
    hopeless = replace(MODEL, hosts={NONE: Host(0.0, 8e9), FP16: Host(1e6, 8e9)})
    assert hopeless.crossover(FP16, NONE, job, 4) == 0


def made_points(model: CostModel, world_sizes: tuple[int, ...], noise: float = 0.0, cores: int = 64) -> list[Point]:
    generator = np.random.default_rng(7)
    points = []
    for way in model.hosts:
        for num_ranks in world_sizes:
            for numel in NUMELS:
                crowded = max(1.0, num_ranks / cores)
                seconds = 1e-3 + model.sync_time(way, numel, num_ranks, crowded)
                factor = 1 + noise * generator.standard_normal()
                points.append(
                    Point(way, numel, num_ranks, seconds * factor, noise * seconds, compute=1e-3, crowding=crowded)
                )
    return points


def test_a_fit_finds_the_parameters_that_made_the_data():
    found = fit_model(made_points(MODEL, (2, 4, 8)), "ring")
    assert found.topology.link.latency == pytest.approx(LINK.latency, rel=1e-3)
    assert found.topology.link.bandwidth == pytest.approx(LINK.bandwidth, rel=1e-3)
    assert found.topology.link.work == 0
    for way, host in MODEL.hosts.items():
        assert found.hosts[way].overhead == pytest.approx(host.overhead, rel=1e-2)
        assert found.hosts[way].bandwidth == pytest.approx(host.bandwidth, rel=1e-3)


@pytest.mark.parametrize(
    "link",
    [
        Topology("ring", Link(latency=30e-6, bandwidth=1e9, work=30e-6)),
        Topology("ring", Link(latency=200e-6, bandwidth=12.5e6, work=200e-6)),
    ],
)
def test_a_fit_at_two_and_four_ranks_tells_eight(link: Topology):
    """Two levels of crowding do not tell waiting from work; where they are alike, nothing is lost."""
    points = made_points(replace(MODEL, topology=link), (2, 4, 8), cores=2)
    fitted = fit(points, link.algorithm, hold_back=(8,))
    assert {held.point.num_ranks for held in fitted.held_back} == {8}
    assert {point.num_ranks for point in fitted.points} == {2, 4}
    assert max(fitted.errors()) < 0.01


def test_a_fit_knows_of_the_burst_of_a_shaped_link():
    burst = 12_500.0
    points = [
        replace(
            point,
            burst=burst,
            seconds=point.compute + SLOW.sync_time(point.way, point.numel, point.num_ranks, burst=burst),
        )
        for point in made_points(SLOW, (2, 4, 8))
    ]
    fitted = fit(points, "ring", hold_back=(8,))
    assert max(fitted.errors()) < 0.01
    unaware = fit([replace(point, burst=0.0) for point in points], "ring", hold_back=(8,))
    assert max(unaware.errors()) > 0.05
    assert points_of([row("all_reduce/fp32", [1.0], link_burst=12_500)])[0].burst == burst


def test_noise_is_averaged_out():
    points = made_points(SLOW, (2, 4, 8), noise=0.03)
    truth = {(point.way, point.numel): point.sync for point in made_points(SLOW, (8,))}
    fitted = fit(points, "ring", hold_back=(8,))
    errors = [abs(held.predicted / truth[held.point.way, held.point.numel] - 1) for held in fitted.held_back]
    assert np.median(errors) < 0.03
    assert max(errors) < 0.1


def test_three_levels_of_crowding_tell_waiting_from_work():
    found = fit_model(made_points(SLOW, (2, 4, 8, 16), cores=2), "ring").topology.link
    assert found.latency == pytest.approx(SLOW.topology.link.latency, rel=0.05)
    assert found.work == pytest.approx(SLOW.topology.link.work, rel=0.05)


def test_a_median_that_is_far_off_hardly_counts():
    points = made_points(MODEL, (2, 4, 8))
    points[7] = replace(points[7], seconds=5 * points[7].seconds)
    assert fit_model(points, "ring").topology.link.bandwidth == pytest.approx(LINK.bandwidth, rel=0.02)


def test_world_sizes_are_held_back_in_turn_or_else_parts_of_the_points():
    by_size = fit(made_points(MODEL, (2, 4, 8)), "ring")
    assert by_size.how == "one world size at a time"
    assert len(by_size.held_back) == len(by_size.points)
    assert max(by_size.errors()) < 0.01
    in_parts = fit(made_points(MODEL, (2, 8)), "ring")
    assert in_parts.how == "in 5 parts"
    assert sorted(held.point.numel for held in in_parts.held_back) == sorted(p.numel for p in in_parts.points)
    assert max(in_parts.errors()) < 0.01


@pytest.mark.parametrize(
    ("points", "hold_back", "message"),
    [
        (made_points(MODEL, (2,)), (), "two world sizes above 1 are needed"),
        (made_points(MODEL, (2, 4)), (4,), "two world sizes above 1 are needed"),
        ([p for p in made_points(MODEL, (2, 4)) if p.numel == 1_000], (), "with two sizes are needed"),
        (
            [p for p in made_points(MODEL, (2, 4)) if p.way == NONE and p.numel < 20_000],
            (),
            "4 points are too few for 4",
        ),
        (made_points(MODEL, (2, 4, 8)), (16,), r"hold_back=\[16\]: there are rows of 2, 4, 8 ranks only"),
        (
            [p for p in made_points(MODEL, (2, 4, 8)) if (p.way == FP16) == (p.num_ranks == 8)],
            (8,),
            "hold_back: nothing left to check",
        ),
        ([], (), "two world sizes above 1 are needed"),
    ],
)
def test_too_little_to_fit_on_is_refused(points: list[Point], hold_back: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        fit(points, "ring", hold_back)


def test_errors_are_those_of_messages_of_about_the_same_size():
    def held(numel: int, error: float) -> HeldBack:
        return HeldBack(Point(NONE, numel, 2, seconds=1.0), 1.0 + error)

    fitted = Fit(MODEL, [], [held(100, 0.5), held(10_000, -0.1), held(20_000, 0.05)], "")
    assert fitted.errors() == pytest.approx([0.5, 0.1, 0.05])
    assert fitted.errors(15_000) == pytest.approx([0.1, 0.05])
    assert fitted.errors(10**9) == pytest.approx([0.1, 0.05])
    assert fitted.errors(1) == pytest.approx([0.5])


def test_errors_are_those_of_the_sync_without_the_compute_around_it():
    held = HeldBack(Point(NONE, 100, 2, seconds=1.1, compute=1.0), predicted=0.15)
    assert held.error == pytest.approx(0.5)
    lost = HeldBack(Point(NONE, 100, 2, seconds=0.9, compute=1.0), predicted=0.15)
    assert lost.error == math.inf


def test_each_way_is_spread_over_the_parts():
    """A part with both points of one size would leave a way of two sizes with one."""
    points = [point for point in made_points(MODEL, (2, 4)) if point.numel in NUMELS[:2] or point.way == NONE]
    fitted = fit(points, "ring")
    assert len(fitted.held_back) == len(points)
    assert max(fitted.errors()) < 0.01


def row(way: str, samples: list[float], correct: bool = True, **settings: object) -> Record:
    known = {"size": "1MiB", "numel": 2**18, "world_size": 4, "backend": "gloo"}
    return Record("sync", way, known | settings, {}, correct, samples, {"cores": 2, "gpu": None})


def test_points_are_medians_of_correct_rows_less_the_step_without_sync():
    rows = [
        row("no_sync", [0.1, 0.2, 0.3]),
        row(NONE, [1.0, 2.0, 3.0]),
        row("all_reduce/fp32", [0.5]),
        row(FP16, [1.0], correct=False),
        row("ddp/powerSGD_hook", [1.0]),
        row("ddp", [1.0], world_size=1),
        row(NONE, [1.0], size="2MiB"),  # without its no_sync
    ]
    ours, bare = points_of(rows)
    assert (ours.way, ours.numel, ours.num_ranks, ours.seconds, ours.compute) == (NONE, 2**18, 4, 2.0, 0.2)
    assert ours.crowding == 2
    spreads = math.hypot(2.8 - 1.2, 0.28 - 0.12)
    assert ours.error == pytest.approx(math.sqrt(math.pi / 2) * spreads / 2.563 / math.sqrt(3))
    assert (bare.way, bare.compute) == ("all_reduce/fp32", 0.0)


def test_rows_go_with_the_step_without_sync_of_their_own_run():
    def run(time: str, compute: float) -> list[Record]:
        rows = [row("no_sync", [compute]), row(NONE, [compute + 1.0])]
        return [replace(one, environment={**one.environment, "time": time}) for one in rows]

    points = points_of([*run("10:00", 0.1), *run("11:00", 0.5)])
    assert [point.compute for point in points] == [0.1, 0.5]
    assert [point.sync for point in points] == pytest.approx([1.0, 1.0])


def test_the_error_of_a_point_is_also_that_of_the_step_without_sync():
    point = points_of([row("no_sync", [0.1, 0.2, 0.3]), row(NONE, [1.0, 1.0, 1.0])])[0]
    assert point.error == pytest.approx(math.sqrt(math.pi / 2) * (0.28 - 0.12) / 2.563 / math.sqrt(3))


def test_points_know_whether_they_are_oversubscribed():
    ranks = [row(NONE, [1.0], world_size=2), row(NONE, [1.0], world_size=4), row(NONE, [1.0], oversubscribed=True)]
    gpu = replace(ranks[2], environment={"cores": 2, "gpu": "H200"})
    alone = [row("no_sync", [0.1], world_size=size) for size in (2, 4)]
    points = points_of([*alone, *ranks, gpu])
    assert [point.oversubscribed for point in points] == [False, True, True, True]


def test_crowding_is_ranks_by_cores():
    assert crowding(row("ddp", [1.0], world_size=2)) == 1
    assert crowding(row("ddp", [1.0], world_size=8)) == 4
    assert crowding(replace(row("ddp", [1.0], world_size=8), environment={"cores": 2, "gpu": "H200"})) == 1
