"""Network namespaces of ranks, joined by links of a known rate. Linux, and for root.

In each namespace stands one end of a veth pair, ``eth0``; the other end is a port of a bridge in a namespace of its
own. Nothing of it touches the machine's own network, and runs at the same time do not see each other. Both ends are
shaped by a token bucket (tc-tbf(8)), so that a host neither sends nor is sent more than the rate.

Namespaces have no names: each lives as long as a process in it, which ends with the one that started it, however that
one ends. So nothing is ever left to be removed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.units import RATES

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
"""Commands that are needed, and the packages that have them."""
COMMAND_TIMEOUT = 20.0
"""Seconds that the commands in a namespace have; they need milliseconds."""
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


class NetworkError(RuntimeError):
    """A command that sets up namespaces failed."""


def burst(rate: int) -> int:
    """Bytes that the token bucket of a link holds: what an idle link lets through at once."""
    return max(round(rate / 8 * BURST_SECONDS), 2 * FRAME)


def why_not() -> str | None:
    """Says what is missing here to make namespaces and links, found out by making some; None if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are a part of Linux, and this is {sys.platform}"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        packages = dict.fromkeys(TOOLS[name] for name in missing)
        return f"{' and '.join(missing)} not found: install {' and '.join(packages)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces: try sudo"
    try:
        with Network(1, RATES["gbit"]):
            return None
    except NetworkError as error:
        return f"this machine or its container does not let root make network namespaces: {error}"


class Network:
    """A namespace for each of ``num_hosts`` hosts, for the time of a ``with`` block.

    Args:
        num_hosts: how many.
        rate: of each host's link, each way, in bit/s.

    Raises:
        NetworkError: on entering; nothing is left then.
    """

    def __init__(self, num_hosts: int, rate: int) -> None:
        self.rate = rate
        self.addresses = [f"10.0.0.{1 + host}" for host in range(num_hosts)]
        self.keepers: list[int] = []
        """Processes, one in each host's namespace."""

    def __enter__(self) -> "Network":
        with ExitStack() as stack:
            bridge = stack.enter_context(_namespace())
            _run_in(bridge, ["ip link add bridge type bridge stp_state 0 forward_delay 0", "ip link set bridge up"])
            for host, address in enumerate(self.addresses):
                self.keepers.append(stack.enter_context(_namespace()))
                self._connect(bridge, host, address)
            self._namespaces = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._namespaces.close()
        self.keepers.clear()

    def _connect(self, bridge: int, host: int, address: str) -> None:
        port, keeper = f"port{host}", self.keepers[host]
        # Without addresses of IPv6, whose set-up would take its part of the link.
        _run_in(
            bridge,
            [
                f"ip link add {port} type veth peer name eth0 netns {keeper}",
                f"ip link set {port} addrgenmode none",
                f"ip link set {port} master bridge up",
                *self._shape(port, host),
            ],
        )
        _run_in(
            keeper,
            [
                f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control",
                "ip link set lo up",
                # The bucket has to hold several packets, or it is idle while the next one waits for it to fill.
                f"ip link set eth0 addrgenmode none gso_max_size {min(PACKET, burst(self.rate) // 3)}",
                f"ip address add {address}/24 dev eth0",
                "ip link set eth0 up",
                *self._shape("eth0", host),
            ],
        )

    def _shape(self, device: str, host: int) -> list[str]:
        # What arrives at a host passes through one core, as a mask of cores, or packets of one connection overtake each
        # other where cores are busy, and TCP waits for what it takes to be lost.
        core = 1 << host % min(os.cpu_count() or 1, 32)
        queue = max(round(self.rate / 8 * QUEUE_SECONDS), 4 * PACKET)
        return [
            f"echo {core:x} > /sys/class/net/{device}/queues/rx-0/rps_cpus",
            f"tc qdisc add dev {device} root tbf rate {self.rate}bit burst {burst(self.rate)} limit {queue}",
        ]


@contextmanager
def _namespace() -> Iterator[int]:
    """A new namespace, and the process that keeps it: a cat that ends with its standard input."""
    command = ["unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && exec cat"]  # /sys shows its own
    pipe = subprocess.PIPE
    # In a session of its own, so that Ctrl-C is for this process, which then tidies up.
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, text=True, bufsize=1
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        keeper.stdin.write("\n")
        if not keeper.stdout.readline():
            raise NetworkError(f"{' '.join(command)} failed: {keeper.stderr.read().strip()}")
        yield keeper.pid


def _run_in(keeper: int, lines: Sequence[str]) -> None:
    """Runs shell commands in a namespace.

    Raises:
        NetworkError: one failed, or they took too long. The message holds what was said.
    """
    try:
        process = subprocess.run(
            ["nsenter", f"--target={keeper}", "--net", "--mount", "sh", "-ex"],
            input="\n".join(lines) + "\n",
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{'; '.join(lines)} did not end within {COMMAND_TIMEOUT:g} s") from None
    if process.returncode != 0:
        raise NetworkError(f"{process.stderr.strip()} (status {process.returncode})")
