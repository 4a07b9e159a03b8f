"""The examples as a user runs them: real scripts, two ranks on Gloo, and what they claim."""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fastsync
from tests.forked import run_script
from tests.models import STAMP
from tests.ranks import run_ranks
from tests.refused import refused

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Returns of CartPole: a random policy gets 22 on average, and 500 is the most there is.
BEYOND_RANDOM = 100.0


def on_two_ranks(name: str, *words: str) -> str:
    """Returns the last line that an example prints."""
    return run_script(EXAMPLES / f"{name}.py", *words, nproc=2)


def load(name: str) -> ModuleType:
    module = ModuleType(name)
    SourceFileLoader(name, str(EXAMPLES / f"{name}.py")).exec_module(module)
    return module


def numbers(pattern: str, line: str) -> list[float]:
    match = re.fullmatch(pattern, line)
    assert match, f"{line!r} does not match {pattern!r}"
    return [float(group) for group in match.groups()]


OF_EACH = "mean return of the last {} episodes of each rank, 2 ranks"


@pytest.mark.parametrize(
    ("name", "words", "said", "more_than"),
    [
        ("cleanrl_ppo", "--total-timesteps 12288", OF_EACH.format(50), 50),
        # -1200 at random, -150 at best.
        pytest.param("cleanrl_sac", "--total-timesteps 12000", OF_EACH.format(8), -800, marks=pytest.mark.slow),
        ("pufferlib_ppo", "", "mean return of 2 ranks in the last 5 updates", BEYOND_RANDOM),
        ("sb3_ppo", "--total-timesteps 6000", "mean return of 2 x 10 episodes", 60),
        ("skrl_ppo", "", OF_EACH.format(50), BEYOND_RANDOM),
        pytest.param("torchrl_ppo", "--total-timesteps 8192", OF_EACH.format(20), 50, marks=pytest.mark.slow),
    ],
)
def test_learns(name: str, words: str, said: str, more_than: float):
    needs_its_package(name)
    (mean_return,) = numbers(rf"{said}: ([-\d.]+)", on_two_ranks(name, *words.split()))
    assert mean_return > more_than


def test_the_image_classifier_learns_and_goes_on_bitwise(tmp_path: Path):
    at_once, with_pause = tmp_path / "at_once.pt", tmp_path / "with_pause.pt"
    settings = ("--data", "shapes", "--epochs")
    said = on_two_ranks("image_classifier", *settings, "4", "--checkpoint", str(at_once))
    on_two_ranks("image_classifier", *settings, "2", "--checkpoint", str(with_pause))
    went_on = on_two_ranks("image_classifier", *settings, "4", "--checkpoint", str(with_pause))
    assert went_on == said
    (last,) = numbers(r"epoch 4: loss [\d.]+, ([\d.]+)% of the test images right", said)
    assert last > 90
    one, other = (torch.load(path)["model"] for path in (at_once, with_pause))
    for name, weights in one.items():
        assert torch.equal(weights, other[name]), name


def needs_its_package(name: str) -> None:
    """Skips the examples whose packages `make test-trainers` has environments for."""
    package = {
        "hf_trainer": "transformers", "lightning_ddp": "lightning", "pufferlib_ppo": "pufferlib",
        "rl_games_ppo": "rl_games", "rsl_rl_ppo": "rsl_rl", "skrl_ppo": "skrl", "torchrl_ppo": "torchrl",
    }.get(name)  # fmt: skip
    if package:
        pytest.importorskip(package, reason=f"make test-trainers has an environment with {package}")


def test_atari_ends_with_the_weights_of_cleanrls_own_all_reduce():
    for weights, of_cleanrls_own in run_ranks(play_breakout_twice, 2, timeout=120.0):
        for name, tensor in weights.items():
            assert torch.equal(tensor, of_cleanrls_own[name]), name


