"""Policies in files of ONNX and TorchScript: they act as ``load_policy`` does, and what does not is not written."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd

from fastsync.cli import main
from fastsync.ppo.envs.make import make_one
from fastsync.ppo.evaluate import load_policy
from fastsync.ppo.export import ONNX_PACKAGES
from fastsync.ppo.policies import ActorCritic, make_policy
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import CheckpointFolder, kinds_of
from fastsync.ppo.runs.folder import CHECKPOINTS
from tests.ppo.test_runs_checkpoints import make_checkpoint
from tests.toy_envs import FaultyReset

HAS_ONNX = all(find_spec(name) for name in ONNX_PACKAGES)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("FromFive", {"norm_observations": True}),
    ("Wide", {"norm_observations": True, "hidden_sizes": (8,), "activation": "elu"}),
    ("Several", {"network": "shared"}),
    ("Image", {}),
    ("Seeing", {"norm_observations": True}),
    ("SeveralForbidden", {}),
    ("PrivilegedForbids", {"critic_keys": ("state",)}),
    ("masked_cart_pole", {"recurrent": "lstm"}),
    ("Wide", {"recurrent": "gru"}),
]


def saved(run: Path, **given: Any) -> Path:
    """The folder of a run whose policy has weights at random, and has seen observations."""
    settings = Settings(**given)
    with make_one(settings) as environment:
        spaces = environment.single_observation_space, environment.single_action_space
    torch.manual_seed(0)
    policy = make_policy(settings, *spaces)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if policy.normalizer is not None:
            policy.normalizer.mean.uniform_(-1, 3)
            policy.normalizer.variance.uniform_(0.5, 2)
    checkpoint = make_checkpoint(1, settings=settings.as_dict(), spaces=kinds_of(*spaces))
    checkpoint = replace(checkpoint, learner=checkpoint.learner | {"model": policy.state_dict()})
    CheckpointFolder(run / CHECKPOINTS).save(checkpoint, 1.0)
    return run


@pytest.mark.parametrize(("env", "given"), KINDS)
def test_an_exported_policy_acts_as_the_one_that_was_trained(
    env: str, given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = saved(tmp_path / "run", env=f"tests.toy_envs:{env}", **given)
    files = {"torchscript": tmp_path / "policy.pt"} | ({"onnx": tmp_path / "policy.onnx"} if HAS_ONNX else {})
    words = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert main(["export", str(run), *words]) == 0
    said = capsys.readouterr().out
    assert said.count("over 1,000 observations") == len(files)
    assert all(float(allowed) < 0.05 for allowed in re.findall(r"\((\S+) is allowed", said))  # also with masks

    policy = load_policy(run)
    with make_one(Settings(env=f"tests.toy_envs:{env}")) as environment:
        rows = np.stack([environment.reset()[0] for _ in range(7)])
    rows = rows[:, policy.parts.num_critic :] if policy.parts else rows  # nobody needs the others to act
    seen = torch.from_numpy(rows).to(policy.observation_dtype)
    memory = policy.new_memory(len(rows))
    memory.states = torch.randn_like(memory.states)
    inputs = [seen] if policy.recurrent is None else [seen, memory.states]
    acted = [torch.jit.load(files["torchscript"])(*inputs)[0].numpy()]  # type: ignore[no-untyped-call]
    if HAS_ONNX:
        import onnxruntime

        named = dict(zip(("observations", "states"), (each.numpy() for each in inputs), strict=False))
        acted += onnxruntime.InferenceSession(files["onnx"]).run(["actions"], named)
    expected = policy.act(rows, **({} if policy.recurrent is None else {"memory": memory}))
    for actions in acted:
        assert (actions.dtype, actions.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)


class Moody(ActorCritic):
    """Decides by how much it sees, which no trace follows."""

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        return super().outputs(features) * (1 if len(features) > 10 else -1)


def test_a_policy_that_would_act_otherwise_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = saved(tmp_path / "run", env="tests.toy_envs:Countdown", policy=f"{__name__}:Moody")
    with mock.patch("fastsync.ppo.export.NUM_OBSERVATIONS", 50):
        assert main(["export", str(run), "--torchscript", str(tmp_path / "policy.pt")]) == 1
    assert "is allowed" in capsys.readouterr().err
    assert not (tmp_path / "policy.pt").exists()


class Subtracts(ActorCritic):
    """Sees what is left of times after their start, which float32 cannot hold."""

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        return super().outputs(features - features[..., 1:2])


def test_it_is_compared_with_the_policy_in_its_own_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = saved(tmp_path / "run", env="tests.toy_envs:late", policy=f"{__name__}:Subtracts", precision="fp64")
    with mock.patch("fastsync.ppo.export.NUM_OBSERVATIONS", 50):
        assert main(["export", str(run), "--torchscript", str(tmp_path / "policy.pt")]) == 1
    assert "is allowed" in capsys.readouterr().err


class Smoothed(FaultyReset):
    def __init__(self) -> None:
        self.statistics = RunningMeanStd()


def test_notes_and_failures_of_the_environment_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = saved(tmp_path / "run", env=f"{__name__}:Smoothed")
    assert main(["export", str(run), "--torchscript", str(tmp_path / "policy.pt")]) == 1
    said = capsys.readouterr().err
    assert "fastsync export: warning: Smoothed in env=" in said
    assert "fastsync export: environment" in said


def test_what_is_typed_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = str(saved(tmp_path / "run", env="tests.toy_envs:Countdown"))
    nowhere = str(tmp_path / "nowhere" / "policy.pt")
    for words, told in {
        (): "say which run to export; ",
        (run,): "say which file to write",
        (run, "--onnx", "one", "--torchscript", "one"): "they are two files",
        (str(tmp_path), "--torchscript", "one"): "neither a checkpoint nor the folder of a run",
        (run, "--torchscript", nowhere): f"{nowhere} cannot be written: No such file or directory",
    }.items():
        assert main(["export", *words]) == 2
        assert told in capsys.readouterr().err
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert main(["export", run, "--onnx", "policy.onnx"]) == 2
    assert "onnx='policy.onnx' needs onnx, onnxscript, onnxruntime: pip install" in capsys.readouterr().err
