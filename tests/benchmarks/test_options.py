"""What the commands refuse before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import main

REFUSED = {
    "sync --warmup 1": "warmup=1 must be at least 2",
    "sync --methods": "methods: choose at least one",
    "sync --methods ddp dpp": "methods: 'dpp' is none of no_sync, shared_memory_sum",
    "sync --sizes 1KB": "not a number of bytes",
    "outer_loss --methods int8": "methods: expected int8/STEPS, such as int8/30, got 'int8'",
    "outer_loss --methods attach/lowrnk": "lowrnk",
    "sync --nproc 999": "choose fewer, or --oversubscribe",
    "sync --device cuda": "device=cuda: torch sees 0 GPUs, for 2 ranks",
    "sync --json no-such-folder/rows.json": "there is no folder no-such-folder",
    "ddp --timeout 0": "timeout=0.0 must be more than 0",
    "ops --sizes 8B --tensors 3": "8B are not whole float32 values for 3 tensors",
    "scaling --world-sizes 1,2,4": "4 ranks: this machine has 2 cores",
    "scaling --strong": "--strong takes the number of samples of all ranks together",
    "scaling --methods ddp/bf16_compress_hook": "it takes nccl, and these ranks have gloo",
    "scaling --report FILE": "is a file",
    "link --rate fast": "rate=fast: expected a number and a unit",
    "link --ranks-per-host 3": "ranks_per_host=3 must divide ranks=4",
    "stream --nproc 1": "nproc=1 must be at least 2: one rank waits for another that is late",
    "recovery --nproc 1": "nproc=1 must be at least 2: somebody has to be left",
    "recovery --hosts 2": "hosts=2 is for fastsync alone: add --methods fastsync.Elastic",
    "recovery --picture FILE": "picture=FILE must be the name of a file that ends in .png",
    "predict FILE --world-sizes 1": "1 must be 2 or more",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with pytest.raises(SystemExit, match=r"^2$"):
        main(shlex.split(arguments))
    # The message may be wrapped into a frame.
    assert REFUSED[arguments] in " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tyro" else object())
    commands = r"pip install --no-build-isolation -e '\.\[bench\]', or only pip install jinja2 .* tyro"
    said = f"^benchmarks need tyro, which the extra bench brings: in this folder run {commands}$"
    with pytest.raises(SystemExit, match=said):
        main(["sync"])
