"""Runs ``python -m benchmarks COMMAND``; each command is a module of ``benchmarks.commands``."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from fastsync.printable import print_what_can_be

COMMANDS = {
    "ops": "pack and unpack over sizes and numbers of tensors, against a copy of as many bytes and torch's operations",
    "sync": "a step's gradient synchronisation: fastsync, PyTorch's methods and the bare all_reduce, in turns",
    "ddp": "training steps of real models: what DDP and communication cost, and how much of it backward hides",
    "stream": "whether a bucket on its way holds up the backward behind it, on the stream that computes",
    "micro_batches": "what the same bits on any number of ranks cost, beside accumulation of as many micro-batches",
    "collectives": "latency and bandwidth of collectives of CPU ranks: the backend fastsync beside Gloo",
    "scaling": "how a training step scales with the number of ranks, and where its time goes; writes a report",
    "ppo": "environment steps per second of whole trainings: fastsync, Stable-Baselines3 and CleanRL's loop; with "
    "--until, seconds until a policy is good enough, beside more trainers",
    "link": "sync or ddp between ranks whose network has a known rate: 100 Mbit/s, 1 Gbit/s, 10 Gbit/s",
    "outer": "training between sites over slow links: at each step, or every H by DiLoCo and local SGD",
    "outer_loss": "what a token teaches where sites synchronise every H steps: a small GPT, its loss over tokens",
    "recovery": "seconds from kill -9 of a rank to the next step, and the steps it costs; beside torchrun and torchft",
    "predict": "efficiency on more ranks or another link, from a model fitted on rows, and how far to trust it",
    "headline": "the picture of the README, from rows of sync and link",
}
REQUIRED = ("numpy", "rich", "tyro", "jinja2", "matplotlib", "scipy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    print_what_can_be()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed, against baselines and the limit.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in COMMANDS.items():
        # No help of its own: `python -m benchmarks COMMAND --help` shows the options.
        commands.add_parser(name, help=description, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
        sys.exit(how_to_install(missing))
    if not {"-h", "--help"} & set(rest):
        print(f"{options.command}: importing PyTorch", file=sys.stderr, flush=True)
    return importlib.import_module(f"benchmarks.commands.{options.command}").main(rest)


def how_to_install(missing: Sequence[str]) -> str:
    """Names the extra, and the packages for those who would not build again."""
    from fastsync.doctor import install_command  # which imports torch

    return (
        f"benchmarks need {', '.join(missing)}, which the extra bench brings: in this folder run "
        f"pip install --no-build-isolation -e '.[bench]', or only {install_command('bench')}"
    )


if __name__ == "__main__":
    sys.exit(main())
