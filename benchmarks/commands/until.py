"""``python -m benchmarks ppo --until``: seconds until a policy is good enough, ours and others', in turns.

Good enough is a mean return of the last 100 episodes of training, all have the same published hyperparameters, and the
clock starts with the training's loop: after imports and construction, before anything is compiled. Each trainer is
looked at after each update, through what it offers for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.baselines.compared import COMPARED, Trainer
from benchmarks.baselines.published import PUBLISHED, THRESHOLDS
from benchmarks.baselines.trainers import ALONE, run_alone
from benchmarks.baselines.training import Outcome, Training
from benchmarks.harness.collect import Collected, TrainingError, collect, termination_raises
from benchmarks.harness.options import check_device, check_file, check_positive, places
from benchmarks.harness.progress import named, progress_bars
from benchmarks.harness.records import Record, RowFile, environment, read_json
from benchmarks.report.table import OVERSUBSCRIBED
from benchmarks.report.until import picture, print_report
from fastsync.doctor import num_usable_cores
from fastsync.messages import check_at_least

BENCHMARK = "ppo --until"
ALONE_STEPS, ALONE_REPETITIONS = 20_000, 3
"""Of environments without a training."""


@dataclass(frozen=True)
class Options:
    """Measure how long trainings take until their policy is good enough."""

    env: tuple[Literal[tuple(THRESHOLDS)], ...] = ("CartPole-v1",)
    """What to train on, until the mean return of the last 100 episodes is 475, -100, -200 or 200."""
    hyperparameters: tuple[Literal[tuple(PUBLISHED)], ...] = ("zoo",)
    """Whose. CleanRL's are for CartPole and Acrobot."""
    trainers: tuple[Literal[tuple(COMPARED)], ...] = tuple(COMPARED)
    """Who trains. `make baselines` installs sbx, rlox and rejax, each in an environment of its own."""
    repetitions: int = 10
    """Trainings of each kind, each with the next seed. The kinds take turns."""
    first_seed: int = 1
    """The first of these seeds. After seeds 1 to 5, 6 goes on with others; --rows shows both files."""
    nproc: tuple[int, ...] = (1, 2)
    """Numbers of ranks of fastsync's runs. They share the batch of one, so hyperparameters stay as they are."""
    threads: tuple[int, ...] = ()
    """Numbers of threads that torch computes with, for Stable-Baselines3, CleanRL and rlox. By default 1 and all."""
    total_steps: int | None = None
    """Environment steps after which a training has not arrived. By default those of who published the hyperparameters,
    which their schedules go by."""
    threshold: float | None = None
    """Another mean return to wait for."""
    norm_advantages: tuple[Literal["minibatch", "rollout"], ...] = ("minibatch",)
    """Over what advantages are normalised. rollout is for SB3 DummyVecEnv and fastsync alone."""
    gsde: bool = True
    """Explore by gSDE where the hyperparameters do and the trainer can. --no-gsde: nobody does."""
    json: Path | None = None
    """File to write all rows to: one a training, with settings, versions and hardware."""
    resume: bool = False
    """Keep the rows that --json has, and train what is missing. They must be of this machine and this commit."""
    rows: tuple[Path, ...] = ()
    """Files that --json has written: show those of --trainers, and measure nothing."""
    plot: Path | None = None
    """File to draw seconds and intervals into: a name that ends in .svg or .png."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores; every table says so."""
    timeout: float = 3600.0
    """Seconds after which a training counts as hanging. The others go on."""

    def __post_init__(self) -> None:
        check_positive(self, "timeout", "total_steps")
        check_at_least(self, repetitions=1, first_seed=0)
        for option in ("json", "plot"):
            check_file(option, getattr(self, option))
        if self.resume and self.json is None:
            raise ValueError("resume needs json, the file whose rows are kept")
        if self.plot is not None and self.plot.suffix not in (".svg", ".png"):
            raise ValueError(f"plot={self.plot} must be the name of a file that ends in .svg or .png")
        for option in ("env", "hyperparameters", "trainers", "nproc", "norm_advantages"):
            if not getattr(self, option):
                raise ValueError(f"{option}: choose at least one")
        for option in ("nproc", "threads"):
            if any(number < 1 for number in getattr(self, option)):
                raise ValueError(f"{option}={getattr(self, option)} must be at least 1 each")
        for file in self.rows:
            if any(record.benchmark != BENCHMARK for record in read_json(file)):
                raise ValueError(f"rows={file} has rows of another benchmark than {BENCHMARK}")
        _check_that_each_training_counts_once(self.rows)
        if "fastsync" in self.trainers and not self.rows:
            check_device("cpu", max(self.nproc), self.oversubscribe)
        for whose, env in self.pairs():
            if env not in PUBLISHED[whose]:
                raise ValueError(
                    f"hyperparameters={whose!r} has none for {env}; they are for {', '.join(PUBLISHED[whose])}"
                )
            for nproc in self.nproc:
                if PUBLISHED[whose][env].num_envs % nproc:
                    raise ValueError(
                        f"nproc={nproc} does not divide the {PUBLISHED[whose][env].num_envs} environments of "
                        f"{whose}'s hyperparameters for {env}"
                    )

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Whose hyperparameters for which environment, one after the other."""
        for env in self.env:
            for whose in self.hyperparameters:
                yield whose, env

    def training(self, whose: str, env: str) -> Training:
        """What all trainers are told."""
        training = PUBLISHED[whose][env]
        return replace(
            training,
            total_steps=self.total_steps or training.total_steps,
            until=THRESHOLDS[env] if self.threshold is None else self.threshold,
            gsde=training.gsde and self.gsde,
        )


def _check_that_each_training_counts_once(files: Sequence[Path]) -> None:
    """Trainings that two files have would narrow the intervals without being evidence."""
    where_from = dict[tuple[object, ...], Path]()
    for file in files:
        for record in read_json(file):
            if record.figures["reached"] is None:
                continue
            env, whose, seed = (record.settings[key] for key in ("env", "hyperparameters", "seed"))
            if (other := where_from.setdefault((env, whose, seed, record.method), file)) is not file:
                raise ValueError(
                    f"rows={file} and {other} both have seed {seed} of {record.method} on {env}; "
                    "measure with --first-seed to go on with other seeds"
                )


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    who: Trainer
    training: Training


@dataclass(frozen=True)
class Turn:
    """One training; or, alone, steps of its environments without one."""

    whose: str
    method: Method
    seed: int
    alone: bool = False

    @property
    def trainer(self) -> str:
        trainer = self.method.who.trainer
        return f"{trainer}, {ALONE}" if self.alone else trainer

    @property
    def name(self) -> str:
        return self.trainer if self.alone else self.method.name

    @property
    def kind(self) -> str:
        """What it is but for the seed."""
        return f"{self.method.training.env}, {self.whose}: {self.name}"

    @property
    def training(self) -> Training:
        seeded = replace(self.method.training, seed=self.seed)
        return replace(seeded, total_steps=ALONE_STEPS) if self.alone else seeded


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0; 1 if a training failed or hangs; 130 after Ctrl-C, 143 after SIGTERM.
    """
    options = tyro.cli(Options, prog="python -m benchmarks ppo --until", args=arguments)
    if options.rows:
        chosen = {COMPARED[name].trainer for name in options.trainers}
        records = [record for file in options.rows for record in read_json(file)]
        chosen |= {f"{trainer}, {ALONE}" for trainer in chosen}
        collected = Collected([record for record in records if record.settings["trainer"] in chosen], [], 0)
    else:
        kept = rows_to_keep(options.json) if options.resume and options.json else []
        with termination_raises():
            collected = collect(
                measure_all, 1, options, options.json, lambda measure, _, *given: [measure(*given, kept=kept)]
            )
    print_report(collected)
    if options.plot is not None:
        picture(collected.records, options.plot)
    return collected.status


