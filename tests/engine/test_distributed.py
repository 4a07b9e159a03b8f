"""fastsync.distributed: process groups from torchrun's environment, reductions, and check_consistency."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import MissingRanksError, dist_mean, dist_sum, group_of_this_rank, process_group
from tests.ranks import on_ranks
from tests.refused import refused

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

# ---- process groups -------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_sum_and_mean_over_ranks(rank: int, world_size: int) -> None:
    mine = torch.tensor([1.0, 3.0 * rank])
    assert dist_sum(mine).tolist() == [3.0, 9.0]
    assert dist_mean(mine).tolist() == [1.0, 3.0]
    assert mine.tolist() == [1.0, 3.0 * rank], "the rank's own values must not be overwritten"
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        refused(lambda: dist_sum(torch.zeros(1), process_group=group), "1000ms", kind=RuntimeError)
    dist.barrier()


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=30) as device:
        assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert not dist.is_initialized()


def _launched(rank: int, world_size: int, port: int, **agent: object) -> None:
    """As by torchrun, and without the group that ranks have here."""
    dist.destroy_process_group()
    place = dict(zip(PLACE, (rank, world_size, rank, world_size), strict=True))
    settings = {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": port, **agent}
    os.environ.update({name: str(value) for name, value in settings.items()})


@pytest.mark.parametrize("missing", [[0], [1, 2]], ids=str)
@on_ranks(3)
def test_ranks_that_never_come_are_named(rank: int, world_size: int, missing: list[int], port: int) -> None:
    agent = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    dist.barrier()
    done = dist.distributed_c10d._get_default_store()
    _launched(rank, world_size, port, TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0)
    if rank not in missing:
        with pytest.raises(MissingRanksError, match=r"did not come within 1 s") as raised, process_group(timeout=1.0):
            pass
        assert raised.value.ranks == missing
    done.set(f"tried {rank}", "")
    done.wait([f"tried {other}" for other in range(world_size)], timedelta(seconds=60))
    del agent


@on_ranks(2)
def test_a_group_that_is_open_is_used_and_stays_open(rank: int, world_size: int) -> None:
    with process_group(timeout=60) as device:
        assert (dist.get_world_size(), str(device)) == (world_size, "cpu")
    message = r"backend='nccl'.*gloo is open already; leave backend out$"
    with pytest.raises(ValueError, match=message), process_group(timeout=60, backend="nccl"):
        pass
    assert dist.is_initialized()


@on_ranks(2)
def test_a_block_after_one_that_an_error_has_left(rank: int, world_size: int, port: int) -> None:
    """It opens a group of its own, with its own time-out. What it finds open, and has not opened, stays."""
    _launched(rank, world_size, port, TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0)
    agent = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    for kind in (ArithmeticError, KeyboardInterrupt):
        with pytest.raises(kind), process_group(timeout=30):  # noqa: PT012
            assert dist_sum(torch.ones(1)).item() == 2
            before = dist.group.WORLD
            with process_group(timeout=30):
                assert dist.group.WORLD is before
                raise kind
    with process_group(timeout=20, backend="gloo"):
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=20)
        assert dist_sum(torch.ones(1)).item() == 2
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.group.WORLD
    with pytest.raises(ArithmeticError), process_group(timeout=30):
        raise ArithmeticError
    with process_group(timeout=30):
        assert dist.group.WORLD is own
    del agent


THREADS = """
import pathlib
import torch
from torch.nn.parallel import DistributedDataParallel
from fastsync.distributed import process_group
with process_group(timeout=30.0, backend="gloo"):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    del model, optimizer
names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
print("threads of Gloo:", [name.strip() for name in names if "gloo" in name])
"""


@pytest.mark.end_to_end
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads in /proc")
def test_no_thread_of_the_group_outlives_it() -> None:
    """One that does may abort the process while the interpreter shuts down."""
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", THREADS]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert process.stdout == "threads of Gloo: []\n", process.stdout + process.stderr


@on_ranks(2)
def test_two_ranks_and_one_gpu_train_on_the_cpu(rank: int, world_size: int, port: int) -> None:
    _launched(rank, world_size, port)
    with (
        mock.patch("torch.cuda.device_count", return_value=8 if rank else 1),  # rank 0 decides
        warnings.catch_warnings(record=True) as told,
        process_group(timeout=30) as device,
    ):
        assert dist_sum(torch.ones(1)).item() == 2
        assert (device.type, dist.get_backend()) == ("cpu", "fastsync")
    expected = "all ranks train on the CPU: rank 0 sees 1 GPU(s) for the 2 ranks of its machine."
    assert [expected in str(each.message) for each in told] == [True] * (rank == 0)
    assert all("--device cpu" in str(each.message) and "--device cuda" in str(each.message) for each in told)
    assert all(each.filename == __file__ for each in told)


@on_ranks(2)
def test_what_rank_0_names_is_taken(rank: int, world_size: int, port: int) -> None:
    _launched(rank, world_size, port)
    with mock.patch("torch.cuda.device_count", return_value=8):
        if rank == 1:
            message = (
                "backend='nccl' on rank 1, but rank 0 has taken 'gloo'; name the same one on every rank, or none here"
            )
            with pytest.raises(ValueError, match=message), process_group(timeout=30, backend="nccl"):
                pass
        with process_group(timeout=30, backend=None if rank else "gloo"):
            assert dist_sum(torch.ones(1)).item() == 2


@pytest.mark.parametrize(
    ("num_gpus", "local_size", "backend", "is_shared", "device"),
    [
        (4, 4, None, False, "cuda:3"),
        (8, 4, None, False, "cuda:3"),
        (2, 4, None, True, "cuda:1"),
        (1, 4, "nccl", False, "cuda:0"),  # a launcher shows each rank its own
        (4, 4, "gloo", False, "cpu"),
        (0, 4, None, True, "cpu"),
    ],
)
def test_nccl_is_chosen_where_a_rank_sees_as_many_gpus_as_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    num_gpus: int,
    local_size: int,
    backend: Any,
    is_shared: bool,
    device: str,
) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 12, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": local_size}
    for name, value in {**place, "NCCL_MULTI_RANK_GPU_ENABLE": int(is_shared)}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr(
        "fastsync.distributed.rendezvous", lambda *arguments, **options: iter([(dist.HashStore(), 0, 12)])
    )
    with (
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.distributed.init_process_group") as init,
        mock.patch("torch.distributed.destroy_process_group"),
        process_group(timeout=10, backend=backend) as chosen,
    ):
        assert str(chosen) == device
    assert init.call_args.args == (("nccl" if "cuda" in device else backend or "fastsync"),)
    assert not recwarn.list


def test_a_second_group_in_the_same_store_waits_for_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank = dist.HashStore(), 0
    monkeypatch.setattr("fastsync.distributed._num_opened", 0)
    monkeypatch.setattr("fastsync.distributed.rendezvous", lambda *arguments, **options: iter([(store, rank, 2)]))
    monkeypatch.setenv("RANK", "0")
    with mock.patch("torch.distributed.init_process_group"), mock.patch("torch.distributed.destroy_process_group"):
        with process_group(timeout=10, backend="gloo"):
            pass
        rank = 1  # which opens its second group before rank 0 does
        with pytest.raises(RuntimeError, match=r"(?i)time"), process_group(timeout=1):
            pass


def test_backends_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for backend, message in (
        ("nccl", "^backend: NCCL needs GPUs, and rank 0 sees none; pass backend='fastsync' .*--device cpu"),
        ("mpi", "^backend: expected 'nccl', 'fastsync', 'gloo' or None, got 'mpi'$"),
    ):
        with pytest.raises(ValueError, match=message), process_group(timeout=10, backend=backend):  # type: ignore[arg-type]
            pass


# Backends of torch 2.15 that are NCCL.
NCCLS = pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl2", "cuda:nccl-legacy"])


@NCCLS
def test_an_open_group_of_any_nccl_is_used_on_the_gpu_it_is_bound_to(one_rank: None, backends: str) -> None:
    with (
        mock.patch("torch.distributed.get_backend_config", return_value=backends),
        mock.patch("torch.cuda.current_device", return_value=1),
    ):
        with process_group(timeout=10, backend="nccl") as device:
            assert str(device) == "cuda:1"
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 2)
        with process_group(timeout=10, backend="nccl") as device:
            assert str(device) == "cuda:2"


def test_a_group_of_this_rank_is_bound_to_the_gpu_that_it_is_for(one_rank: None) -> None:
    device, group = torch.device("cuda", 3), dist.distributed_c10d._get_default_group()
    with mock.patch("torch.distributed.new_group", return_value=group) as new:
        assert group_of_this_rank(device) is group
    expected = {"backend": "nccl", "use_local_synchronization": True, "device_id": device}
    assert new.call_args == mock.call([0], **expected)


# ---- check_consistency ----------------------------------------------------------------------------------------------


def _normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@on_ranks(3)
def test_what_differs_is_named_on_every_rank(rank: int, world_size: int) -> None:
    model = _normalised()
    fastsync.check_consistency(model)
    missing = r"do not agree on the tensors of Sequential: rank 0, 1: 1\.weight sha256 \w+; rank 2: nothing; give"
    with pytest.raises(RuntimeError, match=missing):
        fastsync.check_consistency(model[:1] if rank == 2 else model)
    # One bit: a comparison by tolerance would not see it.
    model[0].bias.detach().view(torch.int32)[1] ^= rank == 1
    one_bit = r"the tensors of Sequential: .*rank (0, 2|1): 0\.bias sha256 \w+; rank (1|0, 2): 0\.bias sha256 \w+; "
    with pytest.raises(RuntimeError, match=one_bit):
        fastsync.check_consistency(model)
    for name, tensor in model.state_dict().items():
        if rank == 1 and name != "0.weight":
            tensor.add_(3 if name == "1.num_batches_tracked" else 0.25)
    with pytest.raises(RuntimeError, match=one_bit):
        fastsync.check_consistency(model)
    for dtype in (torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64):
        other = nn.Module()
        other.register_buffer("values", torch.tensor([[1, 0], [0, rank == 2]]).to(dtype).T)
        refused(lambda: fastsync.check_consistency(other), "rank 2: values sha256", kind=RuntimeError)
    other.register_buffer("values", torch.zeros(2 + rank))
    refused(lambda: fastsync.check_consistency(other), "A buffer that every rank takes from its own", kind=RuntimeError)


@on_ranks(2)
def test_buffers_and_ranks_that_do_not_come(rank: int, world_size: int) -> None:
    model = _normalised()
    model(torch.randn(8, 2, generator=torch.Generator().manual_seed(rank)))
    refused(lambda: fastsync.check_consistency(model), "rank 0: 1.running_mean sha256", kind=RuntimeError)
    fastsync.check_consistency(model, buffers=False)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        message = r"check_consistency: .* rank 0 of 2 .*; every rank has to call it, .*sync\.join\(\)"
        with pytest.raises(RuntimeError, match=message):
            fastsync.check_consistency(_normalised(), process_group=group)
    dist.barrier()
