"""What a user changes is what runs, in the file or by an argument: loss, network, advantages. And the run says so."""

from __future__ import annotations

import csv
import inspect
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from examples.ppo_layer_norm import Normalised
from examples.ppo_own_loss import annealed_and_penalised
from fastsync.ppo.cli import Arguments, check_environment, parse
from fastsync.ppo.evaluate import main
from fastsync.ppo.fused import Operator, Perceptron, fingerprint, fuse
from fastsync.ppo.policies import categorical, make_policy
from fastsync.ppo.ppo import Settings, discounted_sums, ppo_loss, train
from tests.ranks import run_ranks
from tests.toy_envs import Countdown

TINY = Settings(total_steps=600, num_envs=4, num_steps=16, num_epochs=2)
OPERATORS = (ppo_loss, discounted_sums, categorical)
VECTOR, TWO = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
Weights = dict[str, Tensor]


def train_once(rank: int, world_size: int, settings: Settings, changes: dict[str, Any]) -> tuple[Weights, str]:
    """The weights, and what the run said."""
    said = Path(settings.runs_dir) / f"said by {rank}"
    with said.open("w") as out, redirect_stdout(out):
        policy, _ = train(settings, torch.device("cpu"), **changes)
    return policy.state_dict(), said.read_text()


def trained(folder: Path, settings: Settings = TINY, world_size: int = 1, **changes: Any) -> tuple[Weights, str]:
    settings = replace(settings, runs_dir=str(folder), run_name=f"run {len(list(folder.iterdir()))}")
    return run_ranks(train_once, world_size, settings, changes)[0]  # type: ignore[no-any-return]


def rows_of_last(folder: Path) -> list[dict[str, str]]:
    newest = max(folder.glob("run */progress.csv"), key=lambda path: path.stat().st_mtime)
    return list(csv.DictReader(newest.open()))


def are_equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close(one: Weights, other: Weights) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


def test_operators_are_proven_equal_to_what_is_written():
    """After a change of a plain function change its operator, prove it equal in tests/ppo/test_ops.py, and note the
    function's fingerprint in fused.py. Or do not: then plain PyTorch runs."""
    for each in OPERATORS:
        assert each.is_proven, f"{each.__name__} has the fingerprint {fingerprint(each.plain)} now"


def edited(each: Operator[Any], folder: Path, old: str, new: str) -> Operator[Any]:
    """The function as if a user had edited its file."""
    _, source = inspect.getsource(each.plain).split("\n", 1)  # without the decorator
    assert old in source
    file = folder / f"edited_{len(list(folder.iterdir()))}.py"
    file.write_text(source.replace(old, new))
    scope = dict(each.plain.__globals__)
    exec(compile(file.read_text(), str(file), "exec"), scope)
    return Operator(scope[each.__name__])


def test_an_edited_function_runs_and_an_edited_comment_changes_nothing(tmp_path: Path):
    logits, actions = torch.randn(3, 4), torch.tensor([0, 1, 2])
    twice = edited(categorical, tmp_path, "-(log_probabilities.exp()", "-2 * (log_probabilities.exp()")
    assert not twice.is_proven
    torch.testing.assert_close(twice(logits, actions)[1], 2 * categorical(logits, actions)[1])
    same = edited(categorical, tmp_path, "    entropy =", "    # of each row\n    entropy =")
    assert same.is_proven
    assert torch.equal(same(logits, actions)[1], categorical(logits, actions)[1])


@pytest.mark.parametrize("layer", [nn.SiLU(), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)])
def test_layers_that_the_operator_does_not_know_are_not_fused(layer: nn.Module):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    known = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = torch.randn(3, 4)
    fuse(network)
    fuse(known)
    assert (type(network), type(known)) == (nn.Sequential, Perceptron)
    known[1] = layer  # also later
    assert torch.equal(known(rows), nn.Sequential(*known)(rows))


def without_operators(rank: int, world_size: int, settings: Settings) -> tuple[Weights, str, bool]:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("an operator has run")

    for each in OPERATORS:
        each._operator = refuse
    modules = make_policy(settings, VECTOR, TWO).modules()
    return *train_once(rank, world_size, settings, {}), any(isinstance(module, Perceptron) for module in modules)


def test_without_fused_operators_all_is_plain_and_learns_the_same(tmp_path: Path):
    fused, said = trained(tmp_path)
    assert "fused operators compute actor, critic, ppo_loss, discounted_sums, categorical; all else" in said
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="plain", fused=False)
    ((plain, said, has_fused),) = run_ranks(without_operators, 1, settings)
    assert "all of it runs in plain PyTorch" in said
    assert not has_fused
    assert_close(fused, plain)
    assert parse(Arguments, "test", ["--no-fused"]).settings == Settings(fused=False)