def measure_all(options: Options, rows: RowFile, kept: Sequence[Record] = ()) -> list[str]:
    """Runs all trainings that are not among the kept rows, one after the other. After each the rows have it.

    Returns:
        Notes.

    Raises:
        TrainingError: some failed or hung, each of which the message names. The others have been measured.
    """
    notes, failures, where = list[str](), dict[str, str](), environment(torch.device("cpu"))
    turns = [turn for whose, env in options.pairs() for turn in turns_of(options, whose, env, notes)]
    rows.replace(kept)
    turns = [turn for turn in turns if not _is_in(kept, turn)]
    with progress_bars(shown=True) as progress:
        for turn in named(progress, turns, lambda turn: f"{turn.kind}, seed {turn.seed}") if turns else ():
            if turn.kind in failures:
                continue
            python = turn.method.who.python()
            try:
                outcome = run_alone(turn.trainer, turn.training, timeout=options.timeout, python=python)
            except TrainingError as error:
                failures[turn.kind] = f"{turn.kind}, seed {turn.seed}: {_shortly(error)}"
            else:
                rows.add([record_of(turn, outcome, where)])
    if failures:
        raise TrainingError("\n".join([*notes, *failures.values(), "what failed is not tried again"]))
    return notes


def rows_to_keep(file: Path) -> list[Record]:
    """The rows of a file, to go on with.

    Raises:
        ValueError: they are of another machine or commit.
    """
    kept, here = RowFile(file).read(), environment(torch.device("cpu"))
    for record in kept:
        for name in ("commit", "cpu", "cores"):
            if record.environment[name] != here[name]:
                raise ValueError(
                    f"json={file} has rows with {name} {record.environment[name]!r}, and here it is {here[name]!r}; "
                    "write to another file"
                )
    return kept


