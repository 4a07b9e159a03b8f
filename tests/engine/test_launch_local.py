"""``fastsync launch local``: ranks on this host that live when another is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import PrefixStore

from fastsync.cli import main
from fastsync.elastic.elastic import _warn_of_agent
from fastsync.elastic.members_store import KEYS_OF_FIRST, STORE
from fastsync.elastic.membership import Membership
from fastsync.launch.supervisor import Supervisor


def test_a_replacement_has_the_local_rank_of_the_one_before() -> None:
    with patch("fastsync.launch.supervisor.start_processes") as start:
        supervisor = Supervisor("train.py", [], 2, command="fastsync launch local", place="Elastic", replaces=True)
        for rank in range(2):
            supervisor._start({"RANK": rank, "LOCAL_RANK": rank})
        with patch.object(Supervisor, "_newest", lambda self: Membership(0, {0: 0, 1: 0}, {})):
            for lost in (1, 2):
                assert supervisor._goes_on_without(lost, 1, since=0.0, is_done=False)
    assert [call.args[3][0]["LOCAL_RANK"] for call in start.call_args_list] == ["0", "1", "1", "1"]


def test_its_store_listens_to_this_host_alone() -> None:
    store = Supervisor("train.py", [], 2, command="fastsync launch local", place="Elastic")._store
    tables = "".join(Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    listening = {line.split()[1] for line in tables.splitlines() if line.split()[3] == "0A"}
    loopback = f"{int.from_bytes(bytes([127, 0, 0, 1]), sys.byteorder):08X}"
    assert {each for each in listening if each.endswith(f":{store.port:04X}")} == {f"{loopback}:{store.port:04X}"}


@pytest.mark.parametrize(("set_by_local", "num_ranks", "warns"), [(False, "2", 1), (True, "2", 0), (False, "1", 0)])
def test_ranks_that_an_agent_would_end_together(
    set_by_local: bool, num_ranks: str, warns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": num_ranks}
    for name, value in (variables | ({STORE: "127.0.0.1:1"} if set_by_local else {})).items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _warn_of_agent()
    assert len(caught) == warns


def test_only_stopped_ranks_are_left_behind() -> None:
    """Another that is no member any more ends by itself, and may have a file to write."""
    supervisor = Supervisor("train.py", [], 2, command="fastsync launch local", place="Elastic", replaces=True)
    store = PrefixStore(KEYS_OF_FIRST, supervisor._store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        supervisor._running = {1: (SimpleNamespace(pids=lambda: {0: process.pid}), 0.0)}
        store.set("newest", Membership(1, {0: 7}, {}).to_json())
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not supervisor._are_left_behind(), "it may join yet"
        store.set("process/1", "1")
        assert supervisor._are_left_behind()
        with patch.object(supervisor, "_start") as start:
            assert supervisor._goes_on_without(0, 1, since=0.0, is_done=True)
        start.assert_not_called()
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not supervisor._are_left_behind()
        store.set("newest", Membership(1, {0: 7, 1: 7}, {}).to_json())
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not supervisor._are_left_behind(), "the others still wait for it"
        os.kill(process.pid, signal.SIGKILL)


def test_replacements_that_no_rank_is_left_to_take_in_are_too_late() -> None:
    supervisor = Supervisor("train.py", [], 2, command="fastsync launch local", place="Elastic", replaces=True)
    store = PrefixStore(KEYS_OF_FIRST, supervisor._store)
    rank: Any = (SimpleNamespace(pids=lambda: {0: os.getpid()}), 0.0)
    supervisor._num_started = 4
    for process in (0, 1):
        store.set(f"process/{process}", str(process))
    store.set("newest", Membership(1, {0: 7, 1: 7}, {}).to_json())
    supervisor._running = {1: rank, 2: rank}
    assert not supervisor._are_too_late(), "rank 1 may take the other in"
    supervisor._running = {2: rank, 3: rank}
    assert supervisor._are_too_late()
    with patch.object(supervisor, "_start") as start:
        supervisor._goes_on_without(1, 1, since=0.0, is_done=False)
    start.assert_not_called()
    store.set("newest", Membership(2, {1: 7, 2: -1}, {}).to_json())
    assert not supervisor._are_too_late(), "one of them is taken in, and goes on alone"
    store.set("process/3", "2")
    assert not supervisor._are_too_late()
    store.set("newest", Membership(3, {1: 7}, {}, is_over=True).to_json())
    supervisor._running = {2: rank}
    assert supervisor._are_too_late()


@pytest.mark.parametrize("have_met", [False, True])
@pytest.mark.parametrize("ends", [["-", "5"], ["-", "-9"], ["5", "-"], ["-", "-"]], ids=str)
def test_a_rank_that_fails_in_a_plain_script_is_a_failure(
    ends: list[str], have_met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that have met go on without it, and it is told again at the end."""
    supervisor = Supervisor("train.py", [], 2, command="fastsync launch local", place="Elastic")
    failures = iter([[] if end == "-" else [SimpleNamespace(exitcode=int(end))] for end in ends])

    def start(*_: object, **__: object) -> Any:
        result = SimpleNamespace(failures=next(failures), return_values={})
        return SimpleNamespace(wait=lambda timeout: result, pids=dict, close=lambda *_, **__: None)

    if have_met:
        PrefixStore(KEYS_OF_FIRST, supervisor._store).set("newest", Membership(1, {0: 7, 1: 7}, {}).to_json())
    with patch("fastsync.launch.supervisor.start_processes", start):
        assert supervisor.run() == (0 if have_met or ends == ["-", "-"] else 1)
    if have_met and ends == ["5", "-"]:
        first, last = capsys.readouterr().err.splitlines()
        assert first.endswith("rank 0 has failed with status 5; 1 rank goes on")
        assert "others have come to the end; rank 0 failed with status 5" in last


