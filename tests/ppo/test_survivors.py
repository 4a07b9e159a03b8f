"""``--on-lost-rank continue``: wherever a rank dies, the others end as if it had died between two updates."""

from __future__ import annotations

import csv
import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils._pytree import tree_leaves

from fastsync.cli import main
from fastsync.elastic.members_store import JOINS, STORE
from fastsync.errors import RankLostError
from fastsync.launch import supervisor
from fastsync.ppo import evaluation, ppo, session
from fastsync.ppo.cli import Launch, option_words
from fastsync.ppo.evaluation import Evaluator
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.ppo import PPO, Collector, LearningRate, Settings, train
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.session import Session
from tests.forked import Command
from tests.models import group_of_one
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

# Whatever an update changes, and all that ranks do together.
FULL = Settings(
    total_steps=450, num_envs=4, num_steps=16, num_epochs=2, compression="int8+ef", norm_observations=True,
    norm_rewards=True, lr_schedule="adaptive", lr_scaling="linear", target_kl=0.01, warmup_updates=3,
    checkpoint_interval=0, eval_interval=1, eval_episodes=4, on_lost_rank="continue", timeout=60.0, quiet=True,
)  # fmt: skip
UPDATE = 2
"""The update in which a rank dies, counted from 1."""
MINIBATCHES = FULL.num_epochs * FULL.num_minibatches
Moment = tuple[Any, str, int]
"""A call in which a rank dies: its owner, its name, and how many came before."""
BETWEEN: Moment = (Collector, "collect", UPDATE - 1)
LEARNING: dict[str, Moment] = {
    "returns": (PPO, "_moments", 3 * (UPDATE - 1) + 1),
    "minibatch": (PPO, "_take_step", MINIBATCHES * (UPDATE - 1) + 3),
    "last minibatch": (PPO, "_take_step", MINIBATCHES * UPDATE - 1),
    "reports": (Session, "_gather", UPDATE - 1),
}
AFTERWARDS: dict[str, Moment] = {
    "reports": LEARNING["reports"],
    "evaluation": (Evaluator, "evaluate", UPDATE - 2),
    "amid an evaluation": (evaluation._Together, "go_on", 3),
    "checkpoint": (Exchange, "gather_objects", UPDATE - 2),
    "file": (CheckpointFolder, "save", UPDATE - 2),
}


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_now() -> None:
    raise RuntimeError("the connection broke")