def _is_in(rows: Sequence[Record], turn: Turn) -> bool:
    def key(record: Record) -> tuple[object, ...]:
        return record.method, *(record.settings[name] for name in ("hyperparameters", "env", "seed"))

    return (turn.name, turn.whose, turn.training.env, turn.seed) in map(key, rows)


def turns_of(options: Options, whose: str, env: str, notes: list[str]) -> Iterator[Turn]:
    """All seeds of all methods, the methods in turns. Adds notes as ``methods_of`` does."""
    methods = list(methods_of(options, options.training(whose, env), notes))
    firsts = {method.who.trainer: method for method in reversed(methods)}
    for repetition in range(options.repetitions):
        seed = options.first_seed + repetition
        yield from (Turn(whose, method, seed) for method in methods)
        if repetition < ALONE_REPETITIONS:
            yield from (Turn(whose, method, seed, alone=True) for method in firsts.values())


def _shortly(error: TrainingError) -> str:
    """Its first line and its last, which of a traceback says what was wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def methods_of(options: Options, training: Training, notes: list[str]) -> Iterator[Method]:
    """What is compared. Adds a note about each trainer that is left out, and about settings that one lacks."""
    threads = options.threads or sorted({1, num_usable_cores()})
    for name in dict.fromkeys(options.trainers):
        who = COMPARED[name]
        if refusal := who.refuses(training):
            _add(notes, f"{who.title} is left out for {training.env}: {refusal}")
        elif who.python() is None:
            _add(notes, who.how_to_install)
        else:
            if lacking := list(who.lacks(training)):
                _add(notes, f"{who.title} on {training.env}, unlike the hyperparameters: {'; '.join(lacking)}")
            for scope in options.norm_advantages:
                if scope == "minibatch":
                    yield from _numbered(name, who, training, options.nproc, threads)
                elif who.has_scopes:
                    scoped = replace(training, norm_advantages=scope)
                    for method in _numbered(name, who, scoped, options.nproc, threads):
                        yield replace(method, name=f"{method.name}, advantages over the {scope}")


def _numbered(
    name: str, who: Trainer, training: Training, nprocs: Sequence[int], threads: Sequence[int]
) -> Iterator[Method]:
    """A trainer with each number of ranks or threads."""
    if name == "fastsync":
        for nproc in nprocs:
            yield Method(f"fastsync, {nproc} rank{'s' if nproc > 1 else ''}", who, replace(training, nproc=nproc))
    elif who.has_threads:
        for number in threads:
            title = f"{who.title}, {number} thread{'s' if number > 1 else ''}"
            yield Method(title, who, replace(training, threads=number))
    else:
        yield Method(who.title, who, training)


def _add(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def record_of(turn: Turn, outcome: Outcome, where: Mapping[str, Any]) -> Record:
    """The row of a turn."""
    nproc = turn.training.nproc
    return Record(
        benchmark=BENCHMARK,
        method=turn.name,
        settings={
            "hyperparameters": turn.whose,
            "trainer": turn.trainer,
            **vars(turn.training),
            **({OVERSUBSCRIBED: True} if nproc > places(nproc, cpu=True) else {}),
        },
        figures={
            "steps": outcome.steps,
            "steps_per_second": outcome.speed,
            "reached": None if turn.alone else float(outcome.reached),
            "compile_seconds": outcome.compile_seconds,
            "mean_return": outcome.mean_return,
        },
        correct=True,
        samples=[outcome.seconds],
        environment={**where, **outcome.versions},
    )
