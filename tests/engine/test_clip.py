"""clip_grad_norm_: what torch's does, with the norm that the engine already has."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fastsync
from fastsync.sync.ddp import HookState
from fastsync.sync.grad_scaler import scaler_of_step
from tests.engine.entry_points import average
from tests.engine.wrappers import OptimizerWrapper
from tests.models import (
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    group_of_one,
    random_grads,
)
from tests.ranks import on_ranks
from tests.refused import refused

SHAPES = [(7, 33), (300,), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "SGD, not fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
each_way = pytest.mark.parametrize("way", ["attach", "hook"])


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """One group for all tests: it takes longer to come and go than most of them take."""
    with group_of_one():
        yield


def _given(way: str, like: Sequence[Tensor], wire: str = "none", *, are_all_used: bool = True) -> tuple[nn.Module, Any]:
    """A ``Given`` model and its handle."""
    options = {"find_unused_parameters": True} if way == "hook" and not are_all_used else {}
    given = average(way, Given(like), wire, **options)
    return given.model, given.handle


def _backward(model: nn.Module, grads: Sequence[Tensor | None], scaler: torch.amp.GradScaler | None = None) -> None:
    model.zero_grad()
    loss = model(grads)
    (scaler.scale(loss) if scaler else loss).backward()


def _scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def _host_does_not_wait() -> AbstractContextManager[object]:
    return patch.object(Tensor, "item", side_effect=AssertionError("the host waited"))


# ---- as torch does --------------------------------------------------------------------------------------------------


def _assert_clips_like_torch(handle: Any, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> None:
    """As torch does in float64: in 16 bits it rounds all that it computes."""
    expected = [nn.Parameter(p.detach().double()) for p in model.parameters() if p.grad is not None]
    for parameter, grad in zip(expected, grads_of(model), strict=True):
        parameter.grad = grad.to(torch.float64, copy=True)
    expected_norm = nn.utils.clip_grad_norm_(expected, max_norm, norm_type)
    norm = fastsync.clip_grad_norm_(handle, max_norm, norm_type=norm_type)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    dtype = grads_of(model)[0].dtype
    info = torch.finfo(dtype)
    rounding = info.eps / 2
    sums, atol = 1e-6 if dtype == torch.float64 else 1e-5, info.smallest_normal * info.eps  # or the next subnormal
    # The norm of gradients that were touched is torch's, which rounds each parameter's norm, and then the whole one.
    rtol = sums + 2 * rounding
    torch.testing.assert_close(norm.double(), expected_norm, rtol=rtol, atol=0.0, equal_nan=True)
    rtol += rounding  # of the gradient that is divided by it
    for actual, parameter in zip(grads_of(model), expected, strict=True):
        torch.testing.assert_close(actual.double(), parameter.grad, rtol=rtol, atol=atol, equal_nan=True)
    assert_same_on_all_ranks([norm, *grads_of(model)])


@each_way
@on_ranks(2)
def test_gradients_are_clipped_as_torch_does(rank: int, world_size: int, way: str) -> None:
    for dtype in DTYPES:
        grads = random_grads(rank, 0, SHAPES, dtype)
        for wire in ("none", "fp16", "bf16"):
            model, handle = _given(way, grads, wire)
            for max_norm in (1e3, 0.5, 1e-3, math.inf):
                _backward(model, grads)
                averaged = [grad.clone() for grad in grads_of(model)]
                _assert_clips_like_torch(handle, model, max_norm)
                if max_norm > 1e2:
                    assert_all_bitwise_equal(grads_of(model), averaged, "gradient below the maximum")
                else:
                    assert nn.utils.get_total_norm([grad.double() for grad in grads_of(model)]) <= 1.01 * max_norm
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    model, handle = _given(way, grads, "fp16")
    for norm_type in (1.0, 3.0, math.inf):
        _backward(model, grads)
        _assert_clips_like_torch(handle, model, 0.5, norm_type)
    model, handle = _given(way, grads, "fp16", are_all_used=False)
    # A gradient that is missing here and not elsewhere is one of them; one that is missing everywhere is not.
    for used in ([grads[0], None, grads[2]], [grads[0] if rank else None, None, grads[2]]):
        _backward(model, used)
        _assert_clips_like_torch(handle, model, 0.5)
    model, handle = _given(way, grads, "fp16")
    for value in (math.inf, math.nan):
        spoilt = [*grads[:2], torch.full_like(grads[2], value if rank else 1.0)]
        _backward(model, spoilt)
        before = [gradient.clone() for gradient in grads_of(model)]
        with pytest.raises(RuntimeError, match=r"the norm of the gradients is (inf|nan); skip this step"):
            fastsync.clip_grad_norm_(handle, 0.5, error_if_nonfinite=True)
        assert_all_bitwise_equal(grads_of(model), before, "gradient")
        _backward(model, spoilt)
        _assert_clips_like_torch(handle, model, 1.0)
        assert not torch.cat([grad.flatten() for grad in grads_of(model)]).isfinite().all()
    mixed = [torch.full((3,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    model, handle = _given(way, mixed)
    _backward(model, [grad * (0.5 + rank) for grad in mixed])  # whose means are these
    assert fastsync.clip_grad_norm_(handle, 7**0.5).item() == pytest.approx(28**0.5)
    for grad in grads_of(model):
        assert grad.unique().tolist() == [pytest.approx(1.0, rel=2.0**-8)]


@pytest.mark.parametrize(
    ("way", "overlap", "way_out"),
    [
        ("hook", True, r"and not its \.module"),
        ("attach", True, r"outside no_sync\(\)"),
        ("attach", False, r"synchronize\(\)"),
    ],
)
def test_gradients_that_no_rank_has_averaged_are_not_clipped(way: str, overlap: bool, way_out: str) -> None:
    model: nn.Module = Given([torch.ones(4)])
    if way == "hook":
        model = nn.parallel.DistributedDataParallel(model)
    sync: Any = fastsync.register_comm_hook(model) if way == "hook" else fastsync.attach(model, overlap=overlap)
    no_sync = (model if way == "hook" else sync).no_sync
    with no_sync():
        model([torch.full((4,), 2.0)]).backward()
        assert fastsync.clip_grad_norm_(sync, 2.0).item() == 4.0  # which is meant
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"no rank has averaged, such as that of .*{way_out}"):
            fastsync.clip_grad_norm_(sync, 1.0)
    assert torch.cat([grad.flatten() for grad in grads_of(model)]).norm().item() == pytest.approx(2.0)
    model.zero_grad()
    model([torch.full((4,), 2.0)]).backward()
    if not overlap:
        sync.synchronize()
    assert fastsync.clip_grad_norm_(sync, 1.0).item() == 4.0


# ---- of which gradients the norm is ---------------------------------------------------------------------------------


@each_way
def test_the_norm_of_untouched_gradients_is_not_computed_again(way: str) -> None:
    like = [torch.ones(4), torch.ones(3)]
    model, handle = _given(way, like)
    refused(lambda: fastsync.clip_grad_norm_(handle, 1.0), "no gradients have been synchronised yet", kind=RuntimeError)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    for _ in range(3):
        _backward(model, [torch.full((4,), 8.0), torch.zeros(3)])
        with _host_does_not_wait(), patch("torch.nn.utils.get_total_norm", side_effect=AssertionError("a pass")):
            norm = fastsync.clip_grad_norm_(handle, 1.0)
        assert norm.item() == 16.0
        assert fastsync.clip_grad_norm_(handle, 1e3).item() == pytest.approx(1.0)  # what clipping has left
        optimizer.step()


def _without_autograd(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def change_all(model: nn.Module) -> None:
        for grad in grads_of(model):
            change(grad)

    return change_all


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 8


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "divided by the number of tokens": _without_autograd(lambda grad: grad.div_(8.0)),
    "through .data": _without_autograd(lambda grad: grad.data.mul_(0.5)),
    "clamped through .data": _without_autograd(lambda grad: grad.data.clamp_(-1.0, 1.0)),
    "through NumPy": _without_autograd(lambda grad: grad.numpy().fill(3.0)),
    "foreach": lambda model: torch._foreach_mul_(grads_of(model), 0.25),
    "foreach through .data": lambda model: torch._foreach_mul_([grad.data for grad in grads_of(model)], 0.25),
    "as GradScaler does": lambda model: torch._amp_foreach_non_finite_check_and_unscale_(
        grads_of(model), torch.zeros(1), torch.tensor([0.5])
    ),
    "by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "replaced": _replace,
    "one of them, another": lambda model: setattr(next(model.parameters()), "grad", torch.full((4,), 5.0)),
    "one of them, gone": lambda model: setattr(next(model.parameters()), "grad", None),
    "gone": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
}


MODES = ({"gradient_as_bucket_view": True}, {"static_graph": True})
"""Of DDP."""


class Twins:
    """A training whose gradients the engine clips, and the same one in plain PyTorch, drawn from a seed.

    With or without a GradScaler, which may know a wrapper of the optimizer alone.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw, way = draw, draw.choice(["attach", "hook"])
        self.options: dict[str, bool] = draw.choice([{}, {}, *MODES]) if way == "hook" else {}
        name, like = draw.choice(list(OPTIMIZERS)), [torch.ones(4), torch.ones(3)]
        self.is_fused = "not" not in name
        self.given, self.plain = average(way, Given(like), **self.options), Given(like)
        self.models = (self.given.model, self.plain)
        own, reference = (OPTIMIZERS[name](model.parameters()) for model in self.models)
        self.optimizers = [OptimizerWrapper(own) if self.may(30) else own, reference]
        scales = self.may(60)
        self.scalers = [torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled=scales) for _ in range(2)]

    def may(self, percent: int) -> bool:
        return self.draw.randrange(100) < percent

    def backward(self, grads: Sequence[Tensor], *, is_own: bool = False) -> None:
        with self.given.no_sync() if is_own else nullcontext():
            self.scalers[0].scale(self.given.model(grads)).backward()
        self.scalers[1].scale(self.plain(grads)).backward()

    def step(self, number: int) -> None:
        scales, skips = self.scalers[0].is_enabled(), self.may(15)
        set_to_none = self.may(50)
        for model in self.models:
            model.zero_grad(set_to_none)
        grads = random_grads(0, number, [(4,), (3,)], torch.float32)
        if scales and self.optimizers[1].state and self.may(20):  # torch's fused SGD needs a momentum to skip a step
            grads[0][1] = math.inf
        may_accumulate = "static_graph" not in self.options
        if may_accumulate and self.may(20):
            self.backward(grads, is_own=True)
        self.backward(grads)
        adds_own = may_accumulate and self.may(20)
        if adds_own:  # no Python sees what it leaves
            self.backward(grads, is_own=True)
        is_unscaled = scales and not skips and self.may(50)
        if is_unscaled:
            for scaler, optimizer in zip(self.scalers, self.optimizers, strict=True):
                scaler.unscale_(optimizer)
        if self.may(60):
            # A scaler wants gradients, and so does the first step of torch's fused SGD.
            there = [*CHANGES][:-3] if scales or number == 0 else [*CHANGES]
            change = "through .data" if self.options else self.draw.choice(there)
            for model in self.models:
                CHANGES[change](model)
        self.clip(is_unscaled, skips)
        if not skips:
            with self.given.no_sync() if adds_own else nullcontext():
                for scaler, optimizer in zip(self.scalers, self.optimizers, strict=True):
                    scaler.step(optimizer)
                    scaler.update()
            assert not hasattr(self.optimizers[0], "grad_scale"), "the step after would be clipped as well"
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale()
        torch.testing.assert_close(*([*model.parameters()] for model in self.models), rtol=1e-5, atol=1e-6)

    def clip(self, is_unscaled: bool, skips: bool) -> None:
        """A fused optimizer clips in its step, without a pass over the gradients."""
        max_norm, norm_type = self.draw.choice([0.25, 0.5, 1e3]), self.draw.choice([2.0, 2.0, 1.0, math.inf])
        in_step, scales = self.may(70), self.scalers[0].is_enabled()
        handle = self.given.handle
        looks = self.may(30)  # after which the engine does not take its own norm
        before = [grad.clone() for grad in grads_of(self.given.model)] if looks else []
        options: dict[str, Any] = {"norm_type": norm_type}
        if in_step:
            options |= {"optimizer": self.optimizers[0]}
        if in_step and scales and (not is_unscaled or self.may(50)):
            options |= {"scaler": self.scalers[0]}
        norm = fastsync.clip_grad_norm_([handle] if norm_type == 2.0 and self.may(20) else handle, max_norm, **options)
        if looks and in_step and self.is_fused and norm_type == 2.0 and not scales:
            assert_all_bitwise_equal(grads_of(self.given.model), before, "a pass over the gradients")
        if skips:  # as a loop skips steps with large norms
            return
        if "scaler" in options and not is_unscaled:
            self.scalers[1].unscale_(self.optimizers[1])
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("seed", range(60))
def test_random_trainings_are_those_of_torchs_clipping(seed: int) -> None:
    twins = Twins(random.Random(seed))
    for number in range(8):
        twins.step(number)


