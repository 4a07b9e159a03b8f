"""Does on a GPU what only a GPU can prove, part by part: ``make prove-gpu``, or this file with the names of parts.

A GPU is rare, and lent for minutes. So the parts come in the order of what they tell, and all of them together have
``--minutes``. It takes torch with CUDA, nvcc, ninja and pytest, but no network, no git and no .venv. What else is
missing it names at the start, with the command that fetches it elsewhere. It installs the wheels that it finds in
build/wheels, for itself only.

At its limit a command is ended with what it has started, and the next one runs. Everything goes to the folder that OUT
names, by default build/prove-gpu, as soon as it is known: summary.txt has a line for each part, and each call adds to
it; rows.json has the rows of all benchmarks; build.log, tests.log, figures.log and sanitizer.log what was printed. The
exit status is 0 if all parts passed, 4 if the time was too short for some, 3 where there is no GPU, and else 1.

``--rehearse`` runs the same commands without a GPU: tests are only collected, and benchmarks are small, on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT") or ROOT / "build/prove-gpu").absolute()
WHEELS, INSTALLED = ROOT / "build/wheels", ROOT / "build/prove-gpu-packages"
PASSED, FAILED, TIMED_OUT, NO_GPU = "passed", "FAILED", "TIMED OUT", "no GPU"
LEFT_OUT, CUT_SHORT = "LEFT OUT", "CUT SHORT"  # before it began, or while it ran, because the minutes were over
NOTHING_COLLECTED = 5  # pytest's exit status
NOT_FOUND = 127  # a shell's exit status where there is no such command

BUILDS = ("numpy", "ninja", "setuptools")
TESTS = ("pytest", "pytest_timeout", "xdist", "hypothesis")
TRAINS = {"gymnasium": "gymnasium farama-notifications cloudpickle", "tyro": "tyro docstring-parser typeguard"}
TRAINS |= {name: name for name in ("filelock", "rich", "tensorboard")} | {"yaml": "pyyaml"}
MEASURES = {name: name for name in ("jinja2", "matplotlib", "scipy")}
PACKAGES = {name: name.replace("_", "-") for name in (*BUILDS, *TESTS)} | {"xdist": "pytest-xdist"} | TRAINS | MEASURES
"""What the parts import, and the packages that bring it, with what these need."""

OPERATORS, SUMS = "engine/test_ops.py", "engine/test_sums.py"
SHARDED = ("engine/test_sharded.py", "engine/test_sharded_gather.py")
STEPS = ("engine/test_cuda.py", *SHARDED, "engine/test_outer_device.py", "ppo/test_cuda.py")
TRAININGS = "engine/test_cuda_trainings.py"
OTHERS = ("benchmarks/test_ops.py",)
CAPTURED, OF_TWO_RANKS = "captur", "[2-"
# Not on random buckets by the hundred, which would take too long there.
SANITIZED = {"memcheck": "samples or sizes", "racecheck": "samples", "synccheck": "samples"}
HOOK, ATTACH = "fastsync.register_comm_hook", "fastsync.attach"
METHODS = f"ddp ddp/fp16_compress_hook {HOOK}/none {HOOK}/fp16 {ATTACH}/none {ATTACH}/fp16 {ATTACH}/int8+ef"
PROBE = """import torch
print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep=", ")
print(*["%d.%d" % torch.cuda.get_device_capability()] if torch.cuda.is_available() else "")
nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}", end="")"""


@dataclass(frozen=True)
class Command:
    """What to run in ``folder`` for how many seconds at most, with ``environment`` beside that of this process.

    ``rows`` is the file where a benchmark leaves its rows.
    """

    words: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: Path | None = None
    folder: Path = ROOT

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class Part:
    """Commands that belong together, which have so many seconds, and the log that they share with other parts.

    It is left out where fewer than ``least`` seconds are left.
    """

    log: str
    limit: float
    commands: Sequence[Command]
    least: float = 15.0


def python(limit: float, *words: str, **environment: str) -> Command:
    return Command((sys.executable, *words), limit, environment)


