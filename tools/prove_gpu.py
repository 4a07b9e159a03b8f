"""Does on a GPU what only a GPU can prove, part by part: ``make prove-gpu``, or this file with the names of parts.

It takes torch with CUDA, nvcc, ninja and pytest, but no network, no git and no .venv. At its limit a command is ended
with what it has started, and the next one runs. Logs, rows of benchmarks and summary.txt, to which each call adds, go
to the folder that OUT names, by default build/prove-gpu. The exit status is 0 if all parts passed, 3 where there is no
GPU, and else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT") or ROOT / "build/prove-gpu")
PASSED, FAILED, TIMED_OUT, NO_GPU = "passed", "FAILED", "TIMED OUT", "no GPU"
NOTHING_COLLECTED = 5  # pytest's exit status

TESTS = "mark.gpu|on_each_device|on_real_devices|in_either_order"
OF_RANKS = ("engine/test_sums.py",)
# Not on random buckets by the hundred, which would take too long there.
SANITIZED = {"memcheck": "samples or sizes", "racecheck": "samples", "synccheck": "samples"}
FUSED, GENERIC = {"FASTSYNC_KERNELS": "auto"}, {"FASTSYNC_KERNELS": "aten"}
HOOK, ATTACH = "fastsync.register_comm_hook", "fastsync.attach"
METHODS = f"ddp ddp/fp16_compress_hook {HOOK}/none {HOOK}/fp16 {ATTACH}/none {ATTACH}/fp16 {ATTACH}/int8+ef"
PROBE = """import torch
print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep=", ")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}", end="")"""


@dataclass(frozen=True)
class Command:
    """What to run for how many seconds at most, with ``environment`` beside that of this process."""

    words: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = ROOT

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


Parts = Mapping[str, Sequence[Command]]
"""Commands that belong together, by their part's name, which its log has too."""


def python(limit: float, *words: str, **environment: str) -> Command:
    return Command((sys.executable, *words), limit, environment)