# ---- in an optimizer's step, with a GradScaler ----------------------------------------------------------------------


class OwnScaler(torch.amp.GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


@on_ranks(1, cases={"enabled": [True, False]})
def test_a_scaler_takes_a_step_from_its_call_until_it_ends_or_fails(rank: int, world_size: int, enabled: bool) -> None:
    models = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in models)
    fastsync.attach(models[0])
    scaler = OwnScaler("cpu", enabled=enabled)
    seen: list[object] = []

    def look(*_: object) -> None:
        seen.extend((scaler_of_step(OptimizerWrapper(optimizer)), scaler_of_step(other)))
        raise ArithmeticError

    optimizer.register_step_pre_hook(look)
    scaler.scale(models[0](torch.ones(2)).sum()).backward()
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    assert seen == [(scaler, optimizer) if enabled else None, None]
    assert scaler_of_step(optimizer) is None


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_handles_that_share_an_optimizer_are_clipped_apart(name: str, scales: bool) -> None:
    pairs = [(_given("attach", [torch.ones(size)]), Given([torch.ones(size)])) for size in (4, 3)]
    optimizer = OPTIMIZERS[name]([p for (model, _), _ in pairs for p in model.parameters()])
    reference = OPTIMIZERS[name]([p for _, expected in pairs for p in expected.parameters()])
    scaler = _scaler() if scales else None
    for step in range(3):
        grads = random_grads(0, step, [(4,), (3,)], torch.float32)
        for ((model, _), expected), grad in zip(pairs, grads, strict=True):
            _backward(model, [grad], scaler)
            _backward(expected, [grad])
        for (_, sync), expected in pairs:
            norm = fastsync.clip_grad_norm_(sync, 0.25, optimizer=optimizer, scaler=scaler)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.25))
        (scaler.step(optimizer), scaler.update()) if scaler else optimizer.step()
        reference.step()
        for (model, _), expected in pairs:
            torch.testing.assert_close(model.weights[0], expected.weights[0], rtol=1e-5, atol=1e-6)


