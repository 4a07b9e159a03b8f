"""``python -m benchmarks link``: namespaces, shaped links, ranks in them, and that none of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.link import sent_bytes, slow_links, with_link
from benchmarks.harness.records import Record, read_json
from benchmarks.network.namespaces import CONGESTION_CONTROL, burst
from tests.benchmarks.test_commands import ROOT
from tests.forked import until

pytestmark = pytest.mark.end_to_end

needs_namespaces = pytest.mark.usefixtures("namespaces")


def started_by(pid: int, command: str) -> list[int]:
    """The processes that one has started with such a command."""
    try:
        threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        children = [child for of_thread in threads for child in of_thread]
        return [int(child) for child in children if command in Path(f"/proc/{child}/cmdline").read_text().split("\0")]
    except (FileNotFoundError, ProcessLookupError):  # one has ended meanwhile
        return started_by(pid, command) if Path(f"/proc/{pid}").exists() else []


RANK, KEEPER = "--multiprocessing-fork", "cat"


@needs_namespaces
def test_sync_runs_over_links(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ("--ranks", "2", "--sizes", "5k", "--methods", "ddp", "--repetitions", "3", "--rate", "100mbit", "1gbit")
    assert main(["link", *options, "--json", str(tmp_path / "rows.json")]) == 0
    said = capfd.readouterr().out
    rows = read_json(tmp_path / "rows.json")
    methods = ["no_sync", "all_reduce/fp32", "ddp"]
    expected = [(rate, method) for rate in (10**8, 10**9) for method in methods]
    assert [(row.settings["link"], row.method) for row in rows] == expected
    for row in rows:
        assert row.correct
        assert len(row.samples) == 3
        assert row.settings["link_burst"] == burst(row.settings["link"])
        assert row.environment["congestion_control"] == CONGESTION_CONTROL
    assert "links of 100 Mbit/s" in said
    assert started_by(os.getpid(), KEEPER) == []


@needs_namespaces
def test_hosts_of_several_ranks_send_one_sum(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ("--rate", "1gbit", "--ranks", "4", "--ranks-per-host", "2", "--benchmark", "ddp", "--models", "mlp")
    rest = ("--batch-size", "4", "--repetitions", "2", "--methods", "ddp", "fastsync.attach/bf16")
    assert main(["link", *options, *rest, "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row.method: row for row in read_json(tmp_path / "rows.json")}
    numel = rows["ddp"].settings["numel"]
    assert all(row.correct and row.settings["ranks_per_host"] == 2 for row in rows.values())
    assert rows["ddp"].figures["sent_bytes"] == 1.5 * 4 * numel
    assert rows["fastsync.attach/bf16"].figures["sent_bytes"] == 2 * numel
    assert rows["fastsync.attach/bf16"].figures["wire_bytes"] < 2 * numel  # half of it, and extras
    assert rows["no_ddp"].figures["sent_bytes"] is None
    assert "2 on a host" in capfd.readouterr().out


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_whatever_ends_it_nothing_stays_but_the_rows(tmp_path: Path, number: signal.Signals):
    """It soon has rows of a first size, and the second would take minutes."""
    options = ("--ranks", "2", "--methods", "ddp", "--repetitions", "3", "--rate", "10mbit", "--sizes", "5k", "12m")
    command = (sys.executable, "-m", "benchmarks", "link", *options, "--json", "rows.json")
    environment, rows = os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path / "rows.json"
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: (rows.exists() and read_json(rows)) or process.poll() is not None, "the first size")
        keepers, ranks = started_by(process.pid, KEEPER), started_by(process.pid, RANK)
        process.send_signal(number)
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    assert (len(keepers), len(ranks)) == (3, 2)  # two hosts and the bridge
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*keepers, *ranks)), "the end of all processes")
    assert [row.settings["size"] for row in read_json(rows)] == ["5k"] * 3
    if number == signal.SIGINT:
        assert process.returncode == 130, err
        assert "rows measured before are shown" in out
        assert "Traceback" not in err


def row(method: str, wire: str | None, seconds: float) -> Record:
    settings = {"wire": wire, "numel": 10**6, "world_size": 4}
    return Record("sync", method, settings, {"error": None}, True, [seconds], {"cores": 2})


def test_what_a_link_says_of_a_row():
    rows = [row("no_sync", None, 0.01), row("ddp", "float32", 0.06), row("fastsync.attach/fp16", "float16", 0.03)]
    no_sync, ddp, fp16 = with_link(rows, 10**9)
    # 2 · 3/4 · 4 MB are 48 Mbit.
    assert ddp.figures["sent_bytes"] == 6e6
    assert ddp.figures["link_limit"] == pytest.approx(0.048)
    assert ddp.figures["over_link_limit"] == pytest.approx(0.06 / 0.048)
    assert fp16.figures["link_limit"] == pytest.approx(0.024)
    assert fp16.figures["ddp_over_this"] == pytest.approx(2.0)
    assert [no_sync.figures[name] for name in ("link_limit", "over_link_limit", "ddp_over_this")] == [None] * 3
    assert all(record.settings["oversubscribed"] for record in (no_sync, ddp, fp16))
    enough = replace(rows[1], environment={"cores": 4})
    assert "oversubscribed" not in next(with_link([enough], 10**9)).settings
    wrong = replace(rows[1], samples=[])
    assert next(with_link([wrong], 10**9)).figures["over_link_limit"] is None


def test_links_that_the_machine_cannot_fill_are_named():
    def rows(rate: int, seconds: float, numel: int = 10**8) -> list[Record]:
        bare = row("all_reduce/fp32", "float32", seconds)
        return list(with_link([replace(bare, settings=bare.settings | {"numel": numel})], rate))

    # 4.8 Gbit; of a few values latency is the most, whatever the machine is.
    (warning,) = slow_links([*rows(10**9, 5.2), *rows(10**10, 1.2), *rows(10**9, 1.0, numel=1000)])
    assert "At 10 Gbit/s the bare all_reduce took 2.50 × the link's limit" in warning


def test_what_is_sent_depends_on_who_adds():
    """A million values between four ranks."""
    assert sent_bytes(row("fastsync.attach/fp16+one_shot", "float16", 1.0)) == 3 * 2e6
    assert sent_bytes(row("fastsync.attach/fp16+two_shot", "float16", 1.0)) == 1.5 * 2e6
    # A reduce-scatter sends half of what a ring does.
    assert sent_bytes(row("fully_shard/fp32", "float32", 1.0)) == 3e6
    assert sent_bytes(row("fastsync.register_comm_hook/int8+ef", "int8", 1.0)) == 1.5 * 132 / 128 * 1e6
