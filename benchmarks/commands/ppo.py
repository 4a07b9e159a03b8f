"""``python -m benchmarks ppo``: environment steps per second of whole trainings, ours and the baselines', in turns.

All train with the same hyperparameters and the same network, on the same cores, one thread a process. A sample is the
time of a training's loop: collecting and learning, without start-up.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro

from benchmarks.baselines.trainers import run_alone
from benchmarks.baselines.training import Outcome, Training
from benchmarks.commands import until
from benchmarks.harness.collect import Collected, collect, termination_raises
from benchmarks.harness.options import check_device, check_file, check_positive, places
from benchmarks.harness.progress import named, progress_bars
from benchmarks.harness.records import Record, RowFile, environment
from benchmarks.report.table import OVERSUBSCRIBED, Columns, grouped_by, measured_on, number, print_tables
from fastsync.messages import check_at_least

HYPERPARAMETERS = {
    "cleanrl": Training(total_steps=0, num_envs=4, num_steps=128, num_minibatches=4, num_epochs=4, seed=1),
    "zoo": Training(
        total_steps=0, num_envs=8, num_steps=32, num_minibatches=1, num_epochs=20, seed=1, value_coef=0.5,
    ),
    "fastsync": Training(total_steps=0, num_envs=32, num_steps=32, num_minibatches=4, num_epochs=10, seed=1),
}  # fmt: skip
"""CleanRL's defaults, those of RL Baselines3 Zoo for CartPole-v1, and ours."""
OTHERS = {
    "HalfCheetah-v5": Training(
        total_steps=0, num_envs=1, num_steps=2048, num_minibatches=32, num_epochs=10, seed=1, env="HalfCheetah-v5",
        learning_rate=3e-4, entropy=0.0, normalize=True,
    ),
    "ALE/Pong-v5": Training(
        total_steps=0, num_envs=8, num_steps=128, num_minibatches=4, num_epochs=4, seed=1, env="ALE/Pong-v5", clip=0.1,
    ),
}  # fmt: skip
"""CleanRL's for continuous actions and for games."""
CARTPOLE = "CartPole-v1"
UNTIL = "--until"
LEARNT = {CARTPOLE: 40.0}
"""A random policy has a mean return of 22: what has learnt nothing has not done the work. Other environments take
longer than a benchmark does. Where it has not, its row counts as wrong."""


