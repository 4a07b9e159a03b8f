"""What a user changes is what runs, in the files or by an argument: loss, network, advantages. And the run says so."""

from __future__ import annotations

import csv
import inspect
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastsync
from examples.ppo_layer_norm import Normalised
from examples.ppo_own_loss import annealed_and_penalised
from examples.ppo_own_metric import with_value_error
from fastsync.ppo.cli import Arguments, check_environment, parse
from fastsync.ppo.distributions import categorical, choose
from fastsync.ppo.evaluate import main
from fastsync.ppo.fingerprint import fingerprint
from fastsync.ppo.fused import Operator, Perceptron, fuse
from fastsync.ppo.names import resolve
from fastsync.ppo.policies import ActorCritic, Policy, make_policy
from fastsync.ppo.ppo import Batch, Evaluated, Settings, minibatch_loss, ppo_loss, train
from fastsync.ppo.runs.folder import check_run
from fastsync.ppo.settings import load_settings
from tests.ranks import RankError, run_ranks
from tests.refused import refused
from tests.toy_envs import Countdown

TINY = Settings(total_steps=600, num_envs=4, num_steps=16, num_epochs=2)
OPERATORS = (ppo_loss, categorical, choose, Operator(minibatch_loss))
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


def last_run(folder: Path) -> Path:
    return max(folder.glob("run *"), key=lambda path: path.stat().st_mtime)


def rows_of_last(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((last_run(folder) / "progress.csv").open()))


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


def test_an_exception_in_the_plain_loss_is_reached(tmp_path: Path):
    own = edited(ppo_loss, tmp_path, "    ratio = log_ratio.exp()", "    raise KeyError('of my own')")
    batch = Batch(*(torch.ones(3) for _ in fields(Batch)))
    with pytest.raises(KeyError, match="of my own"):
        own(Evaluated(*(torch.ones(3) for _ in Evaluated._fields)), batch, TINY, 1.0)


EDITS = {
    "nothing": ("policies.py", "", ""),
    "SiLU": ("policies.py", '"tanh": nn.Tanh', '"tanh": nn.SiLU'),
}


@pytest.mark.end_to_end
def test_what_is_edited_in_the_files_runs(tmp_path: Path):
    """In copies of the package, as a user has them in a checkout."""
    said = {}
    for name, (file, old, new) in EDITS.items():
        folder = tmp_path / name
        shutil.copytree(Path(fastsync.__file__).parent, folder / "fastsync", ignore=shutil.ignore_patterns("*.pyc"))
        edited_file = folder / "fastsync" / "ppo" / file
        assert old in edited_file.read_text()
        edited_file.write_text(edited_file.read_text().replace(old, new))
        command = [sys.executable, "-m", "fastsync.ppo", "--total-steps", "3000", "--run-name", "run 0"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    returns = {name: [row["episodes/return"] for row in rows_of_last(tmp_path / name / "runs")] for name in said}
    assert returns["SiLU"] != returns["nothing"]
    assert "fused operators run for actor, choose, critic, categorical, minibatch_loss" in said["nothing"]
    assert "fused operators run for choose, categorical, ppo_loss;\nplain" in said["SiLU"]


def without_operators(rank: int, world_size: int, settings: Settings) -> tuple[Weights, str, bool]:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("an operator has run")

    for each in OPERATORS:
        each._operator = refuse
    modules = make_policy(settings, VECTOR, TWO).modules()
    return *train_once(rank, world_size, settings, {}), any(isinstance(module, Perceptron) for module in modules)


def test_without_fused_operators_all_is_plain_and_learns_the_same(tmp_path: Path):
    fused, said = trained(tmp_path)
    assert "fused operators run for actor, choose, critic, categorical, minibatch_loss;\nplain" in said
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="plain", fused=False)
    ((plain, said, has_fused),) = run_ranks(without_operators, 1, settings)
    assert "everything runs in plain PyTorch" in said
    assert not has_fused
    assert_close(fused, plain)
    assert parse(Arguments, "test", ["--no-fused"]).settings == Settings(fused=False)


def test_a_loss_of_ones_own_runs_and_its_figures_are_logged(tmp_path: Path):
    settings = replace(TINY, num_micro_batches=2, target_kl=0.1)
    usual, _ = trained(tmp_path, settings, world_size=2)
    changed, said = trained(tmp_path, settings, world_size=2, loss=annealed_and_penalised)
    assert not are_equal(usual, changed)
    assert "everything else: annealed_and_penalised, estimate_advantages" in said
    assert re.search(r"  kl_penalty \d", said)
    for row in rows_of_last(tmp_path):
        assert float(row["learning/kl_penalty"]) >= 0


