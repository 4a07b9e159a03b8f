"""Runs the parts and reports. See the package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.prove_gpu import figures, results
from tools.prove_gpu.parts import PARTS, Part, obstacle
from tools.prove_gpu.results import FAILED, NOT_RUN, PASSED, TIMED_OUT, WORK, Result
from tools.prove_gpu.running import Command, run
from tools.prove_gpu.wheels import CARRIED, ROOT, SITE

NO_GPU = 3
"""The exit status where there is no GPU to prove anything on."""
PROBE = """
import json
machine = dict(torch="torch cannot be imported", cuda=None, nccl=None, gpus=[], built=False)
try:
    import torch
    machine.update(torch="torch " + torch.__version__, cuda=torch.version.cuda)
    if torch.version.cuda is None:
        machine["torch"] += " is built without CUDA"
    elif torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    from fastsync import _C
    machine["built"] = _C.built_with_cuda()
except ImportError as error:
    machine["error"] = str(error)
print(json.dumps(machine))
"""
PROBE_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Runs what is asked for.

    Returns:
        0 if all parts passed, 3 if there is no GPU, 1 if a part failed, timed out, or lacked something else.
    """
    options = _options(arguments, parts)
    chosen = [parts[name] for name in options.parts or parts]
    if options.plan:
        show_plan(chosen)
        return 0
    call = results.now()
    _use_site()
    out = results.output_folder()
    done: list[Result] = []
    installed = False
    machine = probe()
    for part in chosen:
        if part.needs != "nothing" and not installed:
            installed = True
            print(_install(), flush=True)
        print(f"{part.name}: {part.proves}; at most {part.limit:.0f} s", flush=True)
        begin(part, call, WORK)
        results.publish(results.kept(WORK, list(parts)), machine, call, WORK, out)  # whoever ends this call keeps that
        done.append(prove(part, machine, call, WORK))
        machine = probe() if part.name == "build" else machine
    text = results.publish(results.kept(WORK, list(parts)), machine, call, WORK, out)
    print(f"\n{text}\n{out}")
    return exit_status(done, machine, chosen)


def exit_status(done: Sequence[Result], machine: Mapping[str, object], chosen: Sequence[Part]) -> int:
    """Of this call's parts. Something that failed counts more than that there is no GPU."""
    if any(result.status in (FAILED, TIMED_OUT) for result in done):
        return 1
    if not machine["gpus"] and any(part.needs != "nothing" for part in chosen):
        return NO_GPU
    return 0 if all(result.status == PASSED for result in done) else 1


def begin(part: Part, call: str, work: Path) -> None:
    """Clears what an earlier call has left, and says what is true until the part has ended."""
    shutil.rmtree(work / part.name, ignore_errors=True)
    (work / part.name).mkdir(parents=True)
    Result(part.name, FAILED, 0.0, "the call was ended before the part", call).keep(work)


def prove(part: Part, machine: Mapping[str, object], call: str, work: Path) -> Result:
    """Runs a part's commands, one after the other whether or not one fails, and keeps what came of it."""
    folder = work / part.name
    if (reason := obstacle(part, machine)) is not None:
        result = Result(part.name, NOT_RUN, 0.0, reason, call)
    else:
        began = time.monotonic()
        status = _run_all(part.commands(folder), part.limit, folder / "log.txt")
        seconds = time.monotonic() - began
        said = figures.of(part.name, folder) or results.last_words(folder / "log.txt")
        result = Result(part.name, status, seconds, said, call)
    result.keep(work)
    print(f"{part.name}: {result.status} after {result.seconds:.0f} s: {result.said}", flush=True)
    return result


def probe() -> dict[str, object]:
    """What there is on this machine: asked in a process of its own, for a driver in trouble may hang or crash."""
    try:
        command = [sys.executable, "-c", PROBE]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_SECONDS).stdout
        machine = json.loads(printed.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        machine = {"torch": "asking torch for GPUs hangs or crashes", "cuda": None, "nccl": None, "gpus": []}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return {"built": False, **machine, "driver": _first_line(query), "commit": _first_line(commit)}


def show_plan(chosen: Sequence[Part]) -> None:
    """Prints what would be run."""
    for part in chosen:
        print(f"{part.name}: {part.proves}; needs {part.needs}; at most {part.limit:.0f} s")
        for command in part.commands(WORK / part.name):
            print(f"  {command.limit:4.0f} s  {command}")


def _run_all(commands: Sequence[Command], limit: float, log: Path) -> str:
    status, deadline = PASSED, time.monotonic() + limit
    for command in commands:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            with log.open("a") as output:
                output.write(f"\n$ {command}\n[not begun: the part's {limit:.0f} s are over]\n")
            return TIMED_OUT
        outcome = run(command, ROOT, log, remaining)
        ended = "at its limit" if outcome.status is None else f"exit status {outcome.status}"
        print(f"  {outcome.seconds:4.0f} s  {ended}: {command}"[:200], flush=True)
        if outcome.status is None:
            status = TIMED_OUT
        elif outcome.status != 0 and status == PASSED:
            status = FAILED
    return status


def _options(arguments: Sequence[str] | None, parts: Mapping[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.prove_gpu", description="Prove the CUDA half on a GPU, part by part."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"by default all: {', '.join(parts)}")
    parser.add_argument("--plan", action="store_true", help="show the commands, and run nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in parts]:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(parts)}")
    return options


def _use_site() -> None:
    """Puts what is installed from the wheels onto every command's import path, and the repository before it.

    Programs that came with this Python, such as ninja, and with CUDA are found wherever the shell looks for some.
    """
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    paths = {
        "PYTHONPATH": [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")],
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH", ""), f"{toolkit}/bin"],
    }
    for name, folders in paths.items():
        os.environ[name] = os.pathsep.join(filter(None, folders))


def _install() -> str:
    """What is missing here and carried gets installed; says what is still missing."""
    command = [sys.executable, "-m", "tools.prove_gpu.wheels", "install"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (printed.stdout or printed.stderr).strip() or f"nothing installed from {CARRIED}"


def _first_line(command: Sequence[str]) -> str | None:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(printed.splitlines()), None)


def _stop(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)  # so that what runs is ended first


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
