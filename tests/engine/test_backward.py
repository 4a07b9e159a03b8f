"""Which backward ends what was begun in it: the class behind attach()'s hooks, without a process group."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastsync import _C

LIMIT_SECONDS = 60.0
NO_GRAPH_TASK = -1


class Begins:
    """Begins something with the first of its parameter's gradients, and notes what becomes of it."""

    def __init__(self, events: list[str] | None = None, name: str = "") -> None:
        self.events = [] if events is None else events
        self.name = name
        self.is_under_way = False
        self.parameter = torch.ones(3, requires_grad=True)
        self.parameter.register_hook(self._on_gradient)
        self.backward = _C.Backward(lambda: self.is_under_way, self._end, self._give_up)

    def _on_gradient(self, gradient: Tensor) -> None:
        self.backward.enter()
        self.is_under_way = True
        self.events.append(f"gradient{self.name}")

    def _end(self, graph_task: int) -> None:
        assert self.backward.ends_with(graph_task)
        self.is_under_way = False
        self.events.append(f"end{self.name}")

    def _give_up(self) -> None:
        self.events.append("give up")


class _Calls(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def before(inputs: Tensor, call: Callable[[], object]) -> Tensor:
    """The inputs, whose gradient is there once the call has been made."""
    return _Calls.apply(inputs, call)


def fail() -> None:
    raise ArithmeticError("as planned")


def failed_backward(*begins: Begins) -> None:
    """It raises when all have begun: autograd goes through the nodes that were made last first."""
    first = before(torch.ones(3, requires_grad=True), fail)
    with pytest.raises(ArithmeticError, match="as planned"):
        torch.stack([first.sum(), *(each.parameter.sum() for each in begins)]).sum().backward()


def test_a_backward_ends_once_what_was_begun_in_it():
    begins = Begins()
    for _ in range(2):
        (begins.parameter.exp().sum() + begins.parameter.sum()).backward()
        assert begins.events == ["gradient", "end"]
        assert not begins.backward.is_interrupted()
        begins.events.clear()


def test_nothing_that_is_not_under_way_is_interrupted_or_ends():
    begins = Begins()
    assert not begins.backward.is_interrupted()
    assert not begins.backward.ends_with(NO_GRAPH_TASK)
    begins.is_under_way = True
    assert begins.backward.is_interrupted()  # for nobody owns it


def test_a_backward_that_raises_interrupts_what_was_begun_in_it():
    begins = Begins()
    failed_backward(begins)
    assert begins.events == ["gradient", "give up"]
    assert begins.backward.is_interrupted()
    begins.parameter.sum().backward()  # it goes on in this one
    assert begins.events == ["gradient", "give up", "gradient", "end"]
    assert not begins.backward.is_interrupted()


def test_two_that_take_part_in_one_backward_are_given_up_together():
    events: list[str] = []
    one, other = Begins(events, " of one"), Begins(events, " of the other")
    (one.parameter.sum() + other.parameter.sum()).backward()
    assert sorted(events) == ["end of one", "end of the other", "gradient of one", "gradient of the other"]
    assert events[2].startswith("end")
    events.clear()
    failed_backward(one, other)
    assert sorted(events) == ["give up", "gradient of one", "gradient of the other"]
    assert events[2] == "give up"
    assert one.backward.is_interrupted()
    assert other.backward.is_interrupted()


def test_what_goes_wrong_in_giving_up_is_said_and_ends_nothing(capfd: pytest.CaptureFixture[str]):
    begins = Begins()

    def fails() -> None:
        raise ValueError("it cannot be given up")

    begins.backward = _C.Backward(lambda: begins.is_under_way, begins._end, fails)
    failed_backward(begins)
    assert "it cannot be given up" in capfd.readouterr().err
    assert begins.backward.is_interrupted()


def reentrant(inputs: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    return checkpoint(call, inputs, use_reentrant=True)


def test_what_a_reentrant_checkpoint_begins_ends_with_the_backward_around_it():
    begins = Begins()
    for _ in range(2):
        first = torch.ones(3, requires_grad=True)
        inputs = before(first, lambda: begins.events.append("goes on"))
        for _ in range(2):
            inputs = reentrant(inputs, lambda hidden: hidden * begins.parameter)
        inputs.sum().backward()
        assert begins.events == ["gradient", "gradient", "goes on", "end"]
        assert not begins.backward.is_interrupted()
        begins.events.clear()


def test_the_backward_around_a_checkpoint_may_fail():
    begins, direct = Begins(), torch.ones(3, requires_grad=True)

    def multiply(hidden: Tensor) -> Tensor:
        return hidden * begins.parameter

    with pytest.raises(ArithmeticError, match="as planned"):
        reentrant(before(direct, fail), multiply).sum().backward()
    assert begins.events == ["gradient", "give up"]
    begins.events.clear()
    # Here it fails before it comes to what the checkpoint's gradient is for.
    loss = before(direct, fail).sum() + reentrant(direct, multiply).sum()
    with pytest.raises(ArithmeticError, match="as planned"):
        loss.backward()
    del loss  # and with it the graph, which might have been gone through again
    gc.collect()
    assert begins.events == ["gradient"]
    assert begins.backward.is_interrupted()


def test_what_a_failed_backward_inside_another_one_leaves_waits_for_the_end_of_that():
    begins = Begins()

    def fail_inside() -> None:
        with torch.enable_grad():
            failed_backward(begins)
        begins.events.append("goes on")
        assert begins.backward.is_interrupted()

    before(torch.ones(3, requires_grad=True), fail_inside).sum().backward()
    assert begins.events == ["gradient", "goes on", "give up"]
    assert begins.backward.is_interrupted()


def test_another_threads_backward_is_not_interrupted():
    begins = Begins()
    has_begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        assert may_end.wait(LIMIT_SECONDS)

    def run() -> None:
        first = before(torch.ones(3, requires_grad=True), wait)
        (first.sum() + begins.parameter.sum()).backward()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run)
        try:
            assert has_begun.wait(LIMIT_SECONDS)
            assert begins.is_under_way
            assert not begins.backward.is_interrupted()
            assert not begins.backward.ends_with(NO_GRAPH_TASK)
        finally:
            may_end.set()
        other.result()
    assert begins.events == ["gradient", "end"]