def test_arguments_that_torchs_function_takes_by_position() -> None:
    model, sync = _given("attach", [torch.ones(4)])
    _backward(model, [torch.full((4,), 2.0)])
    assert fastsync.clip_grad_norm_(sync, 1.0, math.inf, True).item() == 2.0
    sgd = torch.optim.SGD(model.parameters())
    refused(lambda: fastsync.clip_grad_norm_(sync, 1.0, optimizer=[sgd, sgd]), "optimizer:")  # type: ignore[arg-type]


def test_an_optimizer_of_some_of_the_parameters_clips_none_in_its_step() -> None:
    model, sync = _given("attach", [torch.ones(4), torch.ones(3)])
    optimizers = [OPTIMIZERS["SGD"]([parameter]) for parameter in model.parameters()]
    _backward(model, [torch.ones(4), torch.ones(3)])
    fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizers[0])
    assert nn.utils.get_total_norm(grads_of(model)).item() == pytest.approx(1.0)


def test_scalers_that_do_not_count() -> None:
    """One that is not enabled; one that has unscaled another optimizer's gradients."""
    model, sync = _given("attach", [torch.ones(4)])
    other = nn.Parameter(torch.ones(5))
    optimizer, of_other = torch.optim.SGD(model.parameters()), torch.optim.SGD([other])
    scaler = _scaler()
    scaler.scale(other.sum()).backward()
    scaler.unscale_(of_other)
    for given in (None, torch.amp.GradScaler("cpu", enabled=False)):
        _backward(model, [torch.full((4,), 2.0)])
        assert fastsync.clip_grad_norm_(sync, 2.0, optimizer=optimizer, scaler=given).item() == 4.0
        assert grads_of(model)[0].tolist() == pytest.approx([1.0] * 4)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, None, "1.0"])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm: Any) -> None:
    model, sync = _given("attach", [torch.ones(2)])
    _backward(model, [torch.ones(2)])
    refused(lambda: fastsync.clip_grad_norm_(sync, max_norm), "max_norm:")
    assert grads_of(model)[0].tolist() == [1.0, 1.0]


