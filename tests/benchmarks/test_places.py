"""How many ranks a machine has room for."""

from __future__ import annotations

import pytest

from benchmarks.harness.options import check_device, places


def test_places_are_gpus_for_all_ranks_or_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 16)
    assert [places(nproc) for nproc in (1, 2, 17)] == [1, 16, 16]
    assert places(1, cpu=True) == 16
    check_device("auto", 16, oversubscribe=False)
    check_device("auto", 17, oversubscribe=True)
    with pytest.raises(ValueError, match="17 ranks: this machine has 16 cores, and GPUs for 1 ranks"):
        check_device("auto", 17, oversubscribe=False)


def test_ranks_may_share_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 16)
    assert [places(nproc, share_gpus=True) for nproc in (1, 2, 5)] == [2, 2, 2]
    check_device("auto", 5, oversubscribe=False, share_gpus=True)
    for device, gpus in (("cpu", 2), ("auto", 0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match="share_gpus: torch sees no GPU here, or may not take one: leave it out"):
            check_device(device, 2, oversubscribe=True, share_gpus=True)