def scaled_to(num_envs: int) -> Training:
    """Hyperparameters for that many environments of CartPole-v1.

    More environments take fewer steps each, so that an update comes as often as its rows allow: 512 / sqrt(N) steps, of
    which 128 are the most, and 4 minibatches an epoch, or 8 from 8192 rows on: 128 steps of 16 environments, 64 of 64,
    32 of 256, 16 of 1024.
    """
    num_steps = min(128, max(8, 512 // math.isqrt(num_envs) // 8 * 8))
    num_minibatches = 8 if num_envs * num_steps >= 8192 else 4
    return Training(
        total_steps=0, num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches, num_epochs=4, seed=1,
        learning_rate=1e-3,
    )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Measure whole trainings: fastsync on one rank and on several, and its baselines."""

    until: bool = False
    """Measure seconds until the policy is good enough, beside more trainers. It has options of its own: --until
    --help shows them."""
    env: Literal["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"] = CARTPOLE
    """What to train on. HalfCheetah and Pong have CleanRL's hyperparameters."""
    hyperparameters: tuple[Literal[tuple(HYPERPARAMETERS)], ...] = tuple(HYPERPARAMETERS)
    """Whose, on CartPole: they differ in how much is learnt from each step."""
    total_steps: int = 60_000
    """Environment steps of each training."""
    repetitions: int = 3
    """Trainings of each kind, with other seeds. The kinds take turns."""
    nproc: int = 2
    """Ranks of fastsync's runs on several, and trainings at once of the one without communication."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    num_envs: tuple[int, ...] = ()
    """In place of them: numbers of environments on each rank, such as 4 16 64 256 1024. The more there are, the fewer
    steps each takes between updates: 128, 128, 64, 32 and 16, in 4 minibatches or, from 256 on, 8. How far a training
    comes depends on total_steps: with 500,000 the table's returns tell which settings learn."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What policies compute on. For networks as small as these CPUs are faster."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores or GPUs; every table says so."""
    timeout: float = 600.0
    """Seconds after which a training counts as hanging."""

    def __post_init__(self) -> None:
        if not self.hyperparameters:
            raise ValueError(f"hyperparameters: choose at least one of {', '.join(HYPERPARAMETERS)}")
        check_positive(self, "timeout")
        check_at_least(self, nproc=1, total_steps=1, repetitions=1)
        check_file("json", self.json)
        if self.num_envs and self.env != CARTPOLE:
            raise ValueError(f"num_envs are scaled for {CARTPOLE}: leave them out, or env={self.env!r}")
        if any(number < 1 for number in self.num_envs):
            raise ValueError(f"num_envs={self.num_envs} must be at least 1 each")
        check_device(self.device, self.nproc, self.oversubscribe)

    def sets(self) -> dict[str, Training]:
        """The hyperparameters to train with, by their names."""
        if self.num_envs:
            return {f"{number} environments a rank": scaled_to(number) for number in self.num_envs}
        if self.env != CARTPOLE:
            return {f"CleanRL for {self.env}": OTHERS[self.env]}
        return {name: HYPERPARAMETERS[name] for name in self.hyperparameters}


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0; 1 if a training has learnt nothing, failed or hangs; 130 after Ctrl-C, 143 after SIGTERM.
    """
    if UNTIL in arguments:
        return until.main([argument for argument in arguments if argument != UNTIL])
    options = tyro.cli(Options, prog="python -m benchmarks ppo", args=arguments)
    with termination_raises():
        collected = collect(measure_all, 1, options, options.json, lambda measure, _, *given: [measure(*given)])
    report(collected)
    return collected.status


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Runs all trainings, one after the other. After each the rows have it in. Returns notes."""
    done: list[Record] = []
    where = environment(torch.device(options.device))
    with progress_bars(shown=True) as progress:
        for name, base in options.sets().items():
            methods = dict(methods_of(base, options))
            outcomes: dict[str, list[Outcome]] = {}
            turns = [(name, seed, method) for seed in range(1, options.repetitions + 1) for method in methods]
            for _, seed, method in named(progress, turns, lambda turn: "{}, seed {}: {}".format(*turn)):
                trainer, training = methods[method]
                seeded = replace(training, seed=seed)
                outcomes.setdefault(method, []).append(run_alone(trainer, seeded, timeout=options.timeout))
                rows.replace([*done, *records_of(name, methods, outcomes, where)])
            done += records_of(name, methods, outcomes, where)
    return [] if importlib.util.find_spec("stable_baselines3") else ["Stable-Baselines3 is left out: not installed"]


def methods_of(base: Training, options: Options) -> Iterator[tuple[str, tuple[str, Training]]]:
    """Lists what is compared: a name, who trains, and with what."""
    training = replace(base, total_steps=options.total_steps, device=options.device)
    n = options.nproc
    yield "environment alone", ("environment alone", training)
    if importlib.util.find_spec("stable_baselines3"):
        yield SB3, ("stable-baselines3", training)
    if training.env == CARTPOLE:
        yield CLEANRL_LOOP, ("cleanrl loop", training)
    yield ALONE, ("fastsync", training)
    if training.env == CARTPOLE:  # the others have no vectorised implementation of their own to compare it with
        yield "fastsync, 1 rank, SyncVectorEnv", ("fastsync", replace(training, vectorization="sync"))
    if n > 1:
        if training.num_envs % n == 0:
            yield f"fastsync, {n} ranks, same batch", ("fastsync", replace(training, nproc=n))
        wide = replace(training, nproc=n, num_envs=n * training.num_envs, total_steps=n * training.total_steps)
        yield f"fastsync, {n} ranks, {n} × the batch", ("fastsync", wide)
        yield apart(n), ("fastsync apart", wide)
        yield in_step(n), ("fastsync in step", wide)


def apart(nproc: int) -> str:
    """The method that shows what the machine gives: as many trainings at once, each on its own."""
    return f"fastsync, {nproc} × 1 rank, no communication"


def in_step(nproc: int) -> str:
    """The method that shows what the machine gives if ranks only wait for each other."""
    return f"fastsync, {nproc} × 1 rank, in step"


SB3, CLEANRL_LOOP, ALONE = "stable-baselines3", "CleanRL's loop", "fastsync, 1 rank"


def records_of(
    name: str,
    methods: Mapping[str, tuple[str, Training]],
    outcomes: Mapping[str, Sequence[Outcome]],
    where: Mapping[str, Any],
) -> Iterator[Record]:
    """A row for each method with an outcome, its speed also as a ratio to the baselines' and, for more ranks, to one's.

    A ratio to something that has no outcome yet is None.
    """
    speeds = {method: median(outcome.speed for outcome in of_method) for method, of_method in outcomes.items()}

    def ratio(method: str, other: str, times: int = 1) -> float | None:
        return speeds[method] / speeds[other] / times if other in speeds else None

    for method, (_, training) in methods.items():
        if method not in outcomes:
            continue
        of_speed = [outcome.speed for outcome in outcomes[method]]
        known = [outcome.mean_return for outcome in outcomes[method] if outcome.mean_return is not None]
        ratios = {f"over_{other}": ratio(method, other) for other in (SB3, CLEANRL_LOOP) if other in speeds}
        on_cpu = training.device == "cpu"
        is_wide = training.num_envs > methods[ALONE][1].num_envs
        yield Record(
            benchmark="ppo",
            method=method,
            settings={
                "hyperparameters": name,
                **{key: value for key, value in vars(training).items() if (key, value) != ("device", "cpu")},
                **({OVERSUBSCRIBED: True} if training.nproc > places(training.nproc, on_cpu) else {}),
            },
            figures={
                "steps_per_second": speeds[method],
                "steps_per_second_per_rank": speeds[method] / training.nproc,
                "slowest": min(of_speed),
                "fastest": max(of_speed),
                "over_environment": ratio(method, "environment alone"),
                "weak_scaling": ratio(method, ALONE, training.nproc) if is_wide else None,
                "over_apart": ratio(method, apart(training.nproc)) if is_wide else None,
                "over_in_step": ratio(method, in_step(training.nproc)) if is_wide else None,
                "mean_return": median(known) if known else None,
                **ratios,
            },
            correct=all(value > LEARNT.get(training.env, -math.inf) for value in known),
            samples=[outcome.seconds for outcome in outcomes[method]],
            environment=where,
        )


def report(collected: Collected) -> None:
    """Prints a table for each set of hyperparameters."""
    by_name = grouped_by(collected.records, lambda record: record.settings["hyperparameters"])
    print_tables(by_name, _title, COLUMNS, (LEGEND, *collected.notes))


def _cell(name: str, form: str) -> Callable[[Record], str]:
    return lambda record: number(record.figures.get(name), form)


COLUMNS: Columns = {
    "trainer": lambda record: record.method + (", OVERSUBSCRIBED" if record.settings.get(OVERSUBSCRIBED) else ""),
    "steps/s": _cell("steps_per_second", ",.0f"),
    "per rank": _cell("steps_per_second_per_rank", ",.0f"),
    "slowest": _cell("slowest", ",.0f"),
    "fastest": _cell("fastest", ",.0f"),
    "× SB3": _cell(f"over_{SB3}", ".2f"),
    "× CleanRL's loop": _cell(f"over_{CLEANRL_LOOP}", ".2f"),
    "of environment alone": _cell("over_environment", ".1%"),
    "weak scaling": _cell("weak_scaling", ".0%"),
    "of no communication": _cell("over_apart", ".0%"),
    "in step": _cell("over_in_step", ".0%"),
    "return": _cell("mean_return", ".0f"),
}
LEGEND = (
    "steps/s: environment steps of all ranks by the time of the training's loop, median of the repetitions. weak "
    "scaling: speed by number of ranks, over that of one rank with as many environments as each of them; of no "
    "communication: over as many trainings at once that never communicate, with the same batch on each rank; their own "
    "weak scaling is what the cores give. in step: over the same that only wait for each other, before each update and "
    "optimizer step. return: of the last 100 episodes; after few steps it shows that something was learnt."
)


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['env']}, hyperparameters of {settings['hyperparameters']}: {settings['num_envs']} environments × "
        f"{settings['num_steps']} steps, {settings['num_epochs']} epochs of {settings['num_minibatches']} minibatches, "
        f"{settings['total_steps']:,} steps a rank\n"
        f"{measured_on(record)}"
    )
