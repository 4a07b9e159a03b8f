"""Packages for a machine without a network: ``fill`` fetches them into a folder, ``install`` takes them from there.

What is carried is what tests and benchmarks import and a machine with torch, nvcc, ninja, pytest and numpy may lack,
but for what is large (matplotlib, scipy, tensorboard). Wheels are of pure Python, so that they fit any Python there, or
one for each. They are installed into a folder of their own that goes onto the import path, never into the system.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "build/gpu-wheels"
SITE = ROOT / "build/prove-gpu-site"
PACKAGES = (
    "setuptools>=77.0.3",
    "pytest>=9",
    "pluggy>=1.6",
    "iniconfig>=2",
    "packaging>=24",
    "pygments>=2.15",
    "pytest-timeout",
    "pytest-benchmark",
    "py-cpuinfo2",
    "hypothesis",
    "sortedcontainers",
    "expecttest",
    "rich",
    "markdown-it-py",
    "mdurl",
    "tyro",
    "docstring-parser",
    "typeguard",
    "typing-extensions>=4.14",
    "gymnasium>=1.4",
    "cloudpickle",
    "farama-notifications",
    "nvidia-ml-py",
    "stable-baselines3",
)
"""With what they need in turn, for nothing is resolved. A version is the least that does."""
COMPILED = ("pyyaml",)
"""Those that come with a wheel for each of ``PYTHONS``."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MANYLINUX = "manylinux2014_x86_64"
PURE = ("--platform", "any", "--implementation", "py", "--abi", "none")
SECONDS = 120.0
"""That pip may take for a package."""


def fill() -> str:
    """Fetches what the folder lacks. Returns what happened, which without a network is nothing."""
    CARRIED.mkdir(parents=True, exist_ok=True)
    held = {_name(path.name.split("-")[0]) for path in CARRIED.glob("*.whl")}
    wanted = [(package, PURE) for package in PACKAGES if _name(_split(package)[0]) not in held]
    if not held.issuperset(COMPILED):
        wanted += [
            (name, ("--platform", MANYLINUX, "--python-version", python)) for name in COMPILED for python in PYTHONS
        ]
    if not wanted:
        return f"{_contents()}; nothing to fetch"
    failed = [package for package, kind in wanted if not _fetch(package, kind)]
    return _contents() + (f"; no network, or no such wheel: {', '.join(dict.fromkeys(failed))}" if failed else "")


def _fetch(package: str, kind: Sequence[str]) -> bool:
    """In the version that is installed here, with which the tests have run, or else in the newest that there is."""
    command = [*_pip("download"), "--no-deps", "--only-binary=:all:", "--dest", str(CARRIED), *kind]
    return any(_run([*command, version]) for version in dict.fromkeys((_pinned(package), package)))


def install() -> str:
    """Installs from the folder what this Python lacks. Returns what it lacks then.

    A wheel without scripts is an archive of what goes onto the import path: that takes a second, and no pip.
    """
    for package in _lacking():
        for wheel in CARRIED.glob("*.whl"):
            distribution, _, python, *_ = wheel.stem.split("-")
            if _name(distribution) == _name(_split(package)[0]) and _fits(python):
                ZipFile(wheel).extractall(SITE)
    lacking = _lacking()
    return f"missing here and not carried: {', '.join(lacking)}" if lacking else "all packages are here"


def _fits(python: str) -> bool:
    """Whether a wheel's tag, such as py3 or cp312, is for this Python."""
    return {"py3", f"cp{sys.version_info.major}{sys.version_info.minor}"} & set(python.split(".")) != set()


def _lacking() -> list[str]:
    return [package for package in (*PACKAGES, *COMPILED) if not _is_here(package)]


def _is_here(package: str) -> bool:
    name, least = _split(package)
    for path in ([str(SITE)], sys.path):
        found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
        if found is not None and _numbers(found.version) >= _numbers(least):
            return True
    return False


def _pinned(package: str) -> str:
    name, _ = _split(package)
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _split(package: str) -> tuple[str, str]:
    name, _, least = package.partition(">=")
    return name, least


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _contents() -> str:
    files = list(CARRIED.glob("*.whl"))
    return f"{len(files)} wheels, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB in {CARRIED.name}"


def _pip(verb: str) -> list[str]:
    return [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check"]


def _run(command: list[str]) -> bool:
    # Few retries: without a network each takes its time.
    retries = ["--retries", "1", "--timeout", "10"]
    try:
        return subprocess.run([*command, *retries], timeout=SECONDS, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    print({"fill": fill, "install": install}[sys.argv[1]]())
