"""Network namespaces for ranks: one each, joined by links of a known rate. Linux, and for root.

In each namespace stands one end of a veth pair, ``eth0``; the other end is a port of a bridge in a namespace of its
own. Nothing of it touches the machine's own network, and runs at the same time do not see each other. Both ends are
shaped by a token bucket (tc-tbf(8)), so that a rank neither sends nor is sent more than the rate.

Namespaces are named after the process that made them. Those of processes that are gone are removed at the next start.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.units import RATES

FOLDER = Path("/run/netns")
COMMAND_TIMEOUT = 20.0
"""Seconds that ip and tc have; they need milliseconds."""
BURST_SECONDS = 1e-3
"""What the token bucket holds, as time on the link. So much goes through an idle link at once, so that what is timed
may beat the link's limit by this, and no more. Less would not do: the kernel comes late to a bucket that is full again,
and what it could have sent until then is lost. With 0.13 ms, links of 1 Gbit/s carried 0.84 of it."""
FRAME = 1514
"""Bytes of the longest Ethernet frame that the bucket counts: 1,500 of IP and the header."""
PACKET = 65536
"""Bytes of the longest packet that the kernel cuts into frames as late as it can."""
QUEUE_SECONDS = 50e-3
"""What may wait for a link before packets are dropped."""
CONGESTION_CONTROL = "reno"
"""In every kernel, and open to every namespace; the machine's own choice may be neither."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run."""


class NetworkError(RuntimeError):
    """A command that sets up namespaces failed."""


def burst(rate: int) -> int:
    """Bytes that the token bucket of a link holds: what an idle link lets through at once."""
    return max(round(rate / 8 * BURST_SECONDS), 2 * FRAME)


def why_not() -> str | None:
    """What is missing here to make namespaces and links, found out by making some; None if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are a part of Linux, and this is {sys.platform}"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found: install the package iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces: try sudo"
    try:
        with Network(1, RATES["gbit"]):
            return None
    except NetworkError as error:
        return f"this machine or its container does not let root make network namespaces: {error}"


class Network:
    """Namespaces of ``num_ranks`` ranks, for the time of a ``with`` block. They go with all that runs in them.

    Args:
        num_ranks: how many.
        rate: of each rank's link, each way, in bit/s.

    Raises:
        NetworkError: on entering; nothing is left then. On leaving, if something could not be removed: the rest is.
    """

    def __init__(self, num_ranks: int, rate: int) -> None:
        self.rate = rate
        self.addresses = [f"10.0.0.{1 + rank}" for rank in range(num_ranks)]

    def __enter__(self) -> "Network":
        remove_stale()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        errors = []
        with signals_wait():
            for name in _namespaces():
                if name.startswith(_prefix()):
                    try:
                        remove(name)
                    except NetworkError as error:
                        errors.append(error)
        if errors:
            raise errors[0]

    def start(self, rank: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Starts a process in a rank's namespace; ``options`` are Popen's. The process has the Popen's pid."""
        return subprocess.Popen(["ip", "netns", "exec", self._name(rank), *command], **options)

    def _name(self, what: int | str) -> str:
        return f"{_prefix()}{what}"

    def _make(self) -> None:
        bridge = self._name("bridge")
        _run("ip", "netns", "add", bridge)
        _configure("ip", bridge, ["link add bridge type bridge stp_state 0 forward_delay 0", "link set bridge up"])
        for rank, address in enumerate(self.addresses):
            name, port = self._name(rank), f"port{rank}"
            # What arrives at a rank passes through one core, as a mask of cores, or packets of one connection overtake
            # each other where cores are busy, and TCP waits for what it takes to be lost.
            core = 1 << rank % min(os.cpu_count() or 1, 32)
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {CONGESTION_CONTROL} > {_CONGESTION_CONTROL_FILE}")
            # Without addresses of IPv6, whose set-up would take its part of the link.
            _configure("ip", bridge, [f"link add {port} type veth peer name eth0 netns {name}"])
            _configure("ip", bridge, [f"link set {port} addrgenmode none", f"link set {port} master bridge up"])
            _configure(
                "ip",
                name,
                [
                    "link set lo up",
                    # The bucket has to hold several packets, or it is idle while the next one waits for it to fill.
                    f"link set eth0 addrgenmode none gso_max_size {min(PACKET, burst(self.rate) // 3)}",
                    f"address add {address}/24 dev eth0",
                    "link set eth0 up",
                ],
            )
            for namespace, device in ((bridge, port), (name, "eth0")):
                _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {core:x} > {_CORES_FILE.format(device)}")
                _configure("tc", namespace, [f"qdisc add dev {device} root {self._shape()}"])

    def _shape(self) -> str:
        queue = max(round(self.rate / 8 * QUEUE_SECONDS), 4 * PACKET)
        return f"tbf rate {self.rate}bit burst {burst(self.rate)} limit {queue}"


_CORES_FILE = "/sys/class/net/{}/queues/rx-0/rps_cpus"
_CONGESTION_CONTROL_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"


def remove_stale() -> None:
    """Removes the namespaces of runs that ended without doing so, with what still runs in them."""
    for name in _namespaces():
        _, pid, started, _ = name.split("-", 3)
        if _start_time(int(pid)) != int(started):
            remove(name)


def remove(name: str) -> None:
    """Ends what runs in a namespace, and removes it."""
    try:
        for pid in _run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):  # it may have ended on its own in the meantime
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
    except NetworkError:
        if (FOLDER / name).exists():  # another run that begins may have been faster
            raise


def _namespaces() -> list[str]:
    """The names of all of this kind, whoever made them."""
    names = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
    return [name for name in names if re.fullmatch(r"fastsync-\d+-\d+-\w+", name)]


def _prefix() -> str:
    # The time of start tells a process from a later one that has got the same number.
    return f"fastsync-{os.getpid()}-{_start_time(os.getpid())}-"


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is none of that number."""
    try:
        # proc(5): the 22nd field; the 2nd, a name in brackets, may hold spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _configure(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Runs ip or tc on each line, in a namespace."""
    _run(tool, "-netns", namespace, "-batch", "-", standard_input="\n".join(lines) + "\n")


def _run(*command: str, standard_input: str = "") -> str:
    """Runs a command and returns what it printed.

    Raises:
        NetworkError: it failed, or took too long. The message holds what it said.
    """
    said = f"{' '.join(command)}" + (f" (given {standard_input.strip()!r})" if standard_input else "")
    environment: Mapping[str, str] = os.environ | {"LC_ALL": "C"}
    try:
        process = subprocess.run(
            command,
            input=standard_input,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which then tidies up
        )
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{said} did not end within {COMMAND_TIMEOUT:g} s") from None
    if process.returncode != 0:
        raise NetworkError(f"{said} failed: {process.stderr.strip()}")
    return process.stdout


@contextmanager
def signals_wait() -> Iterator[list[signal.Signals]]:
    """Signals that end a run have their effect behind the block, so that it is whole.

    Yields those that have come so far. The block may take them from there and act on them itself. Blocking them instead
    would not do: any other thread takes them then, and Python runs their handlers in the main thread all the same.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # which alone runs handlers
        yield received
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOP_SIGNALS}
    waiting = True

    def keep(number: int, frame: FrameType | None) -> None:
        if waiting:
            received.append(signal.Signals(number))
        else:  # it came while handlers were being put back, of which this one may be left over
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, keep)
        yield received
    finally:
        waiting = False
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
