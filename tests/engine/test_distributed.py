"""fastsync.distributed: process groups from torchrun's environment, reductions, and agreement of weights."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync.distributed import _takes_gpus, check_consistency, dist_mean, dist_sum, process_group
from tests.ppo.test_launch_torchrun import free_port
from tests.ranks import run_ranks

WORLD_SIZE = 3


@dataclass
class Seen:
    """What one rank saw."""

    mine: list[float]
    total: list[float]
    average: list[float]
    equal_weights: str
    one_bit_differs: str
    layer_missing: str
    collective_left_out: str


def look_around(rank: int, world_size: int) -> Seen:
    mine = torch.tensor([1.0, 3.0 * rank])
    total, average = dist_sum(mine), dist_mean(mine)
    return Seen(
        mine=mine.tolist(),
        total=total.tolist(),
        average=average.tolist(),
        equal_weights=consistency_error(two_layers()),
        one_bit_differs=consistency_error(with_one_bit_flipped(two_layers()) if rank == 1 else two_layers()),
        layer_missing=consistency_error(two_layers()[:1] if rank == 2 else two_layers()),
        collective_left_out=leave_out_a_collective(rank),
    )


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def with_one_bit_flipped(model: nn.Sequential) -> nn.Sequential:
    # One bit: a comparison by tolerance would not see it.
    model[0].bias.detach().view(torch.int32)[1] ^= 1
    return model


def consistency_error(model: nn.Module) -> str:
    try:
        check_consistency(model)
    except RuntimeError as error:
        return str(error)
    return ""


def leave_out_a_collective(rank: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    message = ""
    if rank == 0:
        try:
            dist_sum(torch.zeros(1), process_group=group)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return run_ranks(look_around, WORLD_SIZE, timeout=120)


def test_sum_and_mean_over_ranks(seen: list[Seen]):
    for rank, at_rank in enumerate(seen):
        assert at_rank.total == [3.0, 9.0]
        assert at_rank.average == [1.0, 3.0]
        assert at_rank.mine == [1.0, 3.0 * rank], "the rank's own values must not be overwritten"


def test_equal_weights_are_consistent(seen: list[Seen]):
    assert [at_rank.equal_weights for at_rank in seen] == [""] * WORLD_SIZE


def test_one_differing_bit_is_named_on_every_rank(seen: list[Seen]):
    for at_rank in seen:
        assert at_rank.one_bit_differs.startswith("'0.bias' of Sequential differs between ranks: ranks [0, 2]: sha256 ")
        assert "; ranks [1]: sha256 " in at_rank.one_bit_differs


def test_a_tensor_that_a_rank_lacks_is_named_on_every_rank(seen: list[Seen]):
    for at_rank in seen:
        assert at_rank.layer_missing.startswith("'1.weight' of Sequential differs between ranks: ranks [0, 1]: sha256 ")
        assert at_rank.layer_missing.endswith("; ranks [2]: missing; 5 of 7 entries differ")


def test_a_collective_that_a_rank_leaves_out_ends_with_an_error(seen: list[Seen]):
    assert "1000ms" in seen[0].collective_left_out


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=30) as device:
        assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert not dist.is_initialized()


def waits_for_another(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    with pytest.raises(RuntimeError), process_group(timeout=1.0):
        pass
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for run_ranks to end


def test_a_rank_whose_peers_never_come_gives_up_in_time():
    run_ranks(waits_for_another, 1)


THREADS = """
import pathlib
import torch
from torch.nn.parallel import DistributedDataParallel
from fastsync.distributed import process_group
with process_group(timeout=30.0):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    del model, optimizer
names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
print("threads of Gloo:", [name.strip() for name in names if "gloo" in name])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads in /proc")
def test_no_thread_of_the_group_outlives_it():
    """One that does may abort the process while the interpreter shuts down."""
    process = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False, env=without_ranks()
    )
    assert process.stdout == "threads of Gloo: []\n", process.stdout + process.stderr


def without_ranks() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in names} | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("gpus", "alone", "shared"),
    [
        (["a", "b"], True, True),
        (["a", "a"], False, True),
        (["a", ""], False, False),
        ([""], False, False),
        (["a"], True, True),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu_which_it_may_have_to_share(
    gpus: list[str], alone: bool, shared: bool
) -> None:
    assert (_takes_gpus(gpus, share_gpus=False), _takes_gpus(gpus, share_gpus=True)) == (alone, shared)


@pytest.mark.parametrize(
    ("gpus", "too_few"), [(["a", "b", "a"], "3 ranks share 2"), (["a", "", ""], r"ranks \[1, 2\] of 3 have none")]
)
def test_too_few_gpus_are_told(gpus: list[str], too_few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsync.distributed._gpus_of_ranks", lambda *arguments: gpus)
    with (
        pytest.warns(UserWarning, match=rf"^all ranks train on the CPU, though there are GPUs: {too_few}\. ") as warned,
        process_group(timeout=10) as device,
    ):
        assert (device.type, dist.get_backend()) == ("cpu", "gloo")
    assert warned[0].filename == __file__
    with (
        pytest.raises(ValueError, match=f"^backend='nccl' needs a GPU for each rank, but {too_few}"),
        process_group(timeout=10, backend="nccl"),
    ):
        pass


@pytest.mark.parametrize(("backend", "gpus"), [("gloo", ["a", "a"]), (None, ["", ""])])
def test_nothing_is_said_where_the_cpu_is_meant(
    backend: Literal["gloo"] | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("fastsync.distributed._gpus_of_ranks", lambda *arguments: gpus)
    with process_group(timeout=10, backend=backend) as device:
        assert device.type == "cpu"
    assert not recwarn.list


def test_a_backend_that_there_is_not_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"^backend: expected 'nccl', 'gloo' or None, got 'mpi'$"),
        process_group(timeout=10, backend="mpi"),  # type: ignore[arg-type]
    ):
        pass


def uses_the_open_group(rank: int, world_size: int) -> tuple[str, bool, str]:
    with process_group(timeout=60) as device:
        assert dist.get_world_size() == world_size
    with pytest.raises(ValueError, match="backend='nccl'") as error, process_group(timeout=60, backend="nccl"):
        pass
    return str(device), dist.is_initialized(), str(error.value)


def test_a_group_that_is_open_is_used_and_stays_open():
    for device, is_open, refusal in run_ranks(uses_the_open_group, 2):
        assert (device, is_open) == ("cpu", True)
        assert refusal.endswith("gloo is open already; leave backend out")


def meets_as_of_another_attempt(rank: int, world_size: int, port: int) -> int:
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": False, "TORCHELASTIC_RESTART_COUNT": rank}
    os.environ.update({name: str(value) for name, value in {**place, **agent}.items()})
    with process_group(timeout=20):
        number = dist.get_world_size()
        dist.barrier()  # until both are connected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for run_ranks to end
    return number


def test_machines_that_joined_later_count_their_restarts_anew():
    assert run_ranks(meets_as_of_another_attempt, 2, free_port()) == [2, 2]
