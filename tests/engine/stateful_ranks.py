"""Two ranks with an attached model, which do what they are told over a pipe, until there is nothing more to be told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

import fastsync
from tests.models import SMALL_BUCKETS, Fails, Given
from tests.ranks import run_ranks

SHAPES = [(3,), (300,), (7, 40), (2, 130), (1,)]
WORLD_SIZE = 2
ANSWER_SECONDS = 60.0
"""How long ranks may take for a command."""

Grads = list[list[float] | None]
"""What each parameter's gradient is: the values that its elements have, or None where there is none."""


class _Model(Given):
    """A ``Given`` whose backward may raise where it would come to a parameter's gradient."""

    fails_at: int | None = None

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        weights = [Fails.apply(w) if index == self.fails_at else w for index, w in enumerate(self.weights)]
        used = [(w * g).sum() for w, g in zip(weights, grads, strict=True) if g is not None]
        return torch.stack(used).sum()


class _Rank:
    """What a rank does. Each command returns its gradients afterwards."""

    def attach(self, compression: str) -> None:
        self.model = _Model([torch.zeros(shape) for shape in SHAPES])
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=SMALL_BUCKETS)

    def reattach(self, compression: str) -> None:
        self.sync.detach()
        self.zero_grad(True)
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=SMALL_BUCKETS)

    def compress(self, compression: str) -> None:
        self.sync.compression = compression

    def backward(self, values: Sequence[float | None], fails_at: int | None = None) -> None:
        grads = [None if v is None else torch.full(shape, v) for v, shape in zip(values, SHAPES, strict=True)]
        self.model.fails_at = fails_at
        try:
            self.model(grads).backward()
        except ArithmeticError:
            assert fails_at is not None
        else:
            assert fails_at is None
        finally:
            self.model.fails_at = None

    def accumulate(self, values: Sequence[float | None]) -> None:
        with self.sync.no_sync():
            self.backward(values)

    def synchronize(self) -> None:
        self.sync.synchronize()

    def fail(self, values: Sequence[float | None], fails_at: int | None, then: Sequence[float | None]) -> bool:
        """A backward that fails on this rank, or on the other one; and one that does not.

        Returns whether the first was noticed, by an error or by gradients that are nan.
        """
        noticed = fails_at is not None
        try:
            self.backward(values, fails_at)
        except RuntimeError:
            noticed = True
        noticed |= any(p.grad is not None and bool(p.grad.isnan().any()) for p in self.model.parameters())
        self.zero_grad(True)
        self.backward(then)
        return noticed

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def freeze(self, frozen: Sequence[bool]) -> None:
        for weight, is_frozen in zip(self.model.weights, frozen, strict=True):
            weight.requires_grad_(not is_frozen)
            if is_frozen:
                weight.grad = None

    def has_saturated(self) -> bool:
        """Whether the newest sync has counted values that did not fit the wire."""
        return self.sync.stats().num_steps > 0 and bool(self.sync.grad_stats().num_saturated)

    def grads(self) -> Grads:
        return [None if p.grad is None else p.grad.unique().tolist() for p in self.model.parameters()]


def _serve(rank: int, world_size: int, address: str) -> None:
    me = _Rank()
    with Client(address) as pipe:
        pipe.send(rank)
        with suppress(EOFError):
            while True:
                name, arguments = pipe.recv()
                returned = getattr(me, name)(*arguments)
                pipe.send((returned, me.grads(), me.has_saturated()))


class Ranks:
    """The processes, and what they are told. They end with ``close``, or when one has failed: then that tells why."""

    def __init__(self, folder: str, timeout: float) -> None:
        self._failure: BaseException | None = None
        with Listener(f"{folder}/ranks") as listener:
            self._thread = threading.Thread(target=self._run, args=(listener.address, timeout))
            self._thread.start()
            connections: dict[int, Connection[Any, Any]] = {}
            for _ in range(WORLD_SIZE):
                connection = listener.accept()
                connections[connection.recv()] = connection
        self._pipes = [connections[rank] for rank in range(WORLD_SIZE)]

    def _run(self, address: str, timeout: float) -> None:
        try:
            run_ranks(_serve, WORLD_SIZE, address, timeout=timeout)
        except BaseException as error:
            self._failure = error

    def tell(self, name: str, *of_rank: Sequence[Any]) -> tuple[list[Any], list[Grads], bool]:
        """What the command returns on each rank, the gradients there, and whether the newest sync saturated anywhere.

        Args:
            name: of the method.
            of_rank: the arguments, of each rank or of all.
        """
        for rank, pipe in enumerate(self._pipes):
            pipe.send((name, of_rank[rank if len(of_rank) > 1 else 0]))
        answers = [self._answer(rank, name) for rank in range(WORLD_SIZE)]
        returned, grads, saturated = (list(each) for each in zip(*answers, strict=True))
        return returned, grads, any(saturated)

    def _answer(self, rank: int, name: str) -> Any:
        try:
            if self._pipes[rank].poll(ANSWER_SECONDS):
                return self._pipes[rank].recv()
        except EOFError:
            self._thread.join()
            raise AssertionError(f"rank {rank} ended in {name}") from self._failure
        raise AssertionError(f"rank {rank} did not come to the end of {name} within {ANSWER_SECONDS:g} s")

    def close(self) -> None:
        """Ends the processes. Raises what went wrong in them."""
        for pipe in self._pipes:
            pipe.close()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
