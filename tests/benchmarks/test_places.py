"""How many ranks a machine has room for."""

from __future__ import annotations

import pytest

from benchmarks.harness.memory import check_ranks_fit
from benchmarks.harness.options import check_places, places


def test_ranks_on_cpus_need_main_memory_where_there_are_gpus_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("benchmarks.harness.memory.available", lambda: 2**20)
    monkeypatch.setattr("benchmarks.harness.memory.available_on", lambda device: 2**40)
    check_ranks_fit("a size", 2**20, 4, "choose less")
    for cpu, nproc in ((True, 4), (False, 5)):
        with pytest.raises(ValueError, match=f"takes about {nproc}MiB of memory, and 1MiB are free"):
            check_ranks_fit("a size", 2**20, nproc, "choose less", cpu)


def test_places_are_gpus_for_all_ranks_or_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 16)
    assert [places(nproc) for nproc in (1, 2, 17)] == [1, 16, 16]
    assert places(1, cpu=True) == 16
    check_places(16, oversubscribe=False)
    check_places(17, oversubscribe=True)
    with pytest.raises(ValueError, match="nproc=17: this machine has 16 cores, and GPUs for 1 ranks"):
        check_places(17, oversubscribe=False)


def test_ranks_may_share_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 16)
    monkeypatch.setattr("benchmarks.harness.memory.available", lambda: 0)
    monkeypatch.setattr("benchmarks.harness.memory.available_on", lambda device: 2**21)
    assert [places(nproc, share_gpus=True) for nproc in (1, 2, 5)] == [2, 2, 2]
    check_places(5, oversubscribe=False, share_gpus=True)
    check_ranks_fit("a size", 2**20, 4, "choose less", share_gpus=True)
    with pytest.raises(ValueError, match="takes about 3MiB of memory, and 2MiB are free"):
        check_ranks_fit("a size", 2**20, 5, "choose less", share_gpus=True)
    for cpu, gpus in ((True, 2), (False, 0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match="share_gpus: torch sees no GPU here, or may not take one: leave it out"):
            check_places(2, oversubscribe=True, cpu=cpu, share_gpus=True)