def play_breakout_twice(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    module = load("cleanrl_ppo_atari")
    args = module.Args(total_timesteps=64, num_envs=2, num_steps=16)
    weights = []
    for reduce in (fastsync.all_reduce_gradients, concatenate_and_copy_back):
        with mock.patch.object(fastsync, "all_reduce_gradients", reduce):
            weights.append(module.main(args, torch.device("cpu")).state_dict())
    return weights


def concatenate_and_copy_back(parameters: Iterable[torch.nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    together = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(together)
    for gradient, part in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / dist.get_world_size())


@pytest.mark.parametrize("name", ["rl_games_ppo", "rsl_rl_ppo"])
def test_ranks_adapt_their_learning_rate_alike(name: str):
    needs_its_package(name)
    line = on_two_ranks(name)
    mean_return, _, rates = line.partition("; learning rates ")
    (found,) = numbers(r"mean return of 2 ranks ([-\d.]+)", mean_return)
    assert name == "rl_games_ppo" or found > -900  # about -1200 at random
    first, other = ast.literal_eval(rates)
    assert first == other != 1e-3


def after_it_has_learnt(line: str, factor: float = 0.25) -> str:
    """What a line says after "loss first -> last; ", where the last is so much smaller."""
    losses, _, rest = line.partition("; ")
    first, last = numbers(r"loss ([\d.]+) -> ([\d.]+)", losses)
    assert last < first * factor
    return rest


def test_rsl_rl_learns_the_same_either_way():
    said = after_it_has_learnt(on_two_ranks("rsl_rl_reduce_parameters"))
    # The norms that clip are summed in another order.
    assert numbers(r"attached, weights differ by at most (\S+)", said)[0] < 1e-5


def test_skrl_skips_the_same_step_on_all_ranks():
    assert after_it_has_learnt(on_two_ranks("skrl_per_model")) == "steps skipped, by rank: [[20], [20]]"


def test_two_pipelines_train_a_transformer():
    said = after_it_has_learnt(run_script(EXAMPLES / "pipeline_transformer.py", nproc=4))
    assert numbers(r"\d+ steps over (\d+) pipelines", said) == [2]


def test_experts_are_trained_the_same_on_any_number_of_ranks():
    lines = [run_script(EXAMPLES / "mixture_of_experts.py", nproc=nproc) for nproc in (0, 2, 4)]
    first = [numbers(r"loss ([\d.]+) -> .* first step ([\d.]+), \d of 4 experts a rank", line) for line in lines]
    assert first[1:] == [pytest.approx(first[0], rel=2e-3)] * 2
    for line in lines:
        after_it_has_learnt(line)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "factor", "steps", "elements"),
    [
        ("hf_trainer", 0.75, 60, None),
        # 4 epochs of 4096 rows in batches of 64 on each of 2 ranks, through a network with one hidden layer.
        ("lightning_ddp", 0.25, 4 * 4096 / (2 * 64), (16 + 1) * 64 + (64 + 1)),
        ("accelerate_ddp", 0.25, 4 * 4096 / (2 * 64), (16 + 1) * 64 + (64 + 1)),
    ],
)
def test_learns_with_two_bytes_a_gradient(name: str, factor: float, steps: float, elements: float | None):
    needs_its_package(name)
    said = after_it_has_learnt(on_two_ranks(name), factor)
    num_steps, num_elements, num_bytes = numbers(r"(\d+) steps of (\d+) gradients in (\d+) bytes", said)
    assert (num_steps, num_elements) == (steps, elements or num_elements)
    # Beside them goes a stamp, at the width of its transport.
    assert 0 < num_bytes / num_steps - 2 * num_elements <= 4 * STAMP * 2 + 2


def test_elastic_ranks_go_on_without_one_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-m", "fastsync.cli", "launch", "local", "-n", "3", str(EXAMPLES / "elastic.py")]
    with subprocess.Popen(
        [*command, "--steps", "400"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launched:
        assert launched.stdout is not None
        assert "loss" in launched.stdout.readline()  # rank 0 has taken its first step
        victim = next(int(pid) for pid in children_of(launched.pid) if b"\0RANK=1\0" in environment_of(pid))
        os.kill(victim, signal.SIGKILL)
        out, err = launched.communicate(timeout=120)
    assert launched.returncode == 0, err
    assert "rank 1 was ended by SIGKILL; 2 ranks go on" in err
    assert re.search(r"^done: loss [\d.]+ on 2 ranks$", out, re.MULTILINE)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def environment_of(pid: str) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def test_bits_are_the_same_on_any_number_of_ranks():
    command = [sys.executable, str(EXAMPLES / "same_bits.py")]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    hashes, ranks = zip(*(line.split("  ") for line in lines), strict=True)
    assert ranks == ("1 ranks", "2 ranks", "4 ranks", "3 ranks, of which one is killed")
    assert len(hashes[0]) == 64
    assert {*hashes} == {hashes[0]}


def test_hugging_faces_callback_asks_for_its_trainer():
    hf_trainer = pytest.importorskip("fastsync.integrations.transformers", exc_type=ImportError)
    refused(lambda: hf_trainer.FastsyncCallback("fp16"), "trainer:")


@pytest.mark.parametrize("name", ["ppo_own_loss", "ppo_layer_norm", "ppo_own_metric"])
def test_ppo_is_changed_on_two_ranks(name: str, tmp_path: Path):
    arguments = ("--total-steps", "2000", "--runs-dir", str(tmp_path))
    assert on_two_ranks(name, *arguments).startswith("written to")


# What examples are run with alone, and say then.
ALONE = {
    "cleanrl_ppo_atari": ("--total-timesteps 32 --num-envs 2 --num-steps 16", "32 steps"),
    "cleanrl_sac": ("--total-timesteps 2000", "1 ranks"),
    "image_classifier": ("--epochs 1", "epoch 1: loss"),
    "pipeline_transformer": ("", "over 1 pipelines"),
    "pufferlib_ppo": ("", "mean return of 1 ranks"),
    "rl_games_ppo": ("", "learning rates [0.0"),
    "rsl_rl_reduce_parameters": ("", "loss"),
    "sb3_ppo": ("--total-timesteps 1000", "mean return of 1 x 10 episodes"),
    "skrl_per_model": ("", "by rank: [[20]]"),
    "torchrl_ppo": ("--total-timesteps 2000", "1 ranks"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_enough(name: str):
    needs_its_package(name)
    words, result = ALONE[name]
    assert result in run_script(EXAMPLES / f"{name}.py", *words.split(), nproc=0)


@pytest.mark.parametrize("name", ["cleanrl_sac", "torchrl_ppo"])
def test_what_learns_slowly_runs_on_two_ranks(name: str):
    needs_its_package(name)
    assert "2 ranks" in on_two_ranks(name, *ALONE[name][0].split())


def test_the_index_has_every_example():
    linked = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(linked) == sorted(script.name for script in EXAMPLES.glob("*.py"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    for name, package, message in (
        ("sb3_ppo", "stable_baselines3", "pip install stable-baselines3 tyro"),
        ("cleanrl_ppo_atari", "ale_py", "pip install 'gymnasium>=1.4' ale-py opencv-python-headless tyro"),
        ("pufferlib_ppo", "pufferlib", "see test-trainers in the Makefile"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(SystemExit, match=rf"^this example needs .*: {message}$"):
                runpy.run_path(str(EXAMPLES / f"{name}.py"))