@contextmanager
def at(moment: Moment, action: Callable[[], None], *, after: bool = False) -> Iterator[None]:
    """Does something before a call, or after it."""
    owner, name, calls_before = moment
    call, num_calls = getattr(owner, name), 0

    def called(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        is_it = num_calls == calls_before + 1
        if is_it and not after:
            action()
        result = call(*args, **options)
        if is_it and after:
            action()
        return result

    with patch.object(owner, name, called):
        yield


Outcome = tuple[list[torch.Tensor], int, list[float]]


def go_on(
    rank: int, world_size: int, port: int, settings: Settings, dying: dict[int, Moment], missing: dict[int, Moment]
) -> Outcome:
    """Trains. Ranks die, and others do not get the result of a call that all have come to."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    evaluation.SLICE_SECONDS = 0.0  # so that ranks hear from each other after each step of an evaluation
    with ExitStack() as stack:
        if rank in dying:
            stack.enter_context(at(dying[rank], end_now))
        if rank in missing:
            stack.enter_context(at(missing[rank], break_now, after=True))
        policy, result = train(settings, torch.device("cpu"))
    return list(policy.state_dict().values()), result.step, result.returns


def outcome(
    folder: Path, dying: dict[int, Moment], missing: dict[int, Moment] | None = None, **changes: Any
) -> Outcome:
    """What the ranks that are left end with, which is the same on all."""
    name = f"run{len(list(folder.iterdir()))}"
    settings = replace(FULL, runs_dir=str(folder), run_name=name, **changes)
    store = new_store()
    of_rank = run_ranks(go_on, 3, store.port, settings, dying, missing or {}, lost=[*dying], timeout=200)
    first, *others = (each for rank, each in enumerate(of_rank) if rank not in dying)
    for each in others:
        assert_same(first, each)
    assert check_files(folder / name, settings.total_steps, len(of_rank) - len(dying)) == first[1]
    return first


def assert_same(one: Outcome, other: Outcome) -> None:
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))
    assert one[1:] == other[1:]


def check_files(run: Path, total_steps: int, num_left: int) -> int:
    """The run has a row for each update, and its last checkpoint holds the state of all ranks that are left.

    Returns the last step.
    """
    rows = list(csv.DictReader((run / "progress.csv").open()))
    steps = [int(row["step"]) for row in rows]
    assert [int(row["update"]) for row in rows] == [*range(1, len(rows) + 1)]
    assert steps == sorted({*steps})
    assert steps[-1] >= total_steps
    found = CheckpointFolder(run / "checkpoints").newest()
    assert found is not None
    _, checkpoint = found
    assert (checkpoint.step, checkpoint.world_size, len(checkpoint.environments)) == (steps[-1], num_left, num_left)
    assert (run / "checkpoints" / "best.pt").exists()
    assert all(each.isfinite().all() for each in tree_leaves(checkpoint.learner) if isinstance(each, torch.Tensor))
    return steps[-1]


@pytest.fixture(scope="module")
def lost_between(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """Returns what the others end with if a rank is lost between two updates."""
    return functools.cache(lambda rank: outcome(tmp_path_factory.mktemp("between"), {rank: BETWEEN}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", LEARNING)
def test_the_update_that_a_rank_is_lost_in_runs_again_without_it(
    moment: str, tmp_path: Path, lost_between: Callable[[int], Outcome]
) -> None:
    """Bitwise as if the rank had died before, with residuals, moments, a learning rate and random numbers."""
    assert_same(outcome(tmp_path, {1: LEARNING[moment]}), lost_between(1))


def test_dropout_draws_the_same_masks_again(tmp_path: Path) -> None:
    policy = {"policy": "tests.ppo.test_modes:Dropped"}
    expected = outcome(tmp_path, {1: BETWEEN}, **policy)
    assert_same(outcome(tmp_path, {1: LEARNING["minibatch"]}, **policy), expected)


def test_the_learning_rate_of_a_run_follows_its_ranks(tmp_path: Path) -> None:
    outcome(tmp_path, {1: LEARNING["minibatch"]}, lr_schedule="constant", target_kl=None, warmup_updates=0)
    rows = list(csv.DictReader((tmp_path / "run0/progress.csv").open()))
    rates = [float(row["learning/learning_rate"]) / FULL.learning_rate for row in rows]
    assert rates == pytest.approx([3.0] * (UPDATE - 1) + [2.0] * (len(rows) - UPDATE + 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", AFTERWARDS)
def test_the_first_of_the_others_goes_on_for_rank_0(
    moment: str, tmp_path: Path, lost_between: Callable[[int], Outcome]
) -> None:
    assert_same(outcome(tmp_path, {0: AFTERWARDS[moment]}), lost_between(0))


START: dict[str, Moment] = {
    "environments": (session, "make_environments", 0),
    "attach": (ppo, "attach", 0),
    "begin": (Session, "begin", 0),
}


def fail_to_start(rank: int, world_size: int, port: int, settings: Settings, moment: str) -> str:
    os.environ[STORE] = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        if rank == 1:
            stack.enter_context(at(START[moment], end_now))
        with pytest.raises(RankLostError) as ended:
            train(settings, torch.device("cpu"))
    return str(ended.value)


@pytest.mark.parametrize("moment", ["environments", "attach"])
def test_a_rank_that_is_lost_before_the_training_is_named(tmp_path: Path, moment: str) -> None:
    settings, store = replace(FULL, runs_dir=str(tmp_path), run_name="run"), new_store()
    for said in run_ranks(fail_to_start, 3, store.port, settings, moment, lost=[1], timeout=200)[::2]:
        assert "ranks [1] were lost before the training had begun" in said
        assert "start the run again" in said


def fail(error: Exception) -> None:
    raise error


def test_only_a_ranks_own_error_is_told_with_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    for error, has_traceback in ((RankLostError("ranks [1] were lost"), False), (ValueError("its own"), True)):
        with pytest.raises(SystemExit):
            supervisor._run_rank_aloud(fail, (error,))
        said = capfd.readouterr().err
        assert str(error) in said
        assert ("Traceback" in said) == has_traceback


def test_the_first_update_needs_no_update_before_it(tmp_path: Path) -> None:
    """Whether a rank is lost before its first rollout, in it, or in what follows."""
    expected = outcome(tmp_path, {1: START["begin"]})
    for moment in ((Collector, "collect", 0), (PPO, "_take_step", 2)):
        assert_same(outcome(tmp_path, {1: moment}), expected)
    outcome(tmp_path, {0: (Session, "_open_console_and_logs", 0)})


def test_a_rank_that_missed_the_end_of_an_update_gets_it_from_another(
    tmp_path: Path, lost_between: Callable[[int], Outcome]
) -> None:
    reports = (Session, "_gather", UPDATE - 2)
    assert_same(outcome(tmp_path, {0: AFTERWARDS["evaluation"]}, {2: reports}), lost_between(0))


def test_two_ranks_are_lost_one_after_the_other_and_at_once(tmp_path: Path) -> None:
    later = (PPO, "_take_step", MINIBATCHES * (UPDATE - 1) + 3 + 3)  # when it runs the update again
    one_by_one = outcome(tmp_path, {0: LEARNING["minibatch"], 2: later})
    at_once = outcome(tmp_path, {0: BETWEEN, 2: BETWEEN})
    assert_same(one_by_one, at_once)


def test_messages_between_hosts(tmp_path: Path) -> None:
    """As on one host, whose ranks add in memory that they share."""
    settings = replace(FULL, runs_dir=str(tmp_path), run_name="run")
    store = new_store()
    given = (store.port, settings, {1: LEARNING["minibatch"]}, {})
    first, _, second = run_ranks(go_on, 3, *given, lost=[1], timeout=100, shared_memory=False)
    assert_same(first, second)


def test_an_error_that_no_loss_explains_ends_the_training(tmp_path: Path) -> None:
    """Here all ranks raise it."""
    settings = replace(FULL, runs_dir=str(tmp_path), run_name="run")
    store = new_store()
    with pytest.raises(RuntimeError, match="the connection broke"):
        run_ranks(go_on, 2, store.port, settings, {}, dict.fromkeys(range(2), LEARNING["reports"]), timeout=60)


def test_the_learning_rate_follows_the_number_of_ranks() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.0))
    settings = Settings(learning_rate=1e-3, lr_scaling="linear", lr_schedule="adaptive", target_kl=0.01)
    rate = LearningRate(settings, 4, optimizer)
    rate.adapt(torch.tensor(1.0))
    before = rate.state_dict()
    saved = {name: value.clone() for name, value in before.items()}
    rate.scale_to(2)
    rate.start_update(remaining=1.0, update=0)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(2e-3 / 1.5)
    rate.put_back(saved)
    rate.scale_to(1)
    assert float(rate.state_dict()["adaptive"]) == pytest.approx(1e-3 / 1.5)


def test_what_cannot_go_on_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: Settings(on_lost_rank="continue", sync="diloco"), "with sync='diloco' each rank learns by itself")
    refused(lambda: Settings(on_lost_rank="continue", device="cuda"), "set device to 'cpu'")
    refused(lambda: Launch(max_restarts=1, settings=FULL), "max_restarts=1 starts all ranks again")
    refused(lambda: Launch(launcher="ray", settings=FULL), "Ray ends all ranks")
    monkeypatch.setenv(JOINS, "1")
    with pytest.raises(ValueError, match="takes in no new ranks"), group_of_one():
        train(Settings(), torch.device("cpu"))


@on_ranks(2)
def test_without_a_store_the_message_says_how_to_start(rank: int, world_size: int, tmp_path: Path) -> None:
    refused(lambda: train(replace(FULL, runs_dir=str(tmp_path)), torch.device("cpu")), "a store that no rank holds,")


@pytest.mark.end_to_end
@pytest.mark.parametrize(("number", "timeout"), [("SIGKILL", 60.0), ("SIGSTOP", 10.0)])
def test_the_command_lets_the_others_live(tmp_path: Path, number: str, timeout: float) -> None:
    """One that is stopped is killed once the others have ended."""
    settings = Settings(
        env="tests.toy_envs:deadly", env_kwargs={"number": number}, total_steps=1_500, num_envs=4, timeout=timeout,
        on_lost_rank="continue", runs_dir=str(tmp_path), run_name="run",
    )  # fmt: skip
    job = Command(main, tmp_path, "train", "--nproc", "3", *option_words(settings))
    try:
        assert job.wait(120) == 0, job.err
    finally:
        job.kill()
    assert job.out.count("fastsync train: rank 0 is lost; 2 ranks go on") == 1
    assert "Traceback" not in job.err
    check_files(tmp_path / "run", 1_500, 2)
