"""What README, docs and CONTRIBUTING show is run: each block of Python on two ranks, each command at a small size.

A block has what it does not make itself from ``Names``, such as a model. One that cannot run says why, in a comment
above it: ``<!-- not run: reason -->``. Each command is also read by its own parser, at its full size.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastsync
from benchmarks.harness import options
from tests.forked import Command
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)
LANGUAGES = {"python", "sh", "text", ""}


class Block(NamedTuple):
    place: str
    language: str
    code: str
    reason: str | None


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = re.sub(r"^```\{.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)  # Sphinx's directives
        for number, match in enumerate(BLOCK.finditer(text), 1):
            place = f"{page.relative_to(ROOT)}, block {number}"
            found.append(Block(place, match["language"], match["code"], match["reason"]))
    return found


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs).relu()
        return self.head(inputs)


class Names(dict[str, Any]):
    """What a block of code may take for granted, made when it is first asked for."""

    def __missing__(self, name: str) -> Any:
        if name not in MADE:
            return getattr(builtins, name) if hasattr(builtins, name) else super().__missing__(name)  # type: ignore[misc]
        self[name] = MADE[name](self)
        return self[name]


def loss_of(names: Names) -> Callable[..., torch.Tensor]:
    return lambda batch=None: names.get("ddp_model", names["model"])(torch.randn(4, 8)).square().mean()


def train(names: Names) -> Callable[..., None]:
    def train_a_model(model: nn.Module | None = None, seed: int = 0) -> None:
        loss_of(names)().backward()
        names["optimizer"].step()

    return train_a_model


def saved(names: Names) -> str:
    state = {"model": names["model"].state_dict(), "optimizer": names["optimizer"].state_dict()}
    torch.save(state | {"sync": fastsync.attach(Classifier()).state_dict()}, "saved.pt")
    return "saved.pt"


def folder(names: Names) -> str:
    """Returns a folder that both ranks see: each runs in one of its own."""
    told = [os.path.join(os.getcwd(), "checkpoint")]
    dist.broadcast_object_list(told)
    return told[0]


MADE: dict[str, Callable[[Names], Any]] = {
    "torch": lambda names: torch,
    "dist": lambda names: dist,
    "fastsync": lambda names: fastsync,
    "fully_shard": lambda names: fully_shard,
    "init_device_mesh": lambda names: init_device_mesh,
    "model": lambda names: Classifier(),
    "ddp_model": lambda names: nn.parallel.DistributedDataParallel(names["model"]),
    "agent": lambda names: names["model"],
    "Agent": lambda names: lambda envs: names["model"],
    "envs": lambda names: SimpleNamespace(obs_rms=SimpleNamespace(mean=np.zeros(4), var=np.ones(4))),
    "device": lambda names: torch.device("cpu"),
    "optimizer": lambda names: torch.optim.Adam(names["model"].parameters()),
    "scheduler": lambda names: torch.optim.lr_scheduler.StepLR(names["optimizer"], 10),
    "masters": lambda names: {each: each.detach().clone() for each in names["model"].parameters()},
    "scaler": lambda names: torch.amp.GradScaler("cpu"),
    "sync": lambda names: fastsync.attach(names["model"]),
    "batch_of": lambda names: lambda *place: place,
    "diloco": lambda names: fastsync.DiLoCo(names["model"], names["optimizer"]),
    "loss_of": loss_of,
    "loss": lambda names: names["loss_of"](),
    "ppo_loss_of": lambda names: lambda minibatch: (names["loss_of"](), torch.tensor(0.01)),
    "target_kl": lambda names: 0.02,
    "train": train,
    "batches": lambda names: range(2),
    "dataset": lambda names: torch.utils.data.TensorDataset(torch.zeros(256, 8)),
    "micro_batches": lambda names: range(3),
    "tokens_of": lambda names: lambda micro_batch: 5 + micro_batch,
    "minibatches": lambda names: range(2),
    "loader": lambda names: range(2 + dist.get_rank()),
    "num_tokens": lambda names: 10 + dist.get_rank(),
    "step": lambda names: 1000,
    "file": saved,
    "path": lambda names: "state.pt",
    "folder": folder,
    "ranks_left": lambda names: [0, 1],
    "device_type": lambda names: "cpu",
    "mesh": lambda names: init_device_mesh("cpu", (2,)),
    "num_sites": lambda names: 2,
    "ranks_a_site": lambda names: 1,
    "num_replicas": lambda names: 2,
    "ranks_a_replica": lambda names: 1,
}


def run_blocks(rank: int, world_size: int, shown: list[Block], port: int) -> list[tuple[str, str]]:
    """Runs them in a folder of its own; returns what each prints. The first one that fails ends the rank."""
    os.environ["FASTSYNC_STORE"] = f"127.0.0.1:{port}"
    printed = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in shown:
            code, names = block.code.replace("=500_000", "=2_000").replace("(10_000)", "(20)"), Names()
            # These ranks have their default group already.
            code = code.replace('init_process_group("fastsync")', 'new_group(backend="fastsync")')
            if "from fastsync.ppo import" in block.code:  # a script that trains itself
                names["__name__"] = "__main__"
            for handle in ("sync", "hook"):  # there before the losses that it averages
                if re.search(rf"\b{handle}\.|\({handle},", code) and f"{handle} = " not in code:
                    names[handle]
            torch.manual_seed(rank)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                try:
                    exec(compile(code, block.place, "exec"), names)
                except Exception as error:
                    raise AssertionError(f"{block.place}:\n{traceback.format_exc()}") from error
            printed.append((block.place, out.getvalue()))
        os.chdir(ROOT)
    return printed


@pytest.mark.end_to_end
def test_each_block_of_python_runs_on_two_ranks() -> None:
    shown = [block for block in blocks() if block.language == "python" and block.reason is None]
    assert len(shown) > 30
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        printed = run_ranks(run_blocks, 2, shown, store.port, timeout=120.0)[0]
    # The complete scripts learn: their loss is about 0.3 before the first step.
    losses = {place: float(match[1]) for place, text in printed if (match := re.match(r"loss ([\d.]+)", text))}
    assert {place.split(",")[0] for place in losses} == {"README.md", "docs/tutorials/script.md"}
    assert max(losses.values()) < 0.01


def test_what_is_not_run_says_why() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES
    left_out = [block for block in blocks() if block.reason is not None]
    assert 0 < len(left_out) <= 8
    assert all(len(block.reason.split()) > 3 for block in left_out)
    assert all(compile(block.code, block.place, "exec") for block in left_out)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each that blocks, running text and tables show: where, and its words as a shell reads them."""
    found = []
    for block in blocks():
        if block.language == "sh":
            joined = re.sub(r"\\\n\s*", "", block.code)
            found += [(block.place, line) for line in joined.splitlines()]
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        if page.name == "troubleshooting.md":  # whose first column has messages
            text = re.sub(r"^\| `.*?` \|", "", text, flags=re.MULTILINE)
        shown = re.findall(r"`((?:fastsync|make|python3?|torchrun|pip) [^`\n]+)`", text)
        found += [(str(page.relative_to(ROOT)), line) for line in shown]
    variables: dict[str, str] = {}
    for place, line in sorted(set(found)):
        words = [word for each in shlex.split(line, comments=True) for word in expanded(each, variables)]
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, value = words.pop(0).split("=", 1)
            variables[name] = value
        if words:
            yield place, [word for word in words if word != "..." and not word.startswith("[")]