def test_a_loss_of_ones_own_runs_and_its_figures_are_logged(tmp_path: Path):
    settings = replace(TINY, num_micro_batches=2, target_kl=0.1)
    usual, _ = trained(tmp_path, settings, world_size=2)
    changed, said = trained(tmp_path, settings, world_size=2, loss=annealed_and_penalised)
    assert not are_equal(usual, changed)
    assert "compute actor, critic, ppo_loss, discounted_sums, categorical; all else" in said
    assert "plain PyTorch: annealed_and_penalised" in said
    for row in rows_of_last(tmp_path):
        assert float(row["learning/kl_penalty"]) >= 0
        assert float(row["learning/value_error"]) > 0


def penalised_by_a_setting(new: Any, batch: Any, settings: Any, remaining: float) -> Any:
    loss, figures = ppo_loss(new, batch, settings, remaining)
    return loss + settings.value_penalty * (new.values.square() * batch.weights).sum(), figures


@dataclass(frozen=True)
class MySettings(Settings):
    value_penalty: float = 0.1


def test_settings_of_ones_own_go_on_with_their_run(tmp_path: Path):
    settings = MySettings(
        total_steps=600, num_envs=4, num_steps=16, runs_dir=str(tmp_path), run_name="mine", resume="auto"
    )
    changes = {"loss": penalised_by_a_setting}
    run_ranks(train_once, 1, settings, changes)
    ((_, said),) = run_ranks(train_once, 1, replace(settings, total_steps=1200, value_penalty=0.25), changes)
    assert "going on from step" in said
    assert "value_penalty is 0.25 from here on, after 0.1" in said


def of_one_step(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, settings: Settings
) -> Tensor:
    return rewards + settings.gamma * next_values * ~terminated - values


def test_advantages_of_ones_own_are_what_is_learnt_from(tmp_path: Path):
    one_step, said = trained(tmp_path, advantages=of_one_step)
    assert "compute actor, critic, ppo_loss, categorical; all else runs in plain PyTorch: of_one_step" in said
    assert are_equal(one_step, trained(tmp_path, replace(TINY, gae_lambda=0.0))[0])
    assert not are_equal(one_step, trained(tmp_path)[0])


def test_a_network_of_ones_own_is_trained_saved_and_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    by_name, _ = trained(tmp_path, replace(TINY, policy="examples.ppo_layer_norm:Normalised"), world_size=2)
    assert main([str(next(tmp_path.glob("run *"))), "--episodes", "2"]) == 0
    assert "over 2 episodes" in capsys.readouterr().out
    assert by_name["actor.1.weight"].shape == (64,)  # of the layer normalisation
    by_class = tmp_path / "by class"
    by_class.mkdir()
    assert are_equal(by_name, trained(by_class, world_size=2, policy=Normalised)[0])
    with pytest.raises(ValueError, match=r"let Settings\(policy='module:Class'\) name it, so that it is found again"):
        main([str(next(by_class.glob("run *")))])


def test_a_policy_that_cannot_be_made_is_named_before_ranks_start():
    check_environment(replace(TINY, policy="examples.ppo_layer_norm:Normalised"))
    reasons = {
        "nowhere:Policy": "cannot be imported: ModuleNotFoundError",
        "Policy": "must be module:Class",
        "builtins:divmod": "cannot be made: TypeError: divmod expected 2",
        f"{__name__}:no_policy": "made a Linear; it has to be a fastsync.ppo.Policy",
    }
    for policy, reason in reasons.items():
        with pytest.raises(ValueError, match=f"policy='{policy}' {reason}"):
            check_environment(replace(TINY, policy=policy))


def no_policy(*arguments: Any) -> nn.Module:
    return nn.Linear(4, 2)


class Informed(Countdown):
    """Says how many steps are left after each, and at the end how many there were."""

    def step(self, action: Any):
        observation, reward, terminated, truncated, info = super().step(action)
        info["left"] = float(self.remaining)
        if terminated or truncated:
            info["length"] = self.length
        return observation, reward, terminated, truncated, info


def test_numbers_that_an_environment_puts_into_info_are_logged(tmp_path: Path):
    settings = replace(TINY, env=f"{__name__}:Informed", log_info=("left", "length", "nothing"))
    trained(tmp_path, settings, world_size=2)
    for row in rows_of_last(tmp_path):
        assert 0 < float(row["info/left"]) < 3  # n - 1, ..., 0 of n
        assert 2 <= float(row["info/length"]) <= 7
        assert row["info/nothing"] == ""
