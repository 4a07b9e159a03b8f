"""Hooks that users put on parameters after attach: PyTorch destroys ours with the first of them, and averages go on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fastsync
from tests.ranks import on_ranks

SIZE = 3


def _gradient(rank: int, step: int) -> Tensor:
    return torch.arange(SIZE) + 10.0 * step + 4.0 * rank  # whose means of two are exact


def _backward(parameters: list[nn.Parameter], rank: int, step: int) -> None:
    for parameter in parameters:
        parameter.grad = None
    sum((parameter * _gradient(rank, step)).sum() for parameter in parameters).backward()


def _assert_means(parameters: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    expected = factor * (_gradient(0, step) + _gradient(1, step)) / 2
    for parameter in parameters:
        assert torch.equal(parameter.grad.float(), expected)


@on_ranks(2)
def test_a_hook_put_on_after_attach(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(3)]
    sync = fastsync.attach(parameters)
    _backward(parameters, rank, 0)
    _assert_means(parameters, 0)

    handle = parameters[1].register_hook(lambda grad: 2 * grad)
    _backward(parameters[1:2], rank, 1)
    _assert_means(parameters[1:2], 1, factor=2.0)
    for step in range(2, 5):  # of a new graph each, and so with other accumulators
        _backward(parameters[1:2], rank, step)
        _assert_means(parameters[1:2], step, factor=2.0)
    handle.remove()
    parameters[1].data = parameters[1].data.clone()
    _backward(parameters, rank, 5)
    _assert_means(parameters, 5)

    # Between forward and backward, on all of them.
    loss = sum((parameter * _gradient(rank, 6)).sum() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = None
        parameter.register_hook(lambda grad: 4 * grad)
    loss.backward()
    _assert_means(parameters[:1] + parameters[2:], 6, factor=4.0)
    for parameter in parameters:
        parameter.data = parameter.data.double()  # with a new accumulator
    _backward(parameters, rank, 7)
    _assert_means(parameters[:1] + parameters[2:], 7, factor=4.0)
    assert sync.stats().num_steps == 8


@on_ranks(2)
def test_detached_with_hooks_put_on_since(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
    sync = fastsync.attach(parameters)
    for parameter in parameters:
        parameter.register_hook(lambda grad: 2 * grad)
    sync.detach()
    _backward(parameters, rank, 1)
    for parameter in parameters:
        assert torch.equal(parameter.grad, 2 * _gradient(rank, 1))
    fastsync.attach(parameters)  # anew, where there are Python's hooks already
    _backward(parameters, rank, 2)
    _assert_means(parameters, 2, factor=2.0)


@on_ranks(2)
def test_cast_after_a_hook_was_put_on(rank: int, world_size: int) -> None:
    """Between the hook and the next gradient, which another accumulator than before takes."""
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(3)]
    sync = fastsync.attach(parameters)
    calls: list[Tensor] = []
    for parameter in parameters:
        parameter.register_hook(lambda grad: 2 * grad)
        parameter.data = parameter.data.double()
    parameters[1].register_post_accumulate_grad_hook(calls.append)
    for step in range(3):
        _backward(parameters[::2], rank, step)
        for parameter in parameters[::2]:
            assert torch.equal(parameter.grad, _gradient(0, step) + _gradient(1, step))
    assert sync.stats().num_steps == 3
    sync.detach()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters[::2])
    _backward(parameters, rank, 3)
    for parameter in parameters:
        assert torch.equal(parameter.grad, 2 * _gradient(rank, 3).double())
    assert len(calls) == 1