def pytest(file: str, keywords: str, limit: float, before: Sequence[str] = (), **environment: str) -> Command:
    """One file's tests in processes of their own: a kernel that fails spoils all that comes after it there.

    In four of them where pytest-xdist is installed.
    """
    words = ["-m", "pytest", f"tests/{file}", "-m", "gpu", "-k", keywords, "--timeout", "150", "--tb", "short", "-q"]
    plugins = ["-rfEs", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    if not before and importlib.util.find_spec("xdist"):
        plugins += ["-p", "xdist.plugin", "-n", "4", "--dist", "worksteal"]
    settings = {"FAIL_WITHOUT_CUDA": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return Command((*before, sys.executable, *words, *plugins), limit, settings)


def sanitizer(tool: str, keywords: str) -> Command:
    """Watches the operators. With an allocation for each tensor, what lies behind one is nobody's."""
    before = f"compute-sanitizer --tool {tool} --target-processes application-only --error-exitcode 9".split()
    return pytest("engine/test_ops.py", keywords, 150, before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def benchmark(command: str, limit: float, words: str, **environment: str) -> Command:
    rows = OUT / f"{'-'.join([command, *words.split()[-1:], *environment.values()])}.json"
    return python(limit, "-m", "benchmarks", command, *words.split(), "--json", str(rows), **environment)


def on_one_and_two_ranks(command: str, limit: float, words: str) -> list[Command]:
    """Two ranks share a GPU where there is one: that they work is shown, and nothing of how training scales."""
    return [benchmark(command, limit, f"{words} --methods {METHODS} --share-gpus --nproc {nproc}") for nproc in (1, 2)]


def all_parts() -> Parts:
    tests = ROOT / "tests"
    texts = {str(path.relative_to(tests)): path.read_text() for path in sorted(tests.glob("*/test_*.py"))}
    files = [name for name, text in texts.items() if re.search(TESTS, text)]
    alone = [name for name in files if name not in OF_RANKS]
    captured = [name for name in files if "captur" in texts[name]]
    # Where the build fails, nothing that follows may run with what an earlier one has made.
    remove = Command(("rm", "-f", *map(str, (ROOT / "fastsync").glob("_*.so"))), 10)
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    build = python(450, "setup.py", "build_ext", "--inplace", FASTSYNC_CUDA="1", MAX_JOBS=jobs)
    ops = "--device cuda --sizes 1MiB 25MiB 256MiB --tensors 1 160"
    of_kernels = "--device cuda --sizes 25MiB --tensors 160"
    ppo = "--device cuda --hyperparameters fastsync --repetitions 1 --timeout 100 --nproc 1"
    sync = on_one_and_two_ranks("sync", 150, "--sizes 0.5m 12m 100MiB --repetitions 20")
    ddp = on_one_and_two_ranks("ddp", 210, "--models mlp gpt2 --scale full")
    return {
        "build": [remove, build, python(60, "-m", "fastsync.cli", "doctor", FASTSYNC_CUDA="1")],
        "tests": [pytest(file, "not captur", 240) for file in alone],
        "captured": [pytest(file, "captur", 180) for file in captured],
        "ranks": [pytest(file, "not captur", 300) for file in OF_RANKS],
        "generic": [pytest(file, "", 240, **GENERIC) for file in alone],
        "sanitizer": [sanitizer(tool, tests) for tool, tests in SANITIZED.items()],
        "kernels": [benchmark("ops", 150, of_kernels, **each) for each in (FUSED, GENERIC)],
        "ops": [benchmark("ops", 240, ops)],
        "sync": sync,
        "ddp": ddp,
        "ppo": [benchmark("ppo", 300, ppo)],
    }


def main(arguments: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Runs the parts that are named, by default all, and returns the exit status."""
    parts = all_parts() if parts is None else parts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; by default all")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in parts]:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(parts)}")
    OUT.mkdir(parents=True, exist_ok=True)
    gpus, versions = machine()
    say(f"prove-gpu: {gpus}, {versions}")
    statuses = []
    for name in options.parts or parts:
        began = time.monotonic()
        status, found = (NO_GPU, "") if gpus == NO_GPU else run_part(parts[name], OUT / f"{name}.log")
        say(f"{name:<10} {status:<10}{time.monotonic() - began:5.0f} s  {found}")
        statuses.append(status)
    return 1 if {FAILED, TIMED_OUT} & set(statuses) else 3 if NO_GPU in statuses else 0


def say(line: str) -> None:
    """Prints a line, and adds it to the summary."""
    print(line, flush=True)
    with (OUT / "summary.txt").open("a") as summary:
        summary.write(f"{time.strftime('%Y-%m-%d %H:%M')}  {line}\n")


def machine() -> tuple[str, str]:
    """The GPUs, and torch's versions. Asked in a process of its own, for a driver in trouble may hang or crash."""
    try:
        result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
        *gpus, versions = result.stdout.splitlines()
        return "".join(gpus) or NO_GPU, versions
    except (subprocess.SubprocessError, ValueError) as error:
        return NO_GPU, f"torch cannot be asked: {error}"


def run_part(commands: Sequence[Command], log: Path) -> tuple[str, str]:
    """Runs a part's commands, whether or not one fails. Returns its status, and what it found."""
    status, begin = PASSED, log.stat().st_size if log.exists() else 0
    for command in commands:
        ended = run(command, log, command.limit)
        print(f"  {'ended at its limit' if ended is None else f'exit status {ended}'}: {command}"[:200], flush=True)
        if ended is None:
            status = TIMED_OUT
        elif ended not in (0, NOTHING_COLLECTED) and status == PASSED:
            status = FAILED
    return status, findings(log.read_bytes()[begin:].decode(errors="replace"))


def run(command: Command, log: Path, limit: float) -> int | None:
    """Runs a command and appends what it prints to ``log``. Returns its exit status, None if it was ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
    environment["PYTHONPATH"] = f"{command.folder}:{os.environ.get('PYTHONPATH', '')}"
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin"
    with log.open("ab", buffering=0) as output:
        output.write(f"\n$ {command}\n".encode())
        # In a session of its own, for Ctrl-C is for this process, which ends the others.
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command.words, cwd=command.folder, env=environment, **options)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            output.write(b"[ended at its limit]\n")
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
    said = r"(?:ERROR|RACECHECK) SUMMARY: .*|(?<=^  )(?:kernels on|cuda:\d|nccl) .*|^(?:FAILED|ERROR) tests.*$"
    return ", ".join([*(f"{count} {word}" for word, count in counts.items()), *re.findall(said, printed, re.MULTILINE)])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what runs is ended first
    sys.exit(main())
