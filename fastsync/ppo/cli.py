"""The trainer's command line: ``fastsync train``, and ``python -m fastsync.train`` on one rank.

Settings come from a YAML file, a preset or the run that goes on, and over them from what is typed.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import torch
import tyro
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from fastsync._C import num_usable_cores
from fastsync._checks import check_at_least
from fastsync.distributed import process_group
from fastsync.doctor import install_command
from fastsync.integrations.ray import launch_on_ray
from fastsync.launch.failures import describe
from fastsync.launch.machines import find_this_machine, read_machines
from fastsync.launch.torchrun import Nodes, launch_ranks
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.preflight import check_environment, check_run
from fastsync.ppo.runs.folder import CHECKPOINTS, default_run_name, run_of, settings_of_run
from fastsync.ppo.session import use_threads
from fastsync.ppo.settings import PRESET_WORLD_SIZE, is_preset, load_settings

STOPPED = 128 + 15
"""Exit status of a training that was asked to stop, and did in order: what shells have for SIGTERM."""

Command = TypeVar("Command")


def parse(command: type[Command], prog: str, arguments: Sequence[str] | None) -> Command:
    """Reads a command line. Errors end the process with status 2 and one message.

    Args:
        command: the dataclass to fill; its ``settings`` are Settings, and its ``config`` names a file or preset.
        prog: the name of the command, for messages.
        arguments: the words behind it; by default those that this process was started with.
    """
    make: Callable[..., Command] = command
    try:
        settings = _settings_before(prog, arguments)
        default = make() if settings is None else make(settings=settings)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)
    return tyro.cli(command, prog=prog, args=arguments, default=default, config=(tyro.conf.OmitArgPrefixes,))


def _settings_before(prog: str, arguments: Sequence[str] | None) -> Settings | None:
    """Finds the settings that the command line changes, if they are other than the defaults."""
    finder = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--resume")
    finder.add_argument("--run-name", "--run_name")
    finder.add_argument("--runs-dir", "--runs_dir", default=Settings().runs_dir)
    found = finder.parse_known_args(arguments)[0]
    if found.config is not None:
        return load_settings(found.config, Settings)
    if found.resume is not None:
        return settings_of_run(found.resume, found.run_name, found.runs_dir, Settings)
    return None


@dataclass(frozen=True)
class Arguments:
    """Train a policy with PPO, as the only rank or as one of those that torchrun starts."""

    config: str | None = None
    """A YAML file of settings, or the name of a preset, such as CartPole-v1. What else is typed wins over it."""
    settings: Settings = field(default_factory=Settings)


def train_rank(settings: Settings) -> str | None:
    """Trains as the rank that the environment variables of torchrun name, or as the only one.

    Returns:
        The name of the signal that stopped it before its end, if one did.
    """
    use_threads(settings)
    with process_group(settings.timeout) as device:
        # Those of rank 0 count: it alone has to see the folder of a run, whose settings may come from there.
        of_rank_0 = [settings]
        torch.distributed.broadcast_object_list(of_rank_0)
        return train(of_rank_0[0], device)[1].stopped_by


@dataclass(frozen=True)
class Launch:
    """Train a policy with PPO on several ranks, each a process of its own."""

    nproc: int = 1
    """Ranks on each machine; with Ray, of the cluster."""
    launcher: Literal["torchrun", "ray"] = "torchrun"
    """Who starts them: this command, or Ray on its cluster, whose machines all have to see runs_dir."""
    nnodes: int = 1
    """Machines. The same command is started on each, with a node-rank of its own."""
    node_rank: int | None = None
    """Number of this machine, from 0 on. With a list of machines it is found by itself."""
    master_addr: str | None = None
    """Name or address of machine 0, which the others reach it by."""
    master_port: int = 29500
    """A port that is free on machine 0."""
    nodes: str | None = None
    """A YAML file with a list of the machines, in place of nnodes, node_rank and master_addr: the same command is then
    started on each."""
    max_restarts: int = 0
    """How often the job comes back from its last checkpoint when a rank is lost."""
    config: str | None = None
    """A YAML file of settings, or a preset: Acrobot-v1, Breakout, CartPole-v1, HalfCheetah-v5, Hopper-v5,
    LunarLander-v3, Pendulum-v1, Pong. What else is typed wins over it. Presets are made for two ranks."""
    stop_timeout: float = 120.0
    """Seconds that ranks have to finish their update and save once they are told to stop."""
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        check_at_least(self, nproc=1, nnodes=1, node_rank=0, max_restarts=0)
        if not self.stop_timeout > 0:
            raise ValueError(f"stop_timeout={self.stop_timeout} must be more than 0 seconds")
        if self.launcher == "ray" and (self.nnodes != 1 or self.node_rank is not None or self.nodes is not None):
            raise ValueError("launcher='ray' has its own machines; leave out nnodes, node_rank and nodes")
        if self.launcher == "ray" and self.settings.resume not in (None, "auto"):
            raise ValueError(
                f"resume={self.settings.resume!r}: with launcher='ray' a run goes on with resume='auto'; set run_name"
            )
        if self.nodes is not None:
            if self.nnodes != 1 or self.master_addr is not None:
                raise ValueError(
                    f"nodes={self.nodes!r} says how many machines there are, and which is the first; leave out "
                    "nnodes and master_addr"
                )
            return
        if (self.node_rank or 0) >= self.nnodes:
            raise ValueError(f"node_rank={self.node_rank} must be less than nnodes={self.nnodes}: they count from 0")
        if self.nnodes > 1 and self.master_addr is None:
            raise ValueError(f"nnodes={self.nnodes} needs master_addr, by which the machines find each other")

    def places(self) -> Nodes:
        """Tells the machines. Raises ValueError where they are in a list that this one cannot be found in."""
        timeout = self.settings.timeout
        if self.nodes is None:
            return Nodes(self.nnodes, self.node_rank or 0, self.master_addr or "localhost", self.master_port, timeout)
        machines = read_machines(self.nodes)
        rank = find_this_machine(machines, self.nodes) if self.node_rank is None else self.node_rank
        if rank >= len(machines):
            raise ValueError(f"node_rank={rank} must be less than the {len(machines)} machines in {self.nodes}")
        return Nodes(len(machines), rank, machines[0], self.master_port, timeout)


def launch(options: Launch, arguments: Sequence[str] = (), work: Callable[[Settings], str | None] = train_rank) -> int:
    """Trains on all ranks.

    Args:
        options: what to do.
        arguments: the command line that said so, to tell how to go on.
        work: what each rank does with the settings, and returns, as ``train_rank``.

    Returns:
        The exit status: 0; 1 if a rank failed, after telling which one and why; 143 if the training was stopped by a
        signal, after telling how to go on where something was saved; 130 if that was Ctrl-C.

    Raises:
        ValueError: settings that cannot work here, or a run that cannot begin or go on. That is tried here, so that the
            error comes once and not from each rank.
    """
    settings, nodes = _named(options.settings), options.places()
    check_environment(settings)
    if nodes.rank == 0:
        check_run(settings, options.nproc * nodes.number)
    for note in (_preset_note(options, nodes.number), cores_note(options.nproc)):
        if note:
            print(f"fastsync train: {note}", file=sys.stderr)
    if options.launcher == "ray":
        return _launch_on_ray(options, settings, work)
    # What it says in words of its own when it is stopped, or a rank fails for good, is told below.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    is_told = logging.ERROR if options.max_restarts else logging.CRITICAL
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(is_told)
    try:
        stopped_by = launch_ranks(
            work,
            options.nproc,
            settings,
            nodes=nodes,
            max_restarts=options.max_restarts,
            stop_timeout=options.stop_timeout,
        )
    except ChildFailedError as error:
        where, reason = describe(error)
        print(f"{where}fastsync train: {reason}", file=sys.stderr)
        return 1
    except (DistError, RendezvousError) as error:
        # Machines did not find each other, or lost the first one, which holds what they agree on.
        print(f"fastsync train: machine {nodes.rank} of {nodes.number}: {error}", file=sys.stderr)
        return 1
    except SignalException as error:
        ended_by = signal.Signals(error.sigval)
        more = " (nothing was saved after that; SIGTERM saves before it ends)"
        print(f"fastsync train: ended by {ended_by.name}{_how_to_go_on(settings, arguments, more)}", file=sys.stderr)
        return 128 + ended_by
    reasons = [reason for reason in stopped_by if reason]
    if reasons:
        # Ranks that had no signal of their own only know that another one had.
        reason = next((reason for reason in reasons if reason in signal.Signals.__members__), reasons[0])
        print(f"fastsync train: stopped by {reason}{_how_to_go_on(settings, arguments)}", file=sys.stderr)
        return STOPPED
    return 0


def _launch_on_ray(options: Launch, settings: Settings, work: Callable[[Settings], str | None]) -> int:
    """Trains on Ray's workers, as ``launch``. Workers that Ray starts again go on from the last checkpoint."""
    try:
        from ray.train import TrainingFailedError
    except ImportError:
        raise ValueError(f"launcher='ray' needs Ray: {install_command('ray')}") from None
    settings = replace(settings, runs_dir=str(Path(settings.runs_dir).absolute()), resume="auto")
    try:
        launch_on_ray(work, options.nproc, settings, max_restarts=options.max_restarts, timeout=settings.timeout)
    except TrainingFailedError as error:
        print(f"fastsync train: {error}", file=sys.stderr)
        return 1
    return 0