def pytest(
    files: Sequence[str], keywords: str, limit: float, before: Sequence[str] = (), **environment: str
) -> Command:
    """Tests in processes of their own: a kernel that fails spoils all that comes after it there.

    In up to eight where pytest-xdist is installed, because most of the time goes into starting ranks.
    """
    selected = ["-m", "gpu", *(["-k", keywords] if keywords else [])]
    words = ["-m", "pytest", *(f"tests/{file}" for file in files), *selected, "--timeout", "100", "--tb", "short", "-q"]
    plugins = ["-rfEs", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    if not before and importlib.util.find_spec("xdist"):
        plugins += ["-p", "xdist.plugin", "-n", str(max(1, min(8, num_cores() // 2))), "--dist", "worksteal"]
    settings = {"FAIL_WITHOUT_CUDA": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return Command((*before, sys.executable, *words, *plugins), limit, settings)


def sanitizer(tool: str, keywords: str) -> Command:
    """Watches the operators. With an allocation for each tensor, what lies behind one is nobody's."""
    before = f"compute-sanitizer --tool {tool} --target-processes application-only --error-exitcode 9".split()
    return pytest([OPERATORS], f"({keywords}) and not generic", 120, before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def benchmark(command: str, limit: float, words: str, **environment: str) -> Command:
    rows = OUT / f"{'-'.join([command, *words.split()[-1:], *environment.values()])}.json"
    return replace(
        python(limit, "-m", "benchmarks", command, *words.split(), "--json", str(rows), **environment), rows=rows
    )


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def all_parts(architecture: str = "") -> dict[str, Part]:
    """The parts in their order. ``architecture`` is the GPU's, such as 9.0: compiling for others takes longer."""
    # Where the build fails, nothing that follows may run with what an earlier one has made.
    remove = Command(("rm", "-f", *map(str, (ROOT / "fastsync").glob("_*.so"))), 10)
    for_gpu = {"FASTSYNC_CUDA": "1", "MAX_JOBS": os.environ.get("MAX_JOBS") or str(num_cores())}
    if architecture and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        for_gpu["TORCH_CUDA_ARCH_LIST"] = architecture
    build = python(240, "setup.py", "build_ext", "--inplace", **for_gpu)
    doctor = python(60, "-m", "fastsync.cli", "doctor", FASTSYNC_CUDA="1")
    ops = "--device cuda --tensors 160 --wires none fp16 --repetitions 3 --warmup 1 --sizes 256MiB 25MiB 4MiB"
    ranks = "--share-gpus --nproc"  # two share a GPU where there is one: that they work is shown, and no scaling
    sync = f"--repetitions 20 --warmup 3 --methods {METHODS} --sizes 5k 0.5m 12m"
    ppo = "--device cuda --nproc 1 --repetitions 1 --timeout 60 --total-steps 500000 --num-envs 1024"
    not_captured, of_more_ranks = f"not {CAPTURED}", f"not {OF_TWO_RANKS}"
    generic = {"FASTSYNC_KERNELS": "aten"}
    return {
        "build": Part("build", 300, [remove, build, doctor]),
        "operators": Part("tests", 90, [pytest([OPERATORS], "not generic", 90)]),
        "steps": Part("tests", 120, [pytest(STEPS, not_captured, 120)]),
        "captured": Part("tests", 60, [pytest(STEPS[:1], CAPTURED, 60)]),
        "ranks": Part("tests", 90, [pytest([SUMS], OF_TWO_RANKS, 90)]),
        "trainings": Part("tests", 120, [pytest([TRAININGS], "", 120)]),
        "ops": Part("figures", 60, [benchmark("ops", 60, ops)]),
        "sync": Part(
            "figures", 90, [benchmark("sync", 60, f"{sync} {rest}") for rest in (f"384MiB {ranks} 1", f"{ranks} 2")]
        ),
        "stream": Part("figures", 60, [benchmark("stream", 60, f"{ranks} 2")]),
        "ppo": Part("figures", 90, [benchmark("ppo", 90, ppo)]),
        "tests": Part("tests", 180, [pytest([SUMS, *OTHERS], of_more_ranks, 180)]),
        "generic": Part("tests", 180, [pytest([OPERATORS], "generic", 90), pytest(STEPS, not_captured, 90, **generic)]),
        "sanitizer": Part("sanitizer", 240, [sanitizer(tool, tests) for tool, tests in SANITIZED.items()]),
    }


def rehearsed(part: Part) -> Part:
    """The same commands, as far as they go without a GPU, with more time, for the cores may be few and busy."""
    commands = [rehearsal for each in part.commands if (rehearsal := _rehearsed(each))]
    return replace(part, limit=10 * part.limit, commands=[replace(each, limit=10 * each.limit) for each in commands])


def _rehearsed(command: Command) -> Command | None:
    words = list(command.words)
    if command.rows is None:
        if "pytest" not in words:
            return None if words[0] == "rm" or "setup.py" in words else replace(command, environment={})
        in_one = ["-n", "0"] if "xdist.plugin" in words else []
        words = [sys.executable, *words[words.index("-m") :], "--collect-only", *in_one]
        return replace(command, words=words, environment={**command.environment, "TESTS_WITHOUT_RANKS": "1"})
    sizes = {"0.5m": "5k", "12m": "5k", "384MiB": "64KiB", "256MiB": "18KiB", "25MiB": "18KiB"}
    small = {"cuda": "cpu", "20": "3", "1024": "16", **sizes}
    words = [small.get(word, word) for word in words if word != "--share-gpus"]
    of_command = {"stream": ["--width", "64", "--sleep", "0.1"], "ppo": ["--total-steps", "60000", "--timeout", "600"]}
    return replace(command, words=[*words, *of_command.get(words[3], [])])


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] | None = None) -> int:
    """Runs the parts that are named, by default all, and returns the exit status."""
    began = time.monotonic()
    names = list(parts or all_parts())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all parts have together; by default 9")
    parser.add_argument("--rehearse", action="store_true", help="run what goes without a GPU")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(names)}")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: it must be more than 0")
    OUT.mkdir(parents=True, exist_ok=True)
    gpus, architecture, versions = machine()
    say(f"prove-gpu: {gpus}, {versions}, {num_cores()} cores")
    install_wheels()
    parts = all_parts(architecture) if parts is None else parts
    for line in needs():
        say(line)
    statuses: dict[str, str] = {}
    for name in options.parts or names:
        since, found = time.monotonic(), ""
        left = math.inf if options.rehearse else began + 60 * options.minutes - since
        part = rehearsed(parts[name]) if options.rehearse else parts[name]
        if gpus == NO_GPU and not options.rehearse:
            status = NO_GPU
        elif left < part.least:
            status, found = LEFT_OUT, f"{left:.0f} s were left of {options.minutes:g} minutes"
        else:
            status, found = run_part(part, OUT / f"{part.log}.log", name, left)
        say(f"{name:<10} {status:<10}{time.monotonic() - since:5.0f} s  {found}")
        statuses[name] = status
    counts = [f"{list(statuses.values()).count(status)} {status}" for status in dict.fromkeys(statuses.values())]
    say(f"prove-gpu: {', '.join(counts)}, in {time.monotonic() - began:.0f} s")
    return exit_status(set(statuses.values()))


def exit_status(statuses: set[str]) -> int:
    if {FAILED, TIMED_OUT} & statuses:
        return 1
    return 3 if NO_GPU in statuses else 4 if {LEFT_OUT, CUT_SHORT} & statuses else 0


def say(line: str) -> None:
    """Prints a line, and adds it to the summary."""
    print(line, flush=True)
    with (OUT / "summary.txt").open("a") as summary:
        summary.write(f"{time.strftime('%Y-%m-%d %H:%M')}  {line}\n")


def needs() -> list[str]:
    """What this machine lacks of what the parts import, and how to bring it along."""
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not lacking:
        return []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = " ".join(PACKAGES[name] for name in lacking)
    return [
        f"missing here: {', '.join(lacking)}. Parts that import them fail. On a machine with a network, run",
        f"  python3 -m pip download --no-deps --only-binary=:all: --python-version {version} "
        f"--platform manylinux_2_28_x86_64 -d {os.path.relpath(WHEELS, ROOT)} {packages}",
        f"and carry {os.path.relpath(WHEELS, ROOT)} along",
    ]


def install_wheels() -> None:
    """Installs the wheels that were brought along into a folder of their own, for this process and all it starts."""
    wheels = [str(wheel) for wheel in sorted(WHEELS.glob("*.whl"))]
    if wheels and not INSTALLED.exists():
        words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target"]
        ended = run(python(60, *words, str(INSTALLED), *wheels), OUT / "build.log", 60)
        say(
            f"{len(wheels)} wheels of {os.path.relpath(WHEELS, ROOT)} "
            + ("installed" if ended == 0 else "NOT INSTALLED")
        )
    if INSTALLED.exists():
        sys.path.insert(1, str(INSTALLED))
        importlib.invalidate_caches()
        os.environ["PYTHONPATH"] = f"{INSTALLED}:{os.environ.get('PYTHONPATH', '')}"


def machine() -> tuple[str, str, str]:
    """The GPUs, their architecture, and versions. Another process asks, for a driver in trouble may hang or crash."""
    try:
        result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
        gpus, architecture, versions = result.stdout.split("\n")
        return gpus or NO_GPU, architecture, versions
    except ValueError:
        return NO_GPU, "", f"torch cannot be asked: {result.stderr.strip().rpartition(chr(10))[2]}"
    except subprocess.TimeoutExpired:
        return NO_GPU, "", "torch does not answer within 60 s"


def run_part(part: Part, log: Path, name: str, left: float) -> tuple[str, str]:
    """Runs a part's commands, whether or not one fails, within its limit and the seconds that are left of all.

    Returns its status, and what it found.
    """
    status, begin, deadline = (
        PASSED,
        log.stat().st_size if log.exists() else 0,
        time.monotonic() + min(left, part.limit),
    )
    with log.open("a") as output:
        output.write(f"\n===== {name} =====\n")
    for command in part.commands:
        ended = run(command, log, min(command.limit, max(0.0, deadline - time.monotonic())))
        print(f"  {'ended at its limit' if ended is None else f'exit status {ended}'}: {command}"[:200], flush=True)
        keep_rows(command)
        if ended is None:
            is_over = left < part.limit and time.monotonic() >= deadline
            status = status if status in (FAILED, TIMED_OUT) and is_over else CUT_SHORT if is_over else TIMED_OUT
        elif ended not in (0, NOTHING_COLLECTED) and status == PASSED:
            status = FAILED
    return status, findings(log.read_bytes()[begin:].decode(errors="replace"))


def keep_rows(command: Command) -> None:
    """Adds a benchmark's rows to those of all, also what it had when it was ended."""
    if command.rows is None or not command.rows.exists():
        return
    everything = OUT / "rows.json"
    rows = json.loads(everything.read_text()) if everything.exists() else []
    rows += json.loads(command.rows.read_text())
    unfinished = everything.with_suffix(".tmp")
    unfinished.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    unfinished.rename(everything)
    command.rows.unlink()


def run(command: Command, log: Path, limit: float) -> int | None:
    """Runs a command and appends what it prints to ``log``. Returns its exit status, None if it was ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
    environment["PYTHONPATH"] = f"{command.folder}:{os.environ.get('PYTHONPATH', '')}"
    folders = [Path(sys.executable).parent, os.environ["PATH"], INSTALLED / "bin", "/usr/local/cuda/bin"]
    environment["PATH"] = ":".join(map(str, folders))
    with log.open("ab", buffering=0) as output:
        output.write(f"\n$ {command}\n".encode())
        # In a session of its own, for Ctrl-C is for this process, which ends the others.
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "start_new_session": True}
        try:
            process = subprocess.Popen(command.words, cwd=command.folder, env=environment, **options)
        except OSError as error:  # such as a sanitizer that is not installed
            output.write(f"{error}\n".encode())
            return NOT_FOUND
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            output.write(f"[ended at its limit, after {limit:.0f} s]\n".encode())
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def findings(printed: str) -> str:
    """What the summary says of a part: counts of tests, verdicts of sanitizers and what doctor sees."""
    counts: dict[str, int] = {}
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)(?=.* in [\d.]+s)", printed):
        counts[word] = counts.get(word, 0) + int(number)
    said = (
        r"(?:ERROR|RACECHECK) SUMMARY: .*|(?<=^  )(?:kernels on|cuda:\d|nccl) .*|^(?:FAILED|ERROR) tests.*$"
        r"|^\[Errno .*|^[\d/]+ tests collected.*$|^│ (?=\S+ +│ +(?:yes|no) ).*$"
    )
    return ", ".join([*(f"{count} {word}" for word, count in counts.items()), *re.findall(said, printed, re.MULTILINE)])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what runs is ended first
    sys.exit(main())