class Parsed(Exception):
    """The command line was read, and all of it was understood."""


def stop_when_parsed(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_and_stop(*arguments: Any, **settings: Any) -> Any:
        parsed = parse(*arguments, **settings)
        if settings.get("return_unknown_args"):  # the rest is another parser's
            return parsed
        raise Parsed

    return parse_and_stop


def read_by(main: Callable[[list[str]], object], words: list[str]) -> None:
    """Calls a command until it has read its words."""
    with (
        mock.patch.object(tyro, "cli", stop_when_parsed(tyro.cli)),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop_when_parsed(argparse.ArgumentParser.parse_args)),
        mock.patch.object(sys, "argv", ["command", *words]),
        mock.patch.object(options, "places", return_value=64),  # cores of this machine do not matter
        pytest.raises((Parsed, SystemExit)) as ended,
    ):
        main(words)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code in (0, None), words


def read_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words)
    if read.module:
        command = {"fastsync.ppo": ["train"], "fastsync.cli": []}[read.training_script]
        fastsync_command([*command, *read.training_script_args])


def fastsync_command(words: list[str]) -> None:
    from fastsync.cli import main

    read_by(main, words if any(word.startswith("-") for word in words) else [*words, "--help"])


def python_command(words: list[str]) -> None:
    if words[0] != "-m":
        assert words[0] == "train.py" or (ROOT / words[0]).exists()
        return
    module, *rest = words[1:]
    if module == "benchmarks":
        help_of = [] if any(word.startswith("-") for word in rest) else ["--help"]
        read_by(import_module("benchmarks.__main__").main, [*rest, *help_of])
    elif module == "fastsync.ppo":
        fastsync_command(["train", *rest])
    elif module.split(".")[0] in ("tests", "tools"):
        assert find_spec(module)
    else:
        assert module in ("pytest", "build")


