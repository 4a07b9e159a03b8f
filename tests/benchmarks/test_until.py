"""``python -m benchmarks ppo --until``: made-up trainings, tiny real ones, trainers that fail; nothing about speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.baselines.compared import COMPARED
from benchmarks.baselines.published import PUBLISHED, THRESHOLDS
from benchmarks.baselines.trainers import ENVIRONMENTS, EVERYTHING, TRAINERS, run_alone
from benchmarks.baselines.training import WINDOW, Outcome, Training, Watch
from benchmarks.commands.until import Options
from benchmarks.harness.collect import TrainingError
from benchmarks.harness.records import Record, RowFile

TINY = Training(
    total_steps=4096, num_envs=4, num_steps=32, num_minibatches=2, num_epochs=1, seed=1, threads=1, until=10.0
)
"""A random policy has a mean return of 22, so that the first 100 episodes are good enough."""


def test_a_watch_tells_when_the_newest_episodes_were_good_enough():
    watch = Watch(replace(TINY, until=10.0))
    assert not watch.look(1, [100.0] * (WINDOW - 1))  # too few
    assert not watch.look(2, [*[100.0] * WINDOW, *[9.0] * WINDOW])  # good, but no longer the newest
    assert watch.look(3, [*[0.0] * WINDOW, *[10.0] * WINDOW])
    assert watch.look(4, [0.0] * WINDOW)  # it stays reached
    reached = watch.outcome(5, [0.0])
    assert (reached.steps, reached.mean_return, reached.reached) == (3, 10.0, True)


def test_a_watch_without_a_threshold_goes_on_to_the_end():
    watch = Watch(replace(TINY, until=None))
    assert not watch.look(1, [100.0] * WINDOW)
    outcome = watch.outcome(5, [0.0] * 50 + [1.0] * WINDOW)
    assert (outcome.steps, outcome.mean_return, outcome.reached) == (5, 1.0, False)
    assert watch.outcome(5, []).mean_return is None


def test_published_hyperparameters_fit_their_rollouts():
    for of_whom in PUBLISHED.values():
        for env, training in of_whom.items():
            assert training.env == env
            assert env in THRESHOLDS
            assert training.batch_size % training.num_minibatches == 0
    # As the zoo's file has them: no batch_size is Stable-Baselines3's 64.
    zoo = PUBLISHED["zoo"]
    assert zoo["CartPole-v1"].minibatch_size == 256
    assert [zoo[env].minibatch_size for env in ("Acrobot-v1", "Pendulum-v1", "LunarLander-v3")] == [64] * 3


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Training]]:
    """What was trained, made up: fastsync takes seed seconds a rank, the rest twice as long; rlox never arrives."""
    trained: list[tuple[str, Training]] = []

    def made_up(trainer: str, training: Training, *, timeout: float, python: str | None) -> Outcome:
        assert python == sys.executable
        trained.append((trainer, training))
        seconds = training.seed * (training.nproc if trainer == "fastsync" else 2.0)
        compiling = 0.5 if trainer in ("sbx", "rejax") else None
        return Outcome(1000, seconds, 480.0, trainer != "rlox", compiling, {"package": "1.0"})

    monkeypatch.setattr("benchmarks.commands.until.run_alone", made_up)
    monkeypatch.setattr("benchmarks.baselines.compared.find_spec", lambda name: name)
    return trained


def test_until_compares_trainers(
    measured: list[tuple[str, Training]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    json_file, plot = tmp_path / "rows.json", tmp_path / "times.svg"
    arguments = ["--repetitions", "5", "--threads", "1", "2", "--json", str(json_file), "--plot", str(plot)]
    assert main(["ppo", "--until", *arguments]) == 0
    rows = [row for row in json.loads(json_file.read_text()) if row["figures"]["reached"] is not None]
    methods = {row["method"]: row for row in rows}
    assert list(methods) == [
        "SB3 DummyVecEnv, 1 thread",
        "SB3 DummyVecEnv, 2 threads",
        "SB3 SubprocVecEnv, 1 thread",
        "SB3 SubprocVecEnv, 2 threads",
        "CleanRL's loop, 1 thread",
        "CleanRL's loop, 2 threads",
        "SBX",
        "rlox, 1 thread",
        "rlox, 2 threads",
        "Rejax, gymnax",
        "fastsync, 1 rank",
        "fastsync, 2 ranks",
    ]
    assert len(rows) == 5 * len(methods)  # a row a training
    of_fastsync = methods["fastsync, 2 ranks"]
    assert of_fastsync["environment"]["package"] == "1.0"
    wanted = {"until": 475.0, "total_steps": 100_000, "num_envs": 8, "nproc": 2, "gae_lambda": 0.8, "seed": 5}
    assert {name: of_fastsync["settings"][name] for name in wanted} == wanted
    printed = capsys.readouterr().out
    lines: dict[str, str] = {}
    for line in printed.splitlines():
        if line.startswith("│"):
            lines.setdefault(line.split("│")[1].strip(), line)
    # The median of 1 to 5 seconds, and with each seed half of Stable-Baselines3's. Of 25 pairs 19 are sooner, 2 equal.
    assert "5/5" in lines["fastsync, 1 rank"]
    assert "3.0 [1" in lines["fastsync, 1 rank"]
    assert "2.00 [2.00, 2.00]" in lines["fastsync, 1 rank"]
    assert "0.80 [" in lines["fastsync, 1 rank"]
    assert "0/5" in lines["rlox, 1 thread"]
    assert "∞" not in printed
    assert "rlox on CartPole-v1, unlike the hyperparameters: the clipping is not annealed" in printed
    assert "<svg" in plot.read_text()
    # The same from the file, without a training.
    number = len(measured)
    assert main(["ppo", "--until", "--rows", str(json_file)]) == 0
    assert len(measured) == number
    again = capsys.readouterr().out
    assert lines["fastsync, 1 rank"] in again
    # Two more seeds, in a file of their own, count together with these, but no seed counts twice.
    more = tmp_path / "more.json"
    assert main(["ppo", "--until", "--first-seed", "6", "--repetitions", "2", "--json", str(more)]) == 0
    assert {training.seed for _, training in measured[number:]} == {6, 7}
    capsys.readouterr()
    assert main(["ppo", "--until", "--rows", str(json_file), str(more)]) == 0
    assert "7/7" in next(line for line in capsys.readouterr().out.splitlines() if "fastsync, 1 rank" in line)
    assert main(["ppo", "--until", "--rows", str(json_file), "--trainers", "sb3", "fastsync"]) == 0
    assert "rlox" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="both have seed 5 of fastsync, 1 rank on CartPole-v1"):
        Options(rows=(json_file, _copied(json_file)))


def _copied(file: Path) -> Path:
    """Only the rows of the last seed."""
    rows = [
        row for row in json.loads(file.read_text()) if row["settings"]["seed"] == 5 and "fastsync, 1" in row["method"]
    ]
    copy = file.with_name("copy.json")
    copy.write_text(json.dumps(rows))
    return copy


def test_until_leaves_out_what_cannot_train_and_says_why(
    measured: list[tuple[str, Training]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "benchmarks.baselines.compared.find_spec", lambda name: name if name == "stable_baselines3" else None
    )
    monkeypatch.setattr("sys.prefix", "/nonexistent")
    assert main(["ppo", "--until", "--env", "LunarLander-v3", "--repetitions", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "SBX is left out, because it is not installed: `make baselines` installs it" in printed
    assert "Rejax, gymnax is left out for LunarLander-v3: gymnax has no LunarLander-v3" in printed
    assert {trainer for trainer, _ in measured} >= {"stable-baselines3", "fastsync"}


def test_a_trainer_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def made_up(trainer: str, training: Training, *, timeout: float, python: str | None) -> Outcome:
        del timeout, python
        if trainer == "cleanrl loop" and training.seed == 2:
            raise TrainingError("cleanrl loop failed:\nTraceback\n  line\nValueError: no luck\n")
        return Outcome(1000, 1.0, 480.0, reached=True)

    monkeypatch.setattr("benchmarks.commands.until.run_alone", made_up)
    rows = RowFile(tmp_path / "rows.json")
    options = ["--trainers", "cleanrl", "fastsync", "--threads", "1", "--nproc", "1", "--repetitions", "3"]
    assert main(["ppo", "--until", *options, "--json", str(rows.path)]) == 1
    trained = [record.method for record in rows.read() if record.figures["reached"] is not None]
    assert trained.count("CleanRL's loop, 1 thread") == 1
    assert trained.count("fastsync, 1 rank") == 3
    printed = capsys.readouterr().out
    assert "CartPole-v1, zoo: CleanRL's loop, 1 thread, seed 2: cleanrl loop failed: ValueError: no luck" in printed


@pytest.mark.end_to_end
def test_a_trainer_that_dies_and_one_that_hangs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = "cleanrl loop" ] && sleep 1000\necho no such module >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("benchmarks.baselines.compared.Trainer.python", lambda self: str(python))
    options = ["--trainers", "cleanrl", "fastsync", "--threads", "1", "--nproc", "1", "--repetitions", "1"]
    assert main(["ppo", "--until", *options, "--timeout", "2"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "CartPole-v1, zoo: CleanRL's loop, 1 thread, seed 1: cleanrl loop has not ended within 2 s" in printed
    assert "CartPole-v1, zoo: fastsync, 1 rank, seed 1: fastsync failed: no such module" in printed


def test_until_goes_on_with_the_rows_that_it_has(
    measured: list[tuple[str, Training]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = RowFile(tmp_path / "rows.json")
    options = ["--trainers", "sb3", "fastsync", "--threads", "1", "--nproc", "1", "--json", str(rows.path)]
    scopes = ["--norm-advantages", "minibatch", "rollout"]
    assert main(["ppo", "--until", *options, "--repetitions", "2", *scopes]) == 0
    methods = [row.method for row in rows.read() if row.figures["reached"] is not None]
    assert methods[:4] == [f"{who}{how}" for who in ("SB3 DummyVecEnv, 1 thread", "fastsync, 1 rank") for how in HOW]
    assert [each.norm_advantages for who, each in measured[:4]] == ["minibatch", "rollout"] * 2
    first = rows.read()
    measured.clear()
    assert main(["ppo", "--until", *options, "--repetitions", "3", *scopes, "--resume"]) == 0
    assert [each.seed for who, each in measured if "alone" not in who] == [3] * 4
    assert rows.read()[: len(first)] == first
    monkeypatch.setattr("benchmarks.commands.until.environment", lambda _: {**first[0].environment, "commit": "other"})
    with pytest.raises(ValueError, match=r"rows with commit .*, and here it is 'other'; write to another file"):
        main(["ppo", "--until", *options, "--resume"])
    assert len(rows.read()) > len(first)


HOW = ("", ", advantages over the rollout")


def test_until_refuses_rows_of_other_benchmarks(tmp_path: Path):
    rows = RowFile(tmp_path / "rows.json")
    rows.add([Record("ppo", "fastsync", {}, {}, True, [1.0], {})])
    with pytest.raises(ValueError, match=r"rows.json has rows of another benchmark than ppo --until"):
        Options(rows=(rows.path,))


def test_without_gsde_nobody_has_it(measured: list[tuple[str, Training]], capsys: pytest.CaptureFixture[str]):
    options = ["--env", "Pendulum-v1", "--trainers", "sb3", "fastsync", "--repetitions", "1"]
    assert main(["ppo", "--until", *options]) == 0
    assert "fastsync on Pendulum-v1, unlike the hyperparameters: no gSDE" in capsys.readouterr().out
    assert {training.gsde for _, training in measured} == {True}
    measured.clear()
    assert main(["ppo", "--until", *options, "--no-gsde"]) == 0
    assert "gSDE" not in capsys.readouterr().out
    assert {training.gsde for _, training in measured} == {False}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"env": ("Pendulum-v1",), "hyperparameters": ("cleanrl",)},
            "hyperparameters='cleanrl' has none for Pendulum-v1",
        ),
        ({"nproc": (3,), "oversubscribe": True}, "nproc=3 does not divide the 8 environments"),
        ({"nproc": (0,)}, r"nproc=\(0,\) must be at least 1"),
        ({"trainers": ()}, "trainers: choose at least one"),
        ({"repetitions": 0}, "repetitions"),
        ({"first_seed": -1}, "first_seed"),
        ({"plot": Path("times.jpg")}, r"plot=times.jpg must be the name of a file that ends in .svg or .png"),
        ({"json": Path("/nonexistent/rows.json")}, "there is no folder /nonexistent"),
        ({"total_steps": 0}, "total_steps=0 must be more than 0"),
        ({"rows": (Path("/nonexistent/rows.json"),)}, "/nonexistent/rows.json: there is no such file"),
    ],
)
def test_until_refuses_bad_options(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Options(**wrong)  # type: ignore[arg-type]


def assert_arrives(outcome: Outcome) -> None:
    assert outcome.reached
    assert 1000 < outcome.steps < TINY.total_steps
    assert outcome.mean_return is not None
    assert 10 <= outcome.mean_return < 200


TRAINED_HERE = {"fastsync", "stable-baselines3", "stable-baselines3, SubprocVecEnv", "cleanrl loop"}


@pytest.mark.sampled(2)
@pytest.mark.end_to_end
@pytest.mark.parametrize("trainer", sorted(TRAINED_HERE))
def test_trainings_end_when_they_are_good_enough(trainer: str):
    nproc = 2 if trainer == "fastsync" else 1
    assert_arrives(TRAINERS[trainer](replace(TINY, nproc=nproc)))
    never = TRAINERS[trainer](replace(TINY, nproc=nproc, total_steps=256, until=1000.0))
    assert not never.reached
    assert 256 <= never.steps < 384


@pytest.mark.end_to_end
@pytest.mark.parametrize("trainer", sorted(TRAINED_HERE))
def test_environments_step_alone(trainer: str):
    outcome = ENVIRONMENTS[trainer](replace(TINY, total_steps=64))
    assert (outcome.steps, outcome.mean_return) == (64, None)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["sbx", "rlox", "rejax"])
def test_other_trainers_end_when_they_are_good_enough(name: str):
    who = COMPARED[name]
    if (python := who.python()) is None:
        pytest.skip(who.how_to_install)
    outcome = run_alone(who.trainer, TINY, timeout=200, python=python)
    assert_arrives(outcome)
    assert set(outcome.versions) >= {{"sbx": "sbx-rl"}.get(name, name)}
    assert (outcome.compile_seconds is None) == (name == "rlox")
    alone = run_alone(f"{who.trainer}, environment alone", replace(TINY, total_steps=64), timeout=200, python=python)
    assert alone.steps == 64


@pytest.mark.slow
@pytest.mark.end_to_end
def test_until_runs_tiny_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def here(trainer: str, training: Training, **_: object) -> Outcome:
        return EVERYTHING[trainer](training)

    monkeypatch.setattr("benchmarks.commands.until.run_alone", here)  # processes of their own would import for seconds
    arguments = ["--trainers", "sb3", "fastsync", "--threads", "1", "--nproc", "1", "--repetitions", "1"]
    arguments += ["--threshold", "10", "--total-steps", "8192", "--json", str(tmp_path / "rows.json")]
    assert main(["ppo", "--until", *arguments, "--plot", str(tmp_path / "times.png")]) == 0
    rows = RowFile(tmp_path / "rows.json").read()
    assert [row.figures["reached"] for row in rows] == [1.0, 1.0, None, None]
    assert (tmp_path / "times.png").stat().st_size > 1000