def test_what_is_no_handle_of_whole_gradients_is_refused() -> None:
    for wrong in (nn.Linear(1, 1), nn.Linear(1, 1).parameters(), HookState()):
        refused(lambda: fastsync.clip_grad_norm_(wrong, 1.0), "sync:")


def test_gradients_that_the_next_step_clips_are_not_clipped_again() -> None:
    model, sync = _given("attach", [torch.ones(4)])
    optimizer = OPTIMIZERS["SGD"]([*model.parameters(), nn.Parameter(torch.ones(5))])
    _backward(model, [torch.ones(4)])
    fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer)
    for options in ({"norm_type": math.inf, "optimizer": optimizer}, {"optimizer": optimizer}, {}):
        with pytest.raises(RuntimeError, match="clipped already, in the optimizer's next step"):
            fastsync.clip_grad_norm_(sync, 1.0, **options)
    optimizer.step()
    assert fastsync.clip_grad_norm_(sync, 4.0).item() == pytest.approx(1.0)  # which the step has divided


def test_a_scaler_tells_of_unscaled_gradients_or_is_refused() -> None:
    model = Given([torch.ones(4)])
    sync = fastsync.attach(model, overlap=False)
    optimizer, scaler = torch.optim.SGD(model.parameters()), _scaler()
    _backward(model, [torch.ones(4)])
    sync.synchronize()
    refused(lambda: fastsync.clip_grad_norm_(sync, 1.0, scaler=scaler), "scaler:")
    with pytest.raises(RuntimeError, match="it has scaled no loss yet"):
        fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
    for unscales_first in (True, False):
        _backward(model, [torch.ones(4)], scaler)
        if unscales_first:
            scaler.unscale_(optimizer)
        sync.synchronize()
        if not unscales_first:
            scaler.unscale_(optimizer)
        assert fastsync.clip_grad_norm_(sync, 4.0, optimizer=optimizer, scaler=scaler).item() == 2.0
        scaler.step(optimizer)
        if unscales_first:
            scaler.update(1024.0)
    with pytest.raises(RuntimeError, match="has stepped with these gradients already"):
        fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
