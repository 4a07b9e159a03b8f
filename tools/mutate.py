"""Do the tests notice when the C++ engine is wrong? Breaks it on purpose, one place at a time.

    nice python -m tools.mutate --only pack_unpack.cpp

``tools/mutations.txt`` holds the mistakes, and the tests that concern a file. They are made in a worktree under
``build/mutants``, one after the other; each is built and tested until the first failure. Tests whose names tell of what
it breaks come first, which makes most mistakes a matter of seconds. A mistake is caught if a test fails, dies or takes
too long. The exit status is 1 if one has survived: then a test is missing. Of the engine, only
what runs on a CPU or on the fake device is tested.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import prove_gpu

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "tools/mutations.txt"
TREE = ROOT / "build/mutants/tree"
LOG = ROOT / "build/mutants/command.log"
BUILD = (".venv/bin/python", "setup.py", "-q", "build_ext", "--inplace")
BUILD_SECONDS = 1200
TEST = (".venv/bin/python", "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--timeout=60")
TESTS_SECONDS = 900  # of all that concern a mistake
NUM_LIKELY = 6  # tests that come first
NO_TESTS = 5  # pytest's exit status where nothing was chosen
NO_KERNELS = ("-k", "not emulated")  # each would be compiled anew for the host


@dataclass(frozen=True)
class Mutation:
    """A mistake in the sources."""

    file: str  # its base name, for folders may change
    text: str
    becomes: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def source(self) -> Path:
        """The file, from the tree's root."""
        (found,) = (ROOT / "csrc").rglob(self.file)
        return found.relative_to(ROOT)

    @property
    def likely_tests(self) -> list[str]:
        """The tests whose names and files share the most telling words with what the mistake breaks, best first."""
        words_of = {
            f"{file}::{name}": words(f"{Path(file).stem} {name}")
            for file in self.tests
            for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
        }
        num_with = Counter(word for each in words_of.values() for word in each)
        wanted = words(f"{self.breaks} {Path(self.file).stem}")

        def likeness(test: str) -> float:
            """Rare words count more, and a long name's words count less, as in a search engine."""
            telling = [math.log(1 + len(words_of) / num_with[word]) for word in words_of[test] & wanted]
            return sum(telling) / (1 + math.sqrt(len(words_of[test])))

        return sorted(words_of, key=likeness, reverse=True)[:NUM_LIKELY]

    def apply(self) -> str:
        """The file's text with the mistake. Raises ValueError unless there is one place for it."""
        whole = (ROOT / self.source).read_text()
        if whole.count(self.text) != 1:
            raise ValueError(f"{self}: its file has the text {whole.count(self.text)} times")
        return whole.replace(self.text, self.becomes)

    def __str__(self) -> str:
        return f"{self.file}: {self.text} => {self.becomes or 'nothing'} ({self.breaks})"


def words(text: str) -> frozenset[str]:
    """The words of a sentence or a name, without a plural's s."""
    return frozenset(word.lower().rstrip("s") for word in re.findall("[A-Za-z]+", text.replace("_", " ")))


def load() -> Iterator[Mutation]:
    """The mistakes, in the order of the list."""
    tests = tuple[str, ...]()
    for line in MUTATIONS.read_text().splitlines():
        if found := re.fullmatch(r"  (\S+): (.+?) => (.*?) ?## (.+)", line):
            yield Mutation(*(each.strip() for each in found.groups()), tests=tests)
        elif not line.startswith("#"):
            tests = tuple(f"tests/{name}.py" for name in line.split())


def check_out() -> None:
    """Checks out the tree, with what is changed of tracked files. What stays the same keeps its objects."""
    commit = git("stash", "create") or git("rev-parse", "HEAD")  # the tree has a HEAD of its own
    if TREE.exists():
        git("-C", str(TREE), "checkout", "--quiet", "--force", "--detach", commit)
    else:
        git("worktree", "prune")
        git("worktree", "add", "--quiet", "--detach", str(TREE), commit)
        (TREE / ".venv").symlink_to(ROOT / ".venv")


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build() -> None:
    code, output = run(BUILD, BUILD_SECONDS)
    if code != 0:
        raise SystemExit(f"{output}\nmutate: the build failed: see above")


def test(tests: Sequence[str]) -> str | None:
    """The first test that fails, or what else went wrong; None where all pass."""
    code, output = run((*TEST, *NO_KERNELS, *tests), TESTS_SECONDS)
    if code == 4:
        raise SystemExit(f"{output}\nmutate: pytest refused to run")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return None if code in (0, NO_TESTS) else failed[1] if failed else f"no failure, but status {code}"


def run(words: Sequence[str], limit: float) -> tuple[int | None, str]:
    """The exit status, None after the time limit, and what was printed. Ends all that the command has started."""
    LOG.unlink(missing_ok=True)
    code = prove_gpu.run(prove_gpu.Command(words, limit, {"FASTSYNC_WERROR": "0"}, folder=TREE), LOG, limit)
    return code, LOG.read_text(errors="replace")


def caught_by(mutation: Mutation) -> str | None:
    """What notices the mistake; None where nothing does."""
    file = TREE / mutation.source
    file.write_text(mutation.apply())
    try:
        build()
        return test(mutation.likely_tests) or test(mutation.tests)
    finally:
        file.write_text((ROOT / mutation.source).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="FILE", help="the mistakes in this file; may be repeated")
    options = parser.parse_args()
    mutations = [mutation for mutation in load() if options.only is None or mutation.file in options.only]
    check_out()
    build()
    if (failure := test(sorted({test for mutation in mutations for test in mutation.tests}))) is not None:
        raise SystemExit(f"mutate: {failure} without a mistake, so that the tests tell nothing; see {LOG}")
    num_survived = 0
    for number, mutation in enumerate(mutations, 1):
        caught = caught_by(mutation)
        num_survived += caught is None
        verdict = f"caught by {caught}" if caught else "SURVIVED"
        print(f"[{number}/{len(mutations)}] {mutation}\n  {verdict}", flush=True)
    print(f"mutate: {num_survived} of {len(mutations)} mistakes have survived")
    return int(num_survived > 0)


if __name__ == "__main__":
    sys.exit(main())