SCRIPT = """
import os, sys, time, torch, fastsync
with fastsync.distributed.process_group(timeout=60):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = fastsync.attach(model)
    elastic = fastsync.Elastic(model, optimizer, sync, min_ranks=2, max_ranks=2)
    lonely = os.environ["RANK"] == "1"
    for step in elastic.steps(40):
        with step:
            if lonely and step.index == 20:
                os._exit(3)
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    fastsync.check_consistency(model, process_group=elastic.group)
    sys.stdout.write(f"members {elastic.members} arguments {sys.argv[1:]}" + os.linesep)  # at once, beside another rank
"""


def launch(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "fastsync.cli", "launch", "local", *words, "train.py", "--lr", "1"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.end_to_end
def test_launch_local_replaces_a_rank(tmp_path: Path) -> None:
    ran = launch(tmp_path, SCRIPT, "-n", "2", "--replace")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["members [0, 2] arguments ['--lr', '1']"] * 2
    assert "rank 1 has failed with status 3; 1 rank goes on, and rank 2 is started in its place" in ran.stderr


@pytest.mark.end_to_end
def test_launch_local_takes_a_module_and_leaves_a_scripts_options_alone(tmp_path: Path) -> None:
    says = "import os, sys; sys.stdout.write(str(sys.argv[1:]) + os.linesep)"
    (tmp_path / "trainer.py").write_text(says)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for words in (["-m", "trainer"], ["--", "-m", "trainer"], ["trainer.py"]):
        command = [sys.executable, "-m", "fastsync.cli", "launch", "local", "-n", "1", *words, "-m", "7", "--", "x"]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert ran.stdout == "['-m', '7', '--', 'x']\n", ran.stderr


@pytest.mark.end_to_end
def test_launch_local_ends_all_if_one_fails_before_they_have_met(tmp_path: Path) -> None:
    script = "import os, time; os.environ['RANK'] == '0' and time.sleep(100); raise SystemExit(5)"
    ran = launch(tmp_path, script, "-n", "2")
    assert ran.returncode == 1
    assert "rank 1 has failed with status 5; the ranks have not met in fastsync.Elastic or DiLoCo yet" in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python", "train.py"], "leave 'python' out: local starts Python"),
        (["nosuch.py"], "'nosuch.py' is no file in "),
        (["/no/such.py"], "'/no/such.py' is no file"),
        (["-"], "'-' stands for a pipe"),
        (["/dev/stdin"], "'/dev/stdin' is a pipe or a terminal"),
        (["pipe.py"], "'pipe.py' is a pipe or a terminal"),
        (["-m"], "name a script, or -m and a module"),
        ([], "name a script, or -m and a module"),
    ],
)
def test_what_cannot_be_started_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.py")
    with patch("fastsync.launch.supervisor.start_processes", side_effect=AssertionError("started")):
        assert main(["launch", "local", "-n", "2", *words]) == 2
    assert capsys.readouterr().err.startswith(f"fastsync launch: {message}")


@pytest.mark.parametrize("option", ["-n", "--nproc", "--nproc-per-node", "--nproc_per_node"])
def test_the_number_of_ranks_has_torchruns_names_too(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with patch("fastsync.launch.local.Supervisor") as supervisor:
        main(["launch", "local", option, "3", "train.py", "--nproc", "7"])
    assert supervisor.call_args.args[1:] == (["-u", "train.py", "--nproc", "7"], 3)


STOPPED = """
import os, signal, torch, fastsync
with fastsync.distributed.process_group(timeout=60):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {begin}
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    os.write(1, b"done" + os.linesep.encode())
"""
STOPS = "os.environ['RANK'] == '1' and {index} == 20 and os.kill(os.getpid(), signal.SIGSTOP)"
ELASTIC = f"""elastic = fastsync.Elastic(model, optimizer, fastsync.attach(model), timeout=10)
    for step in elastic.steps(40):
      with step:
        {STOPS.format(index="step.index")}
"""
DILOCO = f"""with fastsync.DiLoCo(model, optimizer, sync_every=5, timeout=10.0):
      for step in range(40):
        {STOPS.format(index="step")}
"""


@pytest.mark.end_to_end
@pytest.mark.parametrize(("begin", "words"), [(ELASTIC, ["--replace"]), (DILOCO, [])], ids=["Elastic", "DiLoCo"])
def test_launch_local_ends_although_a_stopped_rank_is_left_behind(tmp_path: Path, begin: str, words: list[str]) -> None:
    ran = launch(tmp_path, STOPPED.format(begin=begin.rstrip()), "-n", "3", *words)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["done"] * 2, ran.stderr
    assert "rank 1 is stopped, and the others have gone on without it, so it is ended" in ran.stderr
