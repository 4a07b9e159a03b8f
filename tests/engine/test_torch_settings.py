"""torch's settings for a whole process change nothing: default dtypes and devices, and modes around the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.entry_points import ALL, average
from tests.models import Given, assert_all_bitwise_equal, random_grads
from tests.ranks import on_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4)]
STEPS, WIRES = 3, ("fp16", "int8")
OUTER = {
    "LocalSGD": partial(fastsync.LocalSGD, sync_every=1),
    "DiLoCo": partial(fastsync.DiLoCo, sync_every=2, fragments=2, fragment_sync_delay=1),
    "TopK": partial(fastsync.DiLoCo, sync_every=1, compression=fastsync.TopK()),
}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": partial(_default_dtype, torch.float64),
    "bfloat16": partial(_default_dtype, torch.bfloat16),
    "meta": partial(torch.device, "meta"),
    "deterministic": _deterministic,
    "anomaly": partial(torch.autograd.set_detect_anomaly, True, check_nan=False),
}
AROUND_CALLS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class WithBuffers(Given):
    """With an integer and a float buffer."""

    def __init__(self, like: list[Tensor]) -> None:
        super().__init__(like)
        self.register_buffer("count", torch.arange(3, device="cpu"))
        self.register_buffer("mean", torch.full((5,), 0.5, dtype=torch.float32, device="cpu"))


def _grads(rank: int, step: int) -> list[Tensor]:
    return random_grads(rank, step, SHAPES, torch.float32)


def _trained(entry_point: str, rank: int, compression: str, around: Callable[[], Any], calls: Callable[[], Any]) -> Any:
    inputs = [_grads(rank, step) for step in range(STEPS)]
    model = WithBuffers(_grads(0, 0))
    with around():
        return _averages(entry_point, model, inputs, rank, compression, calls)


def _averages(
    entry_point: str, model: nn.Module, inputs: list[Any], rank: int, compression: str, around_calls: Callable[[], Any]
) -> list[Tensor]:
    """Of some steps, and their norms; for sites, the weights after them."""
    if entry_point in OUTER:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ExitStack() as stack:
            with around_calls():
                sites = OUTER[entry_point](model, optimizer)
            stack.enter_context(sites)
            for grads in inputs:
                optimizer.zero_grad()
                model(grads).backward()
                optimizer.step()
        sites.load_state_dict(copy.deepcopy(sites.state_dict()))
        return [parameter.detach().clone() for parameter in model.parameters()]
    options = {"broadcast_buffers": True} if entry_point in ("attach", "synchronize") else {}
    is_made_by_torch = "hook" in entry_point or entry_point == "sharded"
    with nullcontext() if is_made_by_torch else around_calls():
        given = average(entry_point, model, compression, **options)
    kept = []
    for grads in inputs:
        given.model.zero_grad()
        given.model(grads).backward()
        with around_calls():
            given.finish()
            if isinstance(given.handle, GradientSynchronizer):
                given.handle.set_weight(1.0 + rank)
                given.handle.piggyback("kl", torch.full((2,), float(rank), dtype=torch.float32, device="cpu"))
            kept.append(given.grad_norm().clone())
        kept += [grad for grad in given.grads() if grad is not None]
    return kept


def _checks(entry_point: str, rank: int, around: Callable[[], Any], around_calls: Callable[[], Any]) -> None:
    for compression in {"drop-in hook": ("none", "fp16"), **dict.fromkeys(OUTER, ("none",))}.get(entry_point, WIRES):
        expected = _trained(entry_point, rank, compression, nullcontext, nullcontext)
        actual = _trained(entry_point, rank, compression, around, around_calls)
        assert_all_bitwise_equal(actual, expected, f"{entry_point}, {compression}: tensor")


@on_ranks(2, cases={"entry_point": [*ALL, *OUTER], "setting": SETTINGS})
def test_settings_of_torch_change_nothing(rank: int, world_size: int, entry_point: str, setting: str) -> None:
    _checks(entry_point, rank, SETTINGS[setting], nullcontext)


@on_ranks(2, cases={"entry_point": [*ALL, *OUTER], "mode": AROUND_CALLS})
def test_modes_around_calls_change_nothing(rank: int, world_size: int, entry_point: str, mode: str) -> None:
    _checks(entry_point, rank, nullcontext, AROUND_CALLS[mode])
