"""Compiles csrc/ by ninja, for setup.py: several files as one unit, torch's headers read once, a line for each unit.

Note [Precompiled headers]
    Most of a unit's time goes into torch's headers. g++ reads those of csrc/torch_headers.h once, and keeps what it
    has made of them. It takes that for a unit with the same flags, and else reads them again. No file of csrc/
    includes csrc/torch_headers.h: each names the headers that it needs, so any compiler can do without.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# More compile faster in all, and slower after a change of one.
FILES_A_UNIT = 8
# What computes. It takes few of torch's headers, so it begins while g++ reads them for the others.
LOOPS = ("csrc/backend/reductions.cpp", "csrc/passes/cpu/", "csrc/ppo/float_loops.cpp")


@dataclass(frozen=True)
class Flags:
    """What each compiler is told."""

    cxx: Sequence[str]
    """Of what calls torch. Optimising that takes long, and gains nothing."""
    loops: Sequence[str]
    """Of LOOPS."""
    nvcc: Sequence[str] = ()


def host_compiler() -> list[str]:
    """The words of $CXX, such as those of "ccache g++"."""
    return shlex.split(os.environ.get("CXX", "c++"))


def macros() -> str:
    """What the compiler defines by itself, such as its name and version."""
    command = [*host_compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stdout


def units(sources: Iterable[str], folder: Path) -> list[str]:
    """Writes sources of C++ that include up to FILES_A_UNIT of ``sources`` each, all of one folder.

    Returns them, behind those of ``sources`` that stay alone.
    """
    ordered = sorted(sources, key=os.path.split)
    alone = [source for source in ordered if not source.endswith(".cpp") or source.startswith(LOOPS)]
    written = []
    for name, group in itertools.groupby((each for each in ordered if each not in alone), os.path.dirname):
        members = list(group)
        size = -(-len(members) // -(-len(members) // FILES_A_UNIT))
        for begin in range(0, len(members), size):
            included = (os.path.relpath(member, "csrc") for member in members[begin : begin + size])
            unit = folder / f"{name.replace('/', '_')}_{begin // size}.cpp"
            write(unit, "".join(f'#include "{member}"\n' for member in included))
            written.append(str(unit))
    return [*alone, *written]


def compile_units(sources: Iterable[str], flags: Flags, folder: Path, num_jobs: int, is_quiet: bool) -> dict[str, str]:
    """Compiles what has changed since the last time, and returns the object file of each source.

    Args:
        folder: where objects go. Each torch, Python and sanitizer needs one of its own. Other flags, or headers that
            have changed, compile anew by themselves.

    Raises:
        SystemExit: ninja is missing, or a compiler has failed, and has said why.
    """
    ninja = shutil.which("ninja")
    if ninja is None:
        raise SystemExit("fastsync: ninja, which runs the compilers, is missing; run: pip install ninja")
    objects = {source: f"{folder}/{source.replace('/', '_')}.o" for source in sources}
    write(folder / "build.ninja", _ninja_file(objects, flags, folder))
    if not is_quiet:
        print(f"fastsync: compiling what has changed of {len(objects)} units, {num_jobs} at a time", flush=True)
    command = [ninja, f"-j{num_jobs}", *(["--quiet"] if is_quiet else []), "-f", f"{folder}/build.ninja"]
    # Each unit that is done, and how many of how many are.
    if subprocess.run(command, env=os.environ | {"NINJA_STATUS": "fastsync: [%f/%t] "}).returncode != 0:
        raise SystemExit("fastsync: the extension does not compile; the compiler's errors are above")
    return objects


def _ninja_file(objects: Mapping[str, str], flags: Flags, folder: Path) -> str:
    """The edges stand in the order in which they are to begin."""
    defined = macros()
    version = "".join(re.findall(r"__VERSION__ (.*)", defined))
    headers = _headers(defined, folder)
    cxx = [*host_compiler(), "-MD", *flags.cxx]
    rules = {
        "precompile": [*cxx, "-x", "c++-header"],
        "loops": [*host_compiler(), "-MD", *flags.loops, "-c"],
        "cxx": [*cxx, "-c"],
        "cxx_with_headers": [*cxx, "-Winvalid-pch", "-include", headers or "", "-c"],
        "nvcc": [f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "-MD", *flags.nvcc, "-c"],
    }
    lines = [f"builddir = {_path(str(folder))}"]  # where ninja notes what it has done
    for name, command in rules.items():
        # The comment makes it another command with another compiler of the same name.
        line = f"{_words(command)} -MF $out.d $in -o $out # {_words([version])}"
        lines += [f"rule {name}", f"  command = {line}", "  description = $in"]
        lines += ["  depfile = $out.d", "  deps = gcc"]
    if headers is not None:
        lines.append(f"build {_path(f'{headers}.gch')}: precompile {_path(headers)}")
    for source, compiled in objects.items():
        if source.endswith(".cu"):
            rule = "nvcc"
        elif source.startswith(LOOPS):
            rule = "loops"
        else:
            rule = "cxx" if headers is None else "cxx_with_headers"
        needs = f" | {_path(f'{headers}.gch')}" if rule == "cxx_with_headers" else ""
        lines.append(f"build {_path(compiled)}: {rule} {_path(source)}{needs}")
    return "\n".join([*lines, ""])


def _headers(defined: str, folder: Path) -> str | None:
    """The header that g++ precompiles; None for other compilers, which take a precompiled one in other ways."""
    if "__GNUC__" not in defined or "__clang__" in defined:
        return None
    headers = folder / "precompiled.h"
    write(headers, '#include "torch_headers.h"\n')
    return str(headers)


def _words(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: str) -> str:
    return re.sub(r"[$ :]", r"$\g<0>", path)


def write(path: Path, text: str) -> None:
    """Leaves a file alone that has this text already, so that nothing is compiled again because of it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