def make_command(words: list[str]) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert {word for word in words if "=" not in word} <= set(targets[1].split())


def wheel_command(words: list[str]) -> None:
    """Python, torch, kernels."""
    assert re.fullmatch(r"python3\.\d+ \d+\.\d+\.\d+ (cpu|cuda)", " ".join(words))


def pip_command(words: list[str]) -> None:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^(\w+) = ", section, re.MULTILINE)
    named = {extra for word in words if word.startswith(".[") for extra in word[2:-1].split(",")}
    assert named <= set(extras)


def started_command(words: list[str]) -> None:
    """What srun or MPI's launchers start, behind their options, each of which has a value here."""
    while words[0].startswith("-"):
        words = words[3 if words[0] == "-genv" else 2 :]
    READERS[words[0]](words[1:])


def submitting_command(words: list[str]) -> None:
    from fastsync.launch.jobs import KINDS

    assert words[-1] in {kind.file for kind in KINDS.values()}


def py_spy_command(words: list[str]) -> None:
    assert words[:2] == ["dump", "--pid"]


READERS: dict[str, Callable[[list[str]], None]] = {
    "fastsync": fastsync_command,
    "kubectl": submitting_command,
    "make": make_command,
    "mpiexec": started_command,
    "mpirun": started_command,
    "pip": pip_command,
    "py-spy": py_spy_command,
    "python": python_command,
    "python3": python_command,
    "sbatch": submitting_command,
    "sky": submitting_command,
    "srun": started_command,
    "tools/wheel.sh": wheel_command,
    "torchrun": read_torchrun,
}


def test_each_command_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "runs/mine/settings.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("env: CartPole-v1\n")
    shown = list(commands())
    assert len(shown) > 60
    for place, words in shown:
        try:
            READERS[words[0]](words[1:])
        except BaseException as error:
            raise AssertionError(f"{place}: {shlex.join(words)}") from error


def expanded(word: str, variables: dict[str, str]) -> list[str]:
    """As a shell does it: ``$NAME``, and alternatives in braces."""
    if word.startswith("$"):
        return variables[word[1:]].split()
    if match := re.fullmatch(r'(.*)\{([^"]*)\}', word):
        return [match[1] + each for each in match[2].split(",")]
    return [word]


