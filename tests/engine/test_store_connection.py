"""An engine's own connection to the store of its group: to nobody else, and while Python goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from tests.ranks import run_ranks

LETTERS = range(ord("a"), ord("z") + 1)
HOLDS_A_STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=True)
print("ready", flush=True)
time.sleep(600)
"""


def _free_port() -> int:
    """One whose two bytes are letters, so that they may begin a path."""
    for first in LETTERS:
        for second in LETTERS:
            port = first << 8 | second
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(("", port))
                except OSError:
                    continue
                return port
    raise AssertionError("no port is free")


def _open_group(rank: int, world_size: int, port: int, *, is_master: bool) -> None:
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, is_master=is_master)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _leaves_a_strangers_socket_alone(rank: int, world_size: int, port: int, folder: str) -> None:
    """Its address has the port's bytes where those of an internet address have them."""
    os.chdir(folder)
    path = port.to_bytes(2, "big").decode() + str(rank)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(path)
        other_end, _ = listener.accept()
    _open_group(rank, world_size, port, is_master=rank == 0)
    parameter = nn.Parameter(torch.zeros(3))
    sync = fastsync.attach([parameter])
    stranger.close()
    other_end.settimeout(5)
    assert other_end.recv(1) == b""  # nobody holds the stranger's end
    (parameter * (1.0 + rank)).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5] * 3
    assert sync._engine.num_steps() == 1


def test_a_strangers_socket_stays_the_strangers(tmp_path: Path) -> None:
    run_ranks(_leaves_a_strangers_socket_alone, 2, _free_port(), str(tmp_path))


def _goes_on_while_the_store_is_stopped(rank: int, world_size: int, port: int, process: int) -> None:
    _open_group(rank, world_size, port, is_master=False)
    dist.barrier()
    model = nn.Linear(3, 3)
    if rank == 0:
        os.kill(process, signal.SIGSTOP)
    dist.barrier()

    def go_on() -> None:
        time.sleep(0.4)
        os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    fastsync.attach(model)  # waits for the store
    thread.join()
    model(torch.ones(1, 3)).sum().backward()


def test_other_threads_run_while_the_store_does_not_answer() -> None:
    port = _free_port()
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_STORE, str(port)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        try:
            run_ranks(_goes_on_while_the_store_is_stopped, 2, port, holder.pid, timeout=60)
        finally:
            holder.kill()
