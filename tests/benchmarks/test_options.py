"""What the commands refuse before anything starts, and what they write sizes, rates and places as."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS, main
from benchmarks.harness.options import check_device, places
from benchmarks.units import format_bytes, format_rate, parse_bytes, parse_rate

REFUSED = {
    "sync --nproc 0": "nproc=0 must be at least 1",
    "sync --warmup 1": "warmup=1 must be at least 2",
    "sync --sizes": "sizes: choose at least one of 5k",
    "sync --sweep 1MiB 1KiB": "sweep=1MiB 1KiB: the first size must not be above the last",
    "sync --ways": "ways: choose at least one",
    "sync --nproc 999": "choose fewer, or --oversubscribe",
    "sync --ways telepathy": "telepathy",
    "sync --device cuda": "device=cuda: torch sees 0 GPUs, for 2 ranks",
    "sync --json no-such-folder/rows.json": "there is no folder no-such-folder",
    "ddp --batch-size 0": "batch_size=0 must be at least 1",
    "ddp --models": "models: choose at least one of mlp",
    "ddp --timeout 0": "timeout=0.0 must be more than 0",
    "ops --sizes 8B --tensors 3": "8B are not whole float32 values for 3 tensors",
    "ops --tensors": "tensors: choose at least one",
    "scaling --world-sizes 1,2,4": "4 ranks: this machine has 2 cores",
    "scaling --world-sizes 0": "each from 1 on",
    "scaling --world-sizes 1 2 --strong --batch-size 65": "batch_size=65 cannot be shared by 2 ranks",
    "scaling --strong": "--strong takes the number of samples of all ranks together",
    "scaling --ways ddp/bf16_compress_hook": "it takes nccl, and these ranks have gloo",
    "scaling --report FILE": "is a file",
    "link --rate fast": "rate=fast: expected a number and a unit",
    "link --ranks 17": "ranks=17 must be from 2 to 16",
    "link --ranks-per-host 3": "ranks_per_host=3 must divide ranks=4",
    "link --benchmark ddp --sizes 5k": "--sizes",
    "ppo --num-envs 4 0": "num_envs=(4, 0) must be at least 1 each",
    "ppo --num-envs 4 --env ALE/Pong-v5": "num_envs are scaled for CartPole-v1",
    "ppo --nproc 4": "4 ranks: this machine has 2 cores",
    "predict FILE --world-sizes 1": "1 must be 2 or more",
    "predict FILE --bucket-mb 0": "bucket_mb=0.0 must be more than 0",
    "compare --before a.json --after": "before and after: name at least one file for each",
    "compare --before a.json ./a.json --after b.json": "a file that is named twice is no second launch",
    "compare --before a.json --after b.json --threshold -1": "threshold=-1.0 must not be negative",
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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert f"usage: python -m benchmarks {command}" in said
    assert ("--device " in said) == (command not in ("link", "outer", "outer_loss", "predict", "report", "compare"))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tyro" else object())
    with pytest.raises(SystemExit, match=r"^benchmarks need tyro: pip install jinja2 matplotlib .* tyro$"):
        main(["sync"])


def test_units():
    assert [parse_bytes(text) for text in ("64B", "1 KiB", "25MiB", "1GiB")] == [64, 2**10, 25 * 2**20, 2**30]
    assert [format_bytes(nbytes) for nbytes in (64, 1024, 1536, 25 * 2**20)] == ["64B", "1KiB", "1536B", "25MiB"]
    rates = {"100mbit": 10**8, "1gbit": 10**9, "2.5Gbit": 25 * 10**8, "64kbit": 64_000, "8bit": 8}
    assert {text: parse_rate(text) for text in rates} == rates
    assert [format_rate(rate) for rate in (500, 10**5, 25 * 10**8)] == ["500 bit/s", "100 kbit/s", "2.5 Gbit/s"]
    for text in ("", "1", "gbit", "1 gbit", "-1gbit", "0gbit", "1gbps", "nan gbit", "1e3mbit"):
        with pytest.raises(ValueError, match="expected a number and a unit"):
            parse_rate(text)


def test_places_are_gpus_for_all_ranks_or_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 16)
    assert [places(nproc) for nproc in (1, 2, 17)] == [1, 16, 16]
    assert places(1, cpu=True) == 16
    assert places(5, share_gpus=True) == 1
    check_device("auto", 16, oversubscribe=False)
    check_device("auto", 17, oversubscribe=True)
    check_device("auto", 5, oversubscribe=False, share_gpus=True)
    with pytest.raises(ValueError, match="17 ranks: this machine has 16 cores, and GPUs for 1 ranks"):
        check_device("auto", 17, oversubscribe=False)
    with pytest.raises(ValueError, match="share_gpus: torch sees no GPU here, or may not take one: leave it out"):
        check_device("cpu", 2, oversubscribe=True, share_gpus=True)