NOT_RUN = {
    "--nnodes": "needs several machines",
    "benchmarks ppo ": "takes minutes until all have learnt, and tests/benchmarks/test_ppo.py runs parts of it",
    "^(srun|sbatch|mpirun|mpiexec|kubectl|sky|py-spy) ": "needs a cluster; tests of launching have srun and mpirun",
    "--video|--render": "needs a window, or a package that the tests may lack",
    "--launcher ray": "needs Ray, with which tests/ppo/test_launch_ray.py runs",
    "fastsync export .*--onnx": "needs packages that the tests may lack, with which tests/ppo/test_export.py runs",
    r"^fastsync (train|eval|export|plot|launch [a-z]+( --replace)?)$": "is only a name",
    r"^python -m (fastsync\.train|benchmarks( predict)?)$": "is only a name",
    "^(make|pip|python3|tools/wheel.sh) |^python -m (tools|build|pytest)": "needs a network or hours, or is in .ci/run",
}
SMALLER = {
    r"(--nproc(?:-per-node)?)[ =]\d+": r"\1=2",
    r"(fastsync plot) runs/\S+": r"\1 runs/mine",
    r"(fastsync eval) runs/\S+": r"\1 runs/mine --episodes 1",
    r"(fastsync export) runs/\S+": r"\1 runs/mine",
    r"--num-envs 4096 --device cuda": "--num-envs 4 --device cpu",
    r"(fastsync[. ]train .*|ppo_own_loss.*)": r"\1 --total-steps 2000 --num-epochs 1",
    r"(benchmarks ops.*)": r"\1 --sizes 18KiB --tensors 6 --repetitions 1",
    r"(benchmarks (?:sync|link)(?!.*gpt2).*)": r"\1 --sizes 5k --repetitions 2 --warmup 2",
    r"(benchmarks (?:ddp|link.*gpt2).*)": r"\1 --models mlp --batch-size 2 --repetitions 1 --warmup 2",
    r"(torchrun .*benchmarks/standalone.py)": r"\1 --numel 50000 --steps 2",
    r"(benchmarks scaling.*)": r"\1 --world-sizes 1 2 --batch-size 2 --steps 2 --warmup 2 --repetitions 1",
    r"(benchmarks recovery)(.*)": r"\1 --methods fastsync.Elastic --numel 5000 --repetitions 1\2",
    r"(benchmarks outer_loss (?!--rows).*)": r"\1 --steps 2 --warm-steps 2 --seeds 0 --validate-every 2 --batch 2",
    r"(benchmarks outer .*)": r"\1 --numel 200000 --step-time 0.001 --rate 100mbit --rounds 1 --each-step 1",
}


def small_commands() -> list[str]:
    """Each that can be run here, made smaller."""
    lines = dict.fromkeys(shlex.join(words) for _, words in commands())
    shown = [line for line in lines if not any(re.search(pattern, line) for pattern in NOT_RUN)]
    for pattern, smaller in SMALLER.items():
        shown = [re.sub(pattern, smaller, line) for line in shown]
    return shown


def run_command(words: Sequence[str]) -> object:
    name, *rest = words
    if name == "python" and rest[0] != "-m":
        sys.argv = rest
        return runpy.run_path(rest[0], run_name="__main__") and None
    main = {"fastsync": "fastsync.cli", "torchrun": "torch.distributed.run", "python": "benchmarks.__main__"}[name]
    return import_module(main).main(rest[2:] if name == "python" else rest)


def run_in(folder: Path, line: str) -> None:
    command = Command(run_command, folder, *shlex.split(line), PYTHONPATH=f"{ROOT}:{folder}")
    try:
        assert command.wait(200) == 0, command.out + command.err
    finally:
        command.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has what the commands name: scripts, settings, rows, an environment, and a run."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "mypkg").mkdir()
    (folder / "mypkg/envs.py").write_text(
        "import gymnasium\n"
        "from tests.toy_envs import Privileged as simulated, masked_cart_pole as hides_velocities\n"
        "from tests.torch_envs import cart_pole as make\n"
        "def make_env(): return gymnasium.make('CartPole-v1')\n"
    )
    (folder / "run.yaml").write_text("env: CartPole-v1\n")
    (folder / "train.py").write_text(next(block.code for block in blocks() if 'print(f"loss' in block.code))
    for rows in (ROOT / "benchmarks/results").glob("link-100mbit-?-ranks_*.json"):
        shutil.copy(rows, folder / f"r{rows.name[13]}.json")
    for name, rows in {"losses": "outer_loss-lowrank-cnn", "links": "outer-lowrank-cnn"}.items():
        shutil.copy(next((ROOT / "benchmarks/results").glob(f"{rows}_*.json")), folder / f"{name}.json")
    run_in(folder, "fastsync train --config run.yaml --run-name mine --total-steps 1000")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("line", small_commands(), ids=str)
def test_each_command_runs_at_a_small_size(line: str, folder: Path, tmp_path: Path) -> None:
    run_in(shutil.copytree(folder, tmp_path / "docs", symlinks=True), line)
