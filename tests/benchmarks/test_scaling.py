"""Scaling: efficiency and breakdown of known times, machines, refusals, and real launches of tiny steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from benchmarks.__main__ import main
from benchmarks.baselines.ways import TrainingStep, Way
from benchmarks.commands import scaling
from benchmarks.commands.ddp import PARTS
from benchmarks.harness.records import Record, read_json
from benchmarks.harness.scaling_launch import Launch, _sweep, _train, compute_figures
from benchmarks.network.coordination import Coordinator
from benchmarks.network.hosts import Capacity, Host, check_capacity, own_capacity, own_index, place, read_hostfile
from benchmarks.report.efficiency import baseline, overhead, points, sweep
from fastsync.launch.torchrun import Nodes
from tests.benchmarks.rows import all_reduce_row, step_row
from tests.ppo.test_launch_torchrun import free_port
from tests.ranks import run_ranks

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
TINY = ("--ways", "fastsync.attach/none", "--model", "mlp", "--batch-size", "2", "--steps", "2", "--warmup", "2")
TINY += ("--sweep", "1024", "--sweep-repetitions", "2")
LIMIT = 300.0  # seconds that commands have, whose processes all import torch, on however busy a machine


# What follows from times.


def test_weak_efficiency_is_the_time_of_one_rank_over_that_of_n():
    rows = [step_row(n, [step] * 3, launch=launch) for n, step in ((1, 1.0), (2, 1.25), (4, 2.0)) for launch in (0, 1)]
    found = points(rows)
    assert [point.world_size for point in found] == [1, 2, 4]
    assert [point.efficiency for point in found] == [1.0, 0.8, 0.5]
    assert [(point.efficiency_low, point.efficiency_high) for point in found] == [(1, 1), (0.8, 0.8), (0.5, 0.5)]
    assert [point.launches for point in found] == [2, 2, 2]


def test_strong_efficiency_is_that_of_constant_work():
    rows = [step_row(n, [step] * 3, scaling="strong") for n, step in ((1, 1.0), (2, 0.5), (4, 0.5))]
    assert [point.efficiency for point in points(rows)] == [1.0, 1.0, 0.5]


def test_efficiency_is_relative_to_the_smallest_world_size():
    strong = [step_row(n, [step] * 3, scaling="strong") for n, step in ((4, 1.0), (8, 0.625))]
    assert [point.efficiency for point in points(strong)] == [1.0, 0.8]
    assert [point.contention for point in points(strong)] == [None, None]
    weak = [step_row(n, [step] * 3) for n, step in ((8, 1.25), (2, 1.0))]
    assert [(point.world_size, point.efficiency) for point in points(weak)] == [(2, 1.0), (8, 0.8)]


def test_all_ways_are_relative_to_the_fastest():
    rows = [
        step_row(n, [step] * 3, way=way)
        for way, steps in (("ddp", (1.25, 2.0)), ("fastsync.attach/none", (1.0, 1.6)))
        for n, step in zip((1, 2), steps, strict=True)
    ]
    found = points(rows)
    assert [(point.way, point.efficiency) for point in found] == [
        ("ddp", 0.8),
        ("ddp", 0.5),
        ("fastsync.attach/none", 1.0),
        ("fastsync.attach/none", 0.625),
    ]
    assert baseline(found) is found[2]


def test_intervals_are_over_launches():
    """Launches of 1.0 to 1.2 s and 2.0 to 2.4 s; within a launch all steps are alike."""
    rows = [
        step_row(n, [n * factor] * 100, launch=launch) for launch, factor in enumerate((1.0, 1.1, 1.2)) for n in (1, 2)
    ]
    point = points(rows)[1]
    assert point.samples == (2.0, 2.2, 2.4)
    assert (point.step, point.step_low, point.step_high) == (2.2, 2.0, 2.4)
    assert point.efficiency == 0.5
    assert (point.efficiency_low, point.efficiency_high) == pytest.approx((1.0 / 2.4, 1.2 / 2.0))


def test_the_parts_of_a_step_add_up_to_it():
    rows = [
        step_row(n, [step + 0.01 * launch] * 3, launch=launch, compute=compute, stragglers=stragglers, scaling=kind)
        for kind in ("weak",)
        for n, step, compute, stragglers in ((1, 1.0, 0.75, 0.0), (2, 1.7, 0.9, 0.2), (4, 1.1, 1.0, 0.3))
        for launch in range(3)
    ]
    one, two, four = points(rows)
    for point in (one, two, four):
        assert point.contention is not None
        assert point.compute == 0.75
        assert point.compute + point.contention + point.stragglers + point.exposed == pytest.approx(
            point.step, rel=1e-12
        )
    assert (one.contention, one.stragglers) == (0.0, 0.0)
    assert (two.contention, two.stragglers) == (pytest.approx(0.15), 0.2)
    assert two.exposed == pytest.approx(1.71 - 0.75 - 0.15 - 0.2)
    assert four.exposed < 0  # noise, which is shown as what it is


def test_in_strong_scaling_a_fair_share_of_compute_is_its_nth_part():
    rows = [
        step_row(1, [1.0] * 3, compute=0.75, scaling="strong"),
        step_row(2, [0.8] * 3, compute=0.5, scaling="strong"),
    ]
    point = points(rows)[1]
    assert (point.compute, point.contention) == (0.375, 0.125)


def test_without_world_size_1_contention_is_part_of_compute():
    (point, _) = points([step_row(2, [1.0] * 3, compute=0.5), step_row(4, [1.0] * 3)])
    assert (point.compute, point.contention) == (0.5, None)
    assert point.compute + point.stragglers + point.exposed == pytest.approx(point.step, rel=1e-12)


def test_rows_of_several_jobs_are_not_held_against_each_other():
    rows = [step_row(1, [1.0] * 3), step_row(2, [1.25] * 3)]
    strong = [step_row(n, [1.0] * 3, scaling="strong") for n in (1, 2)]
    with pytest.raises(ValueError, match=r"several jobs, weak scaling of mlp .* 8 samples a rank over gloo; strong"):
        points([*rows, *strong])
    for name, value in {"model": "gpt2", "scale": "full", "batch_size": 9, "backend": "nccl", "numel": 11}.items():
        other = replace(rows[1], settings={**rows[1].settings, name: value})
        with pytest.raises(ValueError, match="the rows are of several jobs"):
            points([rows[0], other])
    assert [point.world_size for point in points(strong)] == [1, 2]


def test_a_point_is_oversubscribed_if_one_of_its_launches_is():
    rows = [step_row(2, [1.0], launch=launch, oversubscribed=launch == 1) for launch in range(2)]
    assert points(rows)[0].oversubscribed


def test_what_is_wrong_makes_no_point():
    rows = [step_row(1, [1.0] * 3), step_row(2, [], correct=False), step_row(2, [1.0], correct=False, launch=1)]
    assert [point.world_size for point in points(rows)] == [1]
    assert points([]) == []


def test_compute_is_the_mean_of_the_ranks_and_stragglers_are_what_the_slowest_takes_more():
    of_rank = [[1.0, 1.0, 9.0], [1.0, 3.0, 9.0]]
    assert compute_figures(of_rank) == {"compute": 2.0, "stragglers": 0.0}
    assert compute_figures([[1.0, 1.0], [4.0, 2.0], [1.0, 3.0]]) == {"compute": 2.0, "stragglers": 1.5}


def test_bandwidths_are_those_of_nccl_tests():
    (point,) = sweep([all_reduce_row(4, 1000, [0.4, 0.5, 0.8])])
    assert (point.algbw, point.busbw) == (2000.0, 3000.0)
    assert (point.busbw_low, point.busbw_high) == (1875.0, 3750.0)


def test_the_overhead_is_the_median_of_the_launches():
    assert overhead([step_row(1, [1.0])]) == 1e-6
    assert overhead([]) is None


# Machines.


def test_a_hostfile(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# the first\nnode-a slots=2\n\n  node-b.cluster   slots=8  # the other\n")
    assert read_hostfile(file) == [Host("node-a", 2), Host("node-b.cluster", 8)]


@pytest.mark.parametrize(
    "line", ["b", "b slots=", "b slots=0", "b slots=two", "b c slots=2", "slots=2", "b slots=2 max=4"]
)
def test_the_line_of_a_hostfile_that_is_wrong_is_named(tmp_path: Path, line: str):
    file = tmp_path / "hosts"
    file.write_text(f"a slots=2\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"hosts, line 3: '{line}' is no machine; write: name slots=N"):
        read_hostfile(file)


def test_a_hostfile_without_machines_is_refused(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match="hosts names no machine"):
        read_hostfile(file)


def test_a_machine_finds_itself_by_its_name():
    hosts = [Host("a", 2), Host("b", 2), Host("b", 2)]
    assert own_index(hosts, {"a", "a.cluster"}) == 0
    with pytest.raises(ValueError, match=r"no line .* name of this machine \(c\); .* --node-rank"):
        own_index(hosts, {"c"})
    with pytest.raises(ValueError, match=r"several lines .* --node-rank"):
        own_index(hosts, {"b"})


def test_a_world_size_takes_the_first_machines_that_hold_it():
    hosts = [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert [place(hosts, size) for size in (1, 2, 3, 6, 7)] == [[1], [2], [2, 1], [2, 4], [2, 4, 1]]
    with pytest.raises(ValueError, match="world size 8 needs 8 slots and the hostfile has 7"):
        place(hosts, 8)


def test_more_ranks_than_cores_are_refused_or_marked():
    cores = Capacity(2, "cores that it may use", can_be_exceeded=True)
    assert not check_capacity("a", cores, 2, 2, oversubscribe=False)
    assert check_capacity("a", cores, 3, 4, oversubscribe=True)
    with pytest.raises(ValueError, match=r"world size 4 puts 3 ranks on a, which has 2 cores .* --oversubscribe"):
        check_capacity("a", cores, 3, 4, oversubscribe=False)
    assert own_capacity("cpu").ranks == len(os.sched_getaffinity(0))


def test_more_ranks_than_gpus_are_refused():
    gpus = Capacity(1, "GPUs", can_be_exceeded=False)
    with pytest.raises(ValueError, match=r"puts 2 ranks on a, which has 1 GPUs, .* --device cpu"):
        check_capacity("a", gpus, 2, 2, oversubscribe=True)
    assert own_capacity("cuda").ranks == torch.cuda.device_count()


# The command, with launches that are made up.

Launcher = Callable[[Sequence[list[Record] | BaseException]], list[tuple[int, Launch]]]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """On a machine of two cores, launches that end as told, one after the other; what each was to measure."""
    monkeypatch.setattr(scaling, "own_capacity", lambda device: Capacity(2, "cores that it may use", True))

    def prepare(endings: Sequence[list[Record] | BaseException]) -> list[tuple[int, Launch]]:
        launched: list[tuple[int, Launch]] = []

        def launch(fn: object, nproc: int, work: Launch, *, nodes: Nodes, stop_timeout: float) -> list[list[Record]]:
            del fn, nodes, stop_timeout
            launched.append((nproc, work))
            ending = endings[len(launched) - 1]
            if isinstance(ending, BaseException):
                raise ending
            return [ending] * nproc

        monkeypatch.setattr(scaling, "launch_ranks", launch)
        return launched

    return prepare


def test_world_sizes_take_turns_and_rows_say_what_they_are_of(tmp_path: Path, launcher: Launcher):
    launched = launcher([[step_row(n, [1.0], scaling="strong")] for n in (1, 2, 4)] * 2)
    options = ("--world-sizes", "4,1,2", "--repetitions", "2", "--batch-size", "8", "--strong", "--oversubscribe")
    options += ("--step-timeout", "7")
    assert main(["scaling", *options, "--report", str(tmp_path / "report")]) == 0
    assert {work.timeout for _, work in launched} == {7.0}
    assert [nproc for nproc, _ in launched] == [1, 2, 4, 1, 2, 4]
    assert [work.batch_size for _, work in launched] == [8, 4, 2, 8, 4, 2]
    assert [work.seed for _, work in launched] == [0, 0, 0, 1, 1, 1]
    rows = read_json(tmp_path / "report/rows.json")
    assert [row.settings["launch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert {row.settings["scaling"] for row in rows} == {"strong"}
    assert [row.settings.get("oversubscribed", False) for row in rows] == [False, False, True] * 2
    markdown = (tmp_path / "report/report.md").read_text()
    assert "Strong scaling of mlp, 8 samples in all" in markdown
    assert "--world-sizes 4,1,2" in markdown


@pytest.mark.parametrize(
    ("ending", "status", "note"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SignalException("", signal.SIGINT), 130, "interrupted"),
        (SignalException("", signal.SIGTERM), 143, "interrupted"),
        (ChildFailedError("x", {1: ProcessFailure(1, 7, 1, "/nowhere")}), 1, "rank 1 failed first"),
        ([step_row(2, [], correct=False)], 1, "WRONG: ddp at"),
    ],
)
def test_whatever_ends_it_the_report_of_what_there_is_is_written(
    tmp_path: Path,
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    ending: list[Record] | BaseException,
    status: int,
    note: str,
):
    launcher([[step_row(1, [1.0])], ending])
    folder = tmp_path / "report"
    assert main(["scaling", "--world-sizes", "1", "2", "--repetitions", "1", "--report", str(folder)]) == status
    assert len([row for row in read_json(folder / "rows.json") if row.correct]) == 1
    assert note in capsys.readouterr().out
    for name in ("report.md", "index.html"):
        assert note in (folder / name).read_text()


def test_our_own_bugs_are_shown_as_such(tmp_path: Path, launcher: Launcher):
    launcher([[step_row(1, [1.0])], ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        main(["scaling", "--world-sizes", "1", "2", "--report", str(tmp_path)])
    assert len(read_json(tmp_path / "rows.json")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-sizes", "4"), "world size 4 puts 4 ranks on this machine, which has 2 cores that it may use"),
        (("--world-sizes", "1,2,4"), "--oversubscribe"),
        (("--world-sizes", "0"), "each from 1 on"),
        (("--world-sizes",), "name at least one"),
        (("--world-sizes", "two"), "two"),
        (("--world-sizes", "2", "3", "--strong", "--batch-size", "64"), "batch_size=64 cannot be shared by 3 ranks"),
        (("--steps", "0"), "steps=0 must be at least 1"),
        (("--repetitions", "0"), "repetitions=0 must be at least 1"),
        (("--warmup", "1"), "warmup=1 must be at least 2"),
        (("--sweep", "2"), "the smallest is 4 bytes"),
        (("--master-port", "0"), "master_port=0: ports are from 1 to 65535"),
        (("--master-port", "70000"), "master_port=70000: ports are from 1 to 65535"),
        (("--master-port", "65530", "--hostfile", "HOSTS"), "this takes those up to 65536"),
        (("--timeout", "-1"), "timeout=-1.0 must be more than 0 seconds"),
        (("--step-timeout", "0"), "step_timeout=0.0 must be more than 0 seconds"),
        (("--ways",), "ways: choose at least one of"),
        (("--ways", "all_reduce/fp32"), "all_reduce/fp32"),
        (("--ways", "ddp/bf16_compress_hook", "--device", "cpu"), "PyTorch refuses it on gloo"),
        (("--hostfile", "nowhere"), "hostfile=nowhere: there is no such file"),
        (("--node-rank", "0"), "name it with --hostfile"),
        (("--hostfile", "HOSTS", "--node-rank", "2"), "node_rank=2 must be from 0 to 1"),
        (("--hostfile", "HOSTS", "--node-rank", "0", "--world-sizes", "9"), "needs 9 slots and the hostfile has 8"),
        (("--report", "HOSTS"), "is a file"),
        (("--model", "gpt2", "--device", "cpu"), "model gpt2 takes about"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    launched = launcher([])
    monkeypatch.setattr("benchmarks.harness.memory.available", lambda: 2**26)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    Path("HOSTS").write_text("a slots=4\nb slots=4\n")
    try:
        status = main(["scaling", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert launched == []
    assert [path.name for path in tmp_path.iterdir()] == ["HOSTS"]


def test_samples_of_a_rank():
    weak = scaling.Options(world_sizes=(1, 2, 3), batch_size=12)
    strong = scaling.Options(world_sizes=(1, 2, 3), batch_size=12, strong=True)
    assert [weak.samples(size) for size in (1, 2, 3)] == [12, 12, 12]
    assert [strong.samples(size) for size in (1, 2, 3)] == [12, 6, 4]
    by_default = scaling.Options(world_sizes=(2, 3), strong=True)
    assert [by_default.samples(size) for size in (2, 3)] == [256 * 3, 256 * 2]


class OtherMachine(Coordinator):
    """Machine 0 of two, the other of which says what it is told to."""

    def __init__(self, **other: object) -> None:
        self._other = other

    def gather(self, topic: str, value: list) -> list[list]:
        refusal, oversubscribed, same = value
        other = self._other
        changed = same | {name: text for name, text in other.items() if name in same}
        return [value, [other.get("refusal", refusal), other.get("oversubscribed", oversubscribed), changed]]


def test_machines_agree_before_anything_starts(tmp_path: Path, launcher: Launcher):
    launcher([])
    (tmp_path / "hosts").write_text("a slots=3\nb slots=1\n")
    options = scaling.Options(
        world_sizes=(1, 3, 4), hostfile=tmp_path / "hosts", node_rank=0, report=tmp_path / "r", oversubscribe=True
    )
    plan = scaling.make_plan(options)
    assert plan.placed == {1: [1], 3: [3], 4: [3, 1]}
    assert scaling.agree(options, plan, OtherMachine()) == {3, 4}
    assert scaling.agree(options, plan, OtherMachine(oversubscribed=[1])) == {1, 3, 4}
    with pytest.raises(ValueError, match=r"^b is too small$"):
        scaling.agree(options, plan, OtherMachine(refusal="b is too small"))
    with pytest.raises(
        ValueError, match=r"^batch_size is None on a and 7 on b; start the same command on all machines$"
    ):
        scaling.agree(options, plan, OtherMachine(batch_size="7"))
    with pytest.raises(ValueError, match=r"^hostfile is a slots=3, b slots=1 on a and a slots=4 on b; "):
        scaling.agree(options, plan, OtherMachine(hostfile="a slots=4"))


# Real launches.


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a session of its own, as a terminal would have it."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "scaling", *TINY, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_of_session(session: int) -> list[str]:
    """The processes that still run in it, without those that have ended and whom init has not taken notice of."""
    command = ["ps", "-s", str(session), "-o", "stat=,pid=,args="]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in found.splitlines() if not line.startswith("Z")]


@pytest.mark.timeout(2 * LIMIT)
def test_scaling_from_the_command_line_on_two_machines(tmp_path: Path):
    """World size 1 takes the first machine alone, while the other waits for world size 2."""
    (tmp_path / "hosts").write_text("localhost slots=1\nlocalhost slots=1\n")
    options = (
        "--world-sizes",
        "1",
        "2",
        "--repetitions",
        "1",
        "--hostfile",
        "hosts",
        "--master-port",
        str(free_port()),
    )
    machines = [start(tmp_path, *options, "--node-rank", str(rank), "--report", f"report{rank}") for rank in (0, 1)]
    said = [machine.communicate(timeout=LIMIT)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    assert "Weak scaling of mlp (small), 2 samples a rank" in said[0]
    assert not (tmp_path / "report1").exists()
    rows = json.loads((tmp_path / "report0/rows.json").read_text())
    assert [(row["way"], row["settings"]["world_size"], row["settings"]["nodes"]) for row in rows] == [
        ("no_ddp", 1, 1),
        ("fastsync.attach/none", 1, 1),
        ("no_ddp", 2, 2),
        ("fastsync.attach/none", 2, 2),
        ("all_reduce/fp32", 2, 2),
    ]
    for row in rows:
        assert row["correct"]
        assert len(row["samples"]) == 2
        assert min(row["samples"]) > 0
        assert row["environment"]["torch"] == torch.__version__
    assert all(row["figures"]["overhead"] > 0 for row in rows[:4])
    assert rows[4]["settings"]["size"] == 1024
    page = (tmp_path / "report0/index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 3


@pytest.mark.timeout(2 * LIMIT)
def test_ctrl_c_leaves_a_report_and_no_process(tmp_path: Path):
    process = start(tmp_path, "--world-sizes", "1", "--repetitions", "1000", "--report", "report")
    rows = tmp_path / "report/rows.json"
    deadline = time.monotonic() + LIMIT
    while not (rows.exists() and len(read_json(rows)) >= 2):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no launch has ended"
        time.sleep(0.1)
    time.sleep(1)  # into the next launch
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT / 3)
    assert process.returncode == 130, said
    deadline = time.monotonic() + LIMIT / 3
    while left := left_of_session(process.pid):  # the kernel may be slow to take down what has ended
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert "interrupted; launches before are reported" in said
    kept = read_json(rows)
    assert len(kept) >= 2
    page = (tmp_path / "report/index.html").read_text()
    assert "interrupted; launches before are reported" in page
    assert page.count("data:image/svg+xml;base64,") == 2  # there is no all_reduce on one rank


def sweep_in_a_launch(rank: int, world_size: int) -> list[Record]:
    del rank, world_size
    launch = Launch("mlp", "small", (), 2, 2, 2, sweep=(64, 4096), sweep_repetitions=3, seed=0)
    return list(_sweep(launch, torch.device("cpu"), {}))


def test_the_sweep_is_checked_and_timed():
    first, *others = run_ranks(sweep_in_a_launch, 3)
    assert others == [first, first]
    assert [(row.settings["size"], row.settings["numel"], len(row.samples)) for row in first] == [
        (64, 16, 3),
        (4096, 1024, 3),
    ]
    for row in first:
        assert row.correct
        assert row.figures["busbw"] == pytest.approx(4 / 3 * row.figures["algbw"])
        assert row.figures["algbw"] == pytest.approx(row.settings["size"] / row.quantiles["median"])


def measure_with_a_wrong_way(rank: int, world_size: int) -> list[Record]:
    del rank, world_size
    PARTS["wrong"] = Way(lambda gradients, group: TrainingStep(gradients.model()))
    launch = Launch("mlp", "small", ("wrong", "cat"), 2, 2, 2, sweep=(), sweep_repetitions=2, seed=0)
    return list(_train(launch, torch.device("cpu")))


def test_a_wrong_way_is_not_timed():
    first, second = run_ranks(measure_with_a_wrong_way, 2)
    assert first == second
    assert [(row.way, row.correct, len(row.samples)) for row in first] == [
        ("no_ddp", True, 2),
        ("wrong", False, 0),
        ("cat", True, 2),
    ]
