"""Do the tests notice when the C++ engine is wrong? Breaks it on purpose, one place at a time.

    python -m tools.mutate --list
    nice python -m tools.mutate --only pack.cpp

``tools/mutations.yaml`` holds the mutations, each a text that its file has once and what takes its place, and the tests
that concern a file, quick ones first. They are applied to a copy of the tree under ``build/mutants``, one after the
other, and each is built and tested until the first failure. A mutation is caught if a test fails, dies or takes too
long, and has survived else: then a test is missing, or nobody could tell the difference, which the list says with
``equivalent`` and the reason. Results are kept, so that a run goes on where the one before was interrupted; what has
survived is tried again. The exit status is 1 if one has survived. Of the engine, only what runs on a CPU is tested.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "tools/mutations.yaml"
SCRATCH = ROOT / "build/mutants"
BUILD_SECONDS = 1200
TEST_SECONDS = 60
"""Of one test: what the slowest takes on a busy machine, several times."""
TESTS_SECONDS = 900
"""Of all that concern a mutation."""
CPU_ONLY = "not emulated and not fake_device"


@dataclass(frozen=True)
class Mutation:
    """A mistake in the sources."""

    file: str
    """Its base name, for folders may change."""
    text: str
    becomes: str
    why: str
    """What it breaks."""
    equivalent: str | None = None
    """Why nobody can tell the difference."""

    @property
    def source(self) -> Path:
        """The file, from the tree's root. Raises ValueError unless there is one of that name."""
        found = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob(self.file))
        if len(found) != 1:
            raise ValueError(f"{self}: csrc has {len(found)} files of that name")
        return found[0]

    @property
    def key(self) -> str:
        """Another one when the mutation or its file is another."""
        parts = (self.file, self.text, self.becomes, (ROOT / self.source).read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def apply(self) -> str:
        """The file's text with the mistake. Raises ValueError unless there is one place for it."""
        whole = (ROOT / self.source).read_text()
        if whole.count(self.text) != 1:
            raise ValueError(f"{self}: its file has the text {whole.count(self.text)} times")
        return whole.replace(self.text, self.becomes)

    def __str__(self) -> str:
        return f"{self.file}: {_one_line(self.text)} → {_one_line(self.becomes) or 'nothing'} ({self.why})"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def load() -> tuple[list[Mutation], dict[str, list[str]]]:
    """The mutations, and by base name the tests that concern a file."""
    content = yaml.safe_load(MUTATIONS.read_text())
    mutations = [Mutation(file, **each) for file, of_file in content["mutations"].items() for each in of_file]
    tests: dict[str, list[str]] = {}
    for group in content["tests"]:
        for file in group["files"]:
            tests.setdefault(file, []).extend(group["run"])
    return mutations, tests


def copy_tree() -> Path:
    """The tree as it is, in a folder of its own. What has not changed since the last time keeps its objects."""
    tree = SCRATCH / "tree"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name in names if (ROOT / name).is_file()]
    for folder in ("csrc", "fastsync", "tests"):  # a file that is gone must not be built, or imported
        for old in (tree / folder).rglob("*"):
            if old.is_file() and old.suffix != ".so" and str(old.relative_to(tree)) not in names:
                old.unlink()
    for name in names:
        _write(tree / name, (ROOT / name).read_bytes())
    with suppress(FileExistsError):
        (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def _write(file: Path, content: bytes) -> None:
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def build(tree: Path) -> None:
    """Raises SystemExit where it does not compile."""
    code, output = _run(
        [str(tree / ".venv/bin/python"), "setup.py", "-q", "build_ext", "--inplace"], tree, BUILD_SECONDS
    )
    if code != 0:
        raise SystemExit(f"{output}\nmutate: the build failed: see above")


def test(tree: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails, or what else went wrong; None where all pass."""
    command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    code, output = _run([*command, f"--timeout={TEST_SECONDS}", "-k", CPU_ONLY, *tests], tree, TESTS_SECONDS)
    (SCRATCH / "last-tests.log").write_text(output)
    if code == 0:
        return None
    if code is None:
        return f"no end within {TESTS_SECONDS} s"
    if code == 4:
        raise SystemExit(f"{output}\nmutate: pytest refused to run")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return failed.group(1) if failed else f"pytest ended with status {code}"


def _run(command: Sequence[str], tree: Path, limit: float) -> tuple[int | None, str]:
    """The exit status, None after the time limit, and what was printed. Ends all that the command has started."""
    path = f"{tree / '.venv/bin'}:{os.environ.get('PATH', '')}"  # where ninja is
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tree), "FASTSYNC_WERROR": "0"}
    log = SCRATCH / "command.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def check_unmutated(tree: Path, tests: Sequence[str]) -> None:
    """Raises SystemExit where the tests fail without any mutation: then they tell nothing."""
    print(f"mutate: {len(tests)} files of tests, without a mutation", flush=True)
    if (failure := test(tree, tests)) is not None:
        raise SystemExit(f"mutate: {failure} fails without a mutation; see {SCRATCH / 'last-tests.log'}")


def try_one(tree: Path, mutation: Mutation, tests: Sequence[str]) -> str | None:
    """What caught it; None where nothing did."""
    file = tree / mutation.source
    _write(file, mutation.apply().encode())
    try:
        build(tree)
        return test(tree, tests)
    finally:
        _write(file, (ROOT / mutation.source).read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="FILE", help="the mutations of this file; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args()
    mutations, tests = load()
    if options.only:
        mutations = [mutation for mutation in mutations if mutation.file in options.only]
    if not mutations:
        parser.error(f"--only: no mutation is of {', '.join(options.only)}")
    if options.list:
        print("\n".join(map(str, mutations)))
        return 0
    SCRATCH.mkdir(parents=True, exist_ok=True)
    results_file = SCRATCH / "results.json"
    caught_by: dict[str, str] = json.loads(results_file.read_text()) if results_file.exists() else {}
    left = [mutation for mutation in mutations if mutation.equivalent is None and mutation.key not in caught_by]
    if left:
        tree = copy_tree()
        build(tree)
        check_unmutated(tree, list(dict.fromkeys(test for mutation in left for test in tests[mutation.file])))
    for number, mutation in enumerate(left, 1):
        started = time.monotonic()
        caught = try_one(tree, mutation, tests[mutation.file])
        print(f"[{number}/{len(left)}] {mutation}\n  {'SURVIVED' if caught is None else f'caught by {caught}'}", end="")
        print(f", {time.monotonic() - started:.0f} s", flush=True)
        if caught is not None:
            caught_by[mutation.key] = caught
            results_file.write_text(json.dumps(caught_by, indent=1))
    return report(mutations, caught_by)


def report(mutations: Sequence[Mutation], caught_by: dict[str, str]) -> int:
    verdicts = {m: "equivalent" if m.equivalent else "caught" if m.key in caught_by else "survived" for m in mutations}
    for mutation, verdict in verdicts.items():
        if verdict != "caught":
            print(f"{verdict}: {mutation}" + (f"\n  {mutation.equivalent}" if mutation.equivalent else ""))
    counts = Counter(verdicts.values())
    print(
        f"mutate: of {len(mutations)} mutations {counts['caught']} caught, {counts['survived']} survived, "
        f"{counts['equivalent']} equivalent"
    )
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