def lost(new: Any, batch: Batch, settings: Settings, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Has no metric of ppo_loss."""
    loss = new.values.mean() * float("nan")
    return loss, {"my_loss": loss.detach()}


def test_a_loss_of_ones_own_that_is_nan_ends_the_run(tmp_path: Path):
    refused(lambda: trained(tmp_path, loss=lost), "grad_norm of rank 0 in update 1 are not finite", kind=RankError)


def test_a_metric_of_ones_own_is_in_every_log_and_changes_nothing(tmp_path: Path):
    usual, _ = trained(tmp_path)
    weights, said = trained(tmp_path, loss=with_value_error)
    assert are_equal(usual, weights)
    assert "  value_error " in said
    values = [float(row["learning/value_error"]) for row in rows_of_last(tmp_path)]
    assert min(values) > 0
    log = EventAccumulator(str(last_run(tmp_path))).Reload()
    assert [event.value for event in log.Scalars("learning/value_error")] == pytest.approx(values)


def test_under_autocast_layers_run_by_themselves_and_the_run_says_so(tmp_path: Path):
    _, said = trained(tmp_path, replace(TINY, precision="bf16"))
    assert "fused operators run for choose, categorical, ppo_loss;\nplain PyTorch runs for everything" in said
    assert "estimate_advantages, actor, critic" in said


def without_metrics(new: Any, *_: Any) -> Any:
    return new.log_prob.sum()


def with_a_row_for_a_metric(new: Any, batch: Any, settings: Any, remaining: float) -> Any:
    return new.log_prob.sum(), {"number": 1.5, "mine": new.values}


def test_a_loss_that_returns_something_else_is_told_what_to_return(tmp_path: Path):
    for loss, message in (
        (without_metrics, r"the loss must return \(loss, metrics\)"),
        (with_a_row_for_a_metric, r"must return 0-dim metrics; mine has shape \(16,\)"),
    ):
        with pytest.raises(RankError, match=message):
            trained(tmp_path, loss=loss)


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
    assert "resuming from step" in said
    assert "value_penalty is 0.25 from here on, it was 0.1" in said


def of_one_step(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, settings: Settings
) -> Tensor:
    return rewards + settings.gamma * next_values * ~terminated - values


def test_advantages_of_ones_own_are_what_is_learnt_from(tmp_path: Path):
    one_step, said = trained(tmp_path, advantages=of_one_step)
    assert "fused operators run for actor, choose, critic, categorical, minibatch_loss;\nplain" in said
    assert "everything else: of_one_step" in said
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
    assert main([str(next(by_class.glob("run *"))), "--episodes", "2"]) == 0  # the run has noted its name


def test_a_network_without_a_name_is_not_mistaken_for_another(tmp_path: Path):
    trained(tmp_path, policy=partial(Normalised))
    refused(lambda: main([str(next(tmp_path.glob("run *")))]), ":Normalised)' has no name to")


def test_a_run_with_a_loss_of_ones_own_goes_on_with_it_and_with_no_other(tmp_path: Path):
    """By its settings alone, and not with another loss unless that is asked for."""
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="mine", resume="auto")
    run_ranks(train_once, 1, settings, {"loss": with_value_error, "advantages": of_one_step})
    noted = load_settings(str(tmp_path / "mine" / "settings.yaml"), Settings)
    assert noted.loss == "examples.ppo_own_metric:with_value_error"
    assert noted.advantages == f"{__name__}:of_one_step"
    by_name = replace(noted, resume="auto", total_steps=1200)
    run_ranks(train_once, 1, by_name, {})
    rows = list(csv.DictReader((tmp_path / "mine" / "progress.csv").open()))
    assert int(rows[-1]["step"]) >= 1200
    assert all(float(row["learning/value_error"]) > 0 for row in rows)
    for other, changes in (
        (replace(by_name, loss=None), {}),
        (replace(by_name, advantages=None), {}),
        (replace(by_name, loss=None), {"loss": annealed_and_penalised}),
    ):
        refused(lambda: run_ranks(train_once, 1, other, changes), "would resume a run with", kind=RankError)
        refused(
            lambda: check_run(resolve(other, loss=(changes.get("loss"), ppo_loss))[0], 1), "would resume a run with"
        )
    told = replace(by_name, loss=None, total_steps=1800, allow_other_loss=True)
    ((_, said),) = run_ranks(train_once, 1, told, {})
    assert "loss is None from here on, it was 'examples.ppo_own_metric:with_value_error'" in said
    assert load_settings(str(tmp_path / "mine" / "settings.yaml"), Settings).allow_other_loss is False


def scaled(new: Evaluated, batch: Batch, settings: Settings, remaining: float, by: nn.Module) -> Any:
    loss, metrics = ppo_loss(new, batch, settings, remaining)
    return by(loss), metrics


def test_a_script_resumes_by_the_same_arguments(tmp_path: Path):
    """Each start makes objects of its own, whose addresses differ, such as with --max-restarts."""
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="mine", resume="auto")
    kept = [nn.Identity(), nn.Identity()]  # at two addresses
    for steps, network in zip((600, 1200), kept, strict=True):
        given = {"policy": partial(with_extra, extra=network), "loss": partial(scaled, by=network)}
        run_ranks(train_once, 1, replace(settings, total_steps=steps), given)
    rows = list(csv.DictReader((tmp_path / "mine" / "progress.csv").open()))
    assert int(rows[-1]["step"]) >= 1200
    for changes, name in (({"policy": given["policy"]}, "loss"), ({"loss": given["loss"]}, "policy")):
        known = resolve(settings, (changes.get("policy"), ActorCritic), (changes.get("loss"), ppo_loss))[0]
        with pytest.raises(ValueError, match=rf"{name}='functools:partial.*; resume by the script that passed it"):
            check_run(known, 1)


def with_extra(*args: Any, extra: nn.Module) -> Policy:
    return ActorCritic(*args)


def test_a_function_that_is_given_twice_or_cannot_be_found_is_refused():
    with pytest.raises(ValueError, match=r"loss='elsewhere:mine' in the settings, and loss='.*:lost' in train"):
        resolve(replace(TINY, loss="elsewhere:mine"), loss=(lost, ppo_loss))
    for loss, reason in (("nowhere:f", "ModuleNotFoundError"), ("math:pi", "has to be a function"), ("f", "module:")):
        with pytest.raises(ValueError, match=f"loss='{loss}' .*{reason}"):
            check_environment(replace(TINY, loss=loss))


SCRIPT = """
from fastsync.ppo import Settings, ppo_loss, train

def mine(new, batch, settings, remaining):
    loss, metrics = ppo_loss(new, batch, settings, remaining)
    return 2 * loss, metrics

train(Settings(total_steps=200, num_envs=2, num_steps=16, run_name="mine", quiet=True), loss=mine)
"""


@pytest.mark.end_to_end
def test_a_script_is_found_by_its_file_and_told_if_it_trains_when_it_is_imported(tmp_path: Path):
    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
        return done.returncode, done.stderr

    script = tmp_path / "scripts" / "once.py"
    script.parent.mkdir()
    script.write_text(SCRIPT, encoding="utf-8")
    assert run("scripts/once.py") == (0, "")
    resume = ("-m", "fastsync.ppo", "--config", "runs/mine/settings.yaml", "--resume", "auto", "--total-steps", "300")
    status, said = run(*resume)
    assert status == 2
    assert "loss='scripts/once.py:mine' cannot be imported: RuntimeError: the module once calls" in said
    script.write_text(SCRIPT.replace("train(S", 'if __name__ == "__main__":\n    train(S'), encoding="utf-8")
    assert run(*resume) == (0, "")


class Recomputed(ActorCritic):
    """As in docs/guides/change_it.md."""

    def forward(self, observations: Tensor) -> Any:
        return checkpoint(super().forward, observations, use_reentrant=False)


def test_activations_may_be_recomputed(tmp_path: Path):
    plain = replace(TINY, fused=False, bucket_cap_mb=0.001)
    assert are_equal(trained(tmp_path, plain, world_size=2, policy=Recomputed)[0], trained(tmp_path, plain, 2)[0])


def test_a_policy_that_cannot_be_made_is_named_before_ranks_start():
    check_environment(replace(TINY, policy="examples.ppo_layer_norm:Normalised"))
    reasons = {
        "nowhere:Policy": "cannot be imported: ModuleNotFoundError",
        "Policy": "must be module:Class",
        "builtins:divmod": "cannot be used: TypeError: divmod expected 2",
        f"{__name__}:WrongShapes": r"computes outputs \(1, 2\) and values \(\) of one observation; they must be",
        f"{__name__}:ActorOnly": r"has no critic; set self.critic in its __init__, a module as in ActorCritic",
        f"{__name__}:no_policy": "made a Linear; it has to be a fastsync.ppo.Policy",
        f"{__name__}:in_16_bits": "has parameters of torch.bfloat16; leave them in float32, and set precision",
    }
    for policy, reason in reasons.items():
        with pytest.raises(ValueError, match=f"policy='{policy}' {reason}"):
            check_environment(replace(TINY, policy=policy))


class WrongShapes(Policy):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.actor, self.critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


class ActorOnly(Policy):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.actor = nn.Linear(4, 2)


def in_16_bits(*arguments: Any) -> Policy:
    policy = ActorCritic(*arguments)
    policy.critic.bfloat16()
    return policy


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


def test_a_name_that_no_info_has_is_told(tmp_path: Path):
    settings = replace(TINY, env=f"{__name__}:Informed", log_info=("left", "nothing"), runs_dir=str(tmp_path))
    (said,) = run_ranks(what_it_says, 1, settings)
    assert "warning: log_info='nothing': since the run began, no environment has put a finite number" in said
    assert "log_info='left'" not in said


def what_it_says(rank: int, world_size: int, settings: Settings) -> str:
    with redirect_stderr(StringIO()) as errors, redirect_stdout(StringIO()) as said:
        train(settings, torch.device("cpu"))
    return said.getvalue() + errors.getvalue()


def test_the_reference_has_every_public_name():
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
    described = re.findall(r"auto(?:function|class):: fastsync\.ppo\.(\w+)$", reference, re.MULTILINE)
    assert sorted(described) == sorted(fastsync.ppo.__all__)