def _preset_note(options: Launch, nnodes: int) -> str | None:
    """Says where ranks and environments give another batch than the preset was made for."""
    if options.config is None or not is_preset(options.config):
        return None
    meant = load_settings(options.config, Settings).num_envs * PRESET_WORLD_SIZE
    number = options.settings.num_envs * options.nproc * nnodes
    if number == meant:
        return None
    return (
        f"the preset {options.config} is made for {meant} environments on {PRESET_WORLD_SIZE} ranks; "
        f"nproc={options.nproc}, nnodes={nnodes} and num_envs={options.settings.num_envs} make it {number}"
    )


def cores_note(nproc: int) -> str | None:
    """Says where ranks have to take turns: on the CPU, with fewer cores than ranks."""
    cores = num_usable_cores()
    if nproc <= cores or nproc <= torch.cuda.device_count():
        return None
    return (
        f"warning: nproc={nproc} ranks on {cores} {'core' if cores == 1 else 'cores'} take turns, and wait for each "
        f"other; choose nproc={cores} or fewer"
    )


def _named(settings: Settings) -> Settings:
    """With a name for a run that begins, which ranks that are started again can find."""
    begins = settings.resume is None or run_of(Path(settings.resume)) is None
    if settings.run_name is not None or settings.resume == "auto" or not begins:
        return settings
    return replace(settings, run_name=default_run_name(settings, time.time()))


def _how_to_go_on(settings: Settings, arguments: Sequence[str], more: str = "") -> str:
    """The end of a sentence: how, and ``more``; or that there is nothing to go on from."""
    run = None if settings.resume in (None, "auto") else run_of(Path(settings.resume))
    folder = run or Path(settings.runs_dir) / (settings.run_name or default_run_name(settings, None))
    if not any((folder / CHECKPOINTS).glob("step-*.pt")):
        return f" before {folder} had a checkpoint"
    words = ["fastsync", "train", *arguments]
    if run is None:
        if settings.run_name is not None:
            words = _with_option(words, "--run-name", settings.run_name)
        words = _with_option(words, "--resume", "auto")
    else:
        words = _with_option(words, "--resume", str(run))
    return f". Go on from the last checkpoint with: {shlex.join(words)}{more}"


def _with_option(words: Sequence[str], name: str, value: str) -> list[str]:
    """The command line with that option, and without what it says of it now."""
    others = [word for word in words if not word.startswith(f"{name}=")]
    return [*(word for before, word in pairwise(["", *others]) if name not in (before, word)), name, value]
