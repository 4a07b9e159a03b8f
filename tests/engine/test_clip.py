"""clip_grad_norm_: what torch's does, with the norm that the hook already has."""

from __future__ import annotations

import gc
import math
import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    backward_of,
    batch,
    given_ddp,
    grads_of,
    group_of_one,
    random_grads,
)
from tests.ranks import on_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4)]
RTOL = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def _assert_clips_like_torch(
    hook: fastsync.CommHook | fastsync.GradientSynchronizer, ddp: nn.Module, max_norm: float
) -> None:
    expected = [
        nn.Parameter(parameter.detach().clone()) for parameter in ddp.parameters() if parameter.grad is not None
    ]
    for parameter, grad in zip(expected, grads_of(ddp), strict=True):
        parameter.grad = grad.clone()
    expected_norm = nn.utils.clip_grad_norm_(expected, max_norm)
    norm = fastsync.clip_grad_norm_(hook, max_norm)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    info = torch.finfo(expected[0].dtype)
    rtol, atol = RTOL[expected[0].dtype], info.smallest_normal * info.eps  # or the next subnormal
    torch.testing.assert_close(norm.double(), expected_norm.double(), rtol=rtol, atol=0.0, equal_nan=True)
    for actual, parameter in zip(grads_of(ddp), expected, strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=rtol, atol=atol, equal_nan=True)
    assert_same_on_all_ranks([norm, *grads_of(ddp)])


def _clips_like_torch(rank: int, world_size: int) -> None:
    for dtype in RTOL:
        grads = random_grads(rank, 0, SHAPES, dtype)
        for wire in ("none", "fp16", "bf16"):
            ddp = given_ddp(grads, bucket_cap_mb=SMALL_BUCKETS)
            hook = fastsync.register_comm_hook(ddp, wire)
            for max_norm in (1e3, 0.5, 1e-3, float("inf")):
                averaged = backward_of(ddp, grads)
                _assert_clips_like_torch(hook, ddp, max_norm)
                if max_norm > 1e2:
                    assert_all_bitwise_equal(grads_of(ddp), averaged, "gradient below the maximum")
                else:
                    assert nn.utils.get_total_norm([grad.double() for grad in grads_of(ddp)]) <= 1.01 * max_norm


def _clips_what_is_not_finite(rank: int, world_size: int) -> None:
    for value in (float("inf"), float("nan")):
        grads = [torch.ones(3), torch.tensor([2.0, value if rank == 1 else 1.0])]
        ddp = given_ddp(grads)
        hook = fastsync.register_comm_hook(ddp)
        backward_of(ddp, grads)
        _assert_clips_like_torch(hook, ddp, 1.0)
        assert not torch.cat(grads_of(ddp)).isfinite().all()


def _clips_the_parameters_that_were_synchronised(rank: int, world_size: int) -> None:
    model = Mlp()
    frozen = model.layers[2]
    frozen.requires_grad_(False)
    frozen.weight.grad = torch.full_like(frozen.weight, 7.0)  # not ours: it is neither in the norm nor scaled
    ddp = DistributedDataParallel(model)
    hook = fastsync.register_comm_hook(ddp)
    ddp(batch(rank, 0)).square().sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    norm = nn.utils.get_total_norm(trained)
    torch.testing.assert_close(fastsync.clip_grad_norm_(hook, 0.1), norm)
    torch.testing.assert_close(nn.utils.get_total_norm(trained), torch.tensor(0.1))
    assert frozen.weight.grad.unique().tolist() == [7.0]

    grads = random_grads(rank, 0, SHAPES, torch.float32)
    ddp = given_ddp(grads, find_unused_parameters=True)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    for used in ([grads[0], None, grads[2]], [grads[0], None, grads[2]] if rank else [None, None, grads[2]]):
        backward_of(ddp, used)
        _assert_clips_like_torch(hook, ddp, 0.5)

    mixed = [torch.full((3,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    ddp = given_ddp(mixed)
    hook = fastsync.register_comm_hook(ddp)
    backward_of(ddp, mixed)
    assert fastsync.clip_grad_norm_(hook, 7**0.5).item() == pytest.approx(28**0.5)
    for grad in grads_of(ddp):
        assert grad.unique().tolist() == [pytest.approx(1.0, rel=2.0**-8)]


def _clips_what_is_attached(rank: int, world_size: int) -> None:
    for wire in ("none", "fp16"):
        grads = random_grads(rank, 0, SHAPES, torch.float32)
        model = Given(grads)
        sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        for max_norm in (1e3, 0.5):
            model.zero_grad()
            model(grads).backward()
            _assert_clips_like_torch(sync, model, max_norm)
        # A gradient that is missing here and not elsewhere is one of them, too.
        model.zero_grad()
        model([grads[0] if rank else None, None, grads[2]]).backward()
        _assert_clips_like_torch(sync, model, 0.5)


def _other_norms(rank: int, world_size: int) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    model, twin = Given(grads), Given(grads)
    sync = fastsync.attach(model)
    for norm_type in (1.0, 3.0, math.inf):
        for each in (model, twin):
            each.zero_grad()
        model(grads).backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = parameter.grad.clone()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5, norm_type)
        norm = fastsync.clip_grad_norm_(sync, 0.5, norm_type=norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert_all_close(grads_of(model), grads_of(twin))
    model.zero_grad()
    model([*grads[:-1], torch.full_like(grads[-1], math.inf if rank else 1.0)]).backward()
    before = [gradient.clone() for gradient in grads_of(model)]
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf; skip this step"):
        fastsync.clip_grad_norm_(sync, 0.5, error_if_nonfinite=True)
    assert_all_bitwise_equal(grads_of(model), before, "gradient")


def _other_norms_where_the_engines_is_not_known(rank: int, world_size: int) -> None:
    """They take a pass over the gradients as they are, whatever has become of those that were synchronised."""
    like = [torch.ones(4), torch.ones(3)]
    for way in ("attach", "hook"):
        model = given_ddp(like) if way == "hook" else Given(like)
        sync = fastsync.register_comm_hook(model) if way == "hook" else fastsync.attach(model)
        assert fastsync.clip_grad_norm_(sync, 1.0, norm_type=math.inf).item() == 0.0  # before any backward
        model([torch.full((4,), 8.0), torch.full((3,), 2.0)]).backward()
        for expected in (8.0, 4.0):
            norm = fastsync.clip_grad_norm_(sync, 4.0, norm_type=math.inf).item()
            assert norm == pytest.approx(expected)
        with pytest.raises(RuntimeError, match=r"changed since they were|no backward was synchronised since these"):
            fastsync.clip_grad_norm_(sync, 1.0)  # what the engine knows is the norm before clipping
        with model.no_sync() if way == "hook" else sync.no_sync():
            model([torch.full((4,), 8.0), torch.ones(3)]).backward()
        assert fastsync.clip_grad_norm_(sync, 1e3, norm_type=1.0).item() == pytest.approx(
            4 * (4.0 + 8.0) + 3 * (1.0 + 1.0)
        )


def _other_norms_of_what_waits_for_the_step(rank: int, world_size: int) -> None:
    model = Given([torch.ones(4)])
    sync = fastsync.attach(model)
    optimizer = FUSED["SGD"](model.parameters())
    model([torch.full((4,), 8.0)]).backward()
    fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="clipped already, in the optimizer's next step"):
        fastsync.clip_grad_norm_(sync, 1.0, norm_type=math.inf, optimizer=optimizer)


def _other_norms_with_a_scaler(rank: int, world_size: int) -> None:
    for unscales_first in (True, False):
        model = Given([torch.ones(4)])
        sync = fastsync.attach(model, overlap=False)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model([torch.full((4,), 8.0)])).backward()
        sync.synchronize()
        with pytest.raises(ValueError, match="scaler: serves only together with optimizer="):
            fastsync.clip_grad_norm_(sync, 1.0, scaler=scaler, norm_type=math.inf)
        if unscales_first:
            scaler.unscale_(optimizer)
            assert fastsync.clip_grad_norm_(sync, 1e3, norm_type=math.inf).item() == 8.0  # as they are
        given = {"scaler": scaler, "optimizer": optimizer}
        assert fastsync.clip_grad_norm_(sync, 4.0, norm_type=math.inf, **given).item() == 8.0
        assert grads_of(model)[0].tolist() == pytest.approx([4.0 if unscales_first else 4.0 * 1024] * 4)


def assert_all_close(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@on_ranks(2)
def test_a_hooks_gradients_are_clipped_as_torch_does(rank: int, world_size: int) -> None:
    _other_norms(rank, world_size)
    _other_norms_where_the_engines_is_not_known(rank, world_size)
    _other_norms_of_what_waits_for_the_step(rank, world_size)
    _other_norms_with_a_scaler(rank, world_size)
    _clips_like_torch(rank, world_size)
    _clips_what_is_not_finite(rank, world_size)
    _clips_the_parameters_that_were_synchronised(rank, world_size)
    _clips_what_is_attached(rank, world_size)


def test_parameters_are_clipped_by_torch() -> None:
    for many in (True, False):
        parameter, expected = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        for each in (parameter, expected):
            each.grad = torch.arange(4.0)
        norm = fastsync.clip_grad_norm_([parameter] if many else parameter, 0.5)
        assert norm.item() == nn.utils.clip_grad_norm_([expected], 0.5).item()
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match=f"max_norm: expected a positive number, got {max_norm!r}"):
        fastsync.clip_grad_norm_(parameter, max_norm)
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_the_norm_is_not_computed_again() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(4)])
        hook = fastsync.register_comm_hook(ddp)
        with pytest.raises(RuntimeError, match="no gradients have been synchronised yet"):
            fastsync.clip_grad_norm_(hook, 1.0)
        backward_of(ddp, [torch.ones(4)])
        ddp.module.weights[0].grad.mul_(8)  # which the norm of the backward does not know
        with patch.object(torch.Tensor, "item", side_effect=AssertionError("the host waited")):
            norm = fastsync.clip_grad_norm_(hook, 1.0)
        assert norm.item() == 2.0


def test_a_norm_serves_once() -> None:
    with group_of_one():
        ddp = given_ddp([torch.ones(4)])
        hook = fastsync.register_comm_hook(ddp)
        backward_of(ddp, [torch.full((4,), 8.0)])
        assert fastsync.clip_grad_norm_(hook, 1.0).item() == 16.0
        message = "no backward was synchronised since these gradients were clipped"
        with pytest.raises(RuntimeError, match=message):
            fastsync.clip_grad_norm_(hook, 1.0)
        ddp.zero_grad()
        with ddp.no_sync():
            ddp([torch.full((4,), 8.0)]).backward()
        with pytest.raises(RuntimeError, match=message):
            fastsync.clip_grad_norm_(hook, 1.0)
        assert [grad.tolist() for grad in grads_of(ddp)] == [[8.0] * 4]
        backward_of(ddp, [torch.full((4,), 8.0)])
        assert fastsync.clip_grad_norm_(hook, 32.0).item() == 16.0


@pytest.mark.parametrize("wrong", [nn.Linear(1, 1), "state"])
def test_what_is_neither_hook_nor_parameters_is_refused(wrong: object) -> None:
    with group_of_one():
        given = fastsync.HookState() if wrong == "state" else wrong
        with pytest.raises(ValueError, match=r"sync_or_params: .*got (Linear|HookState); model\.parameters\(\)"):
            fastsync.clip_grad_norm_(given, 1.0)


# ---- the coefficient in the optimizer's step ----------------------------------------------------------------------

FUSED = {
    "Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_clips_in_its_step(name: str) -> None:
    with group_of_one():
        model, expected = Given([torch.ones(4), torch.ones(3)]), Given([torch.ones(4), torch.ones(3)])
        sync = fastsync.attach(model)
        optimizer, reference = (FUSED[name](each.parameters()) for each in (model, expected))
        for step, max_norm in enumerate((0.5, 1e3, 0.25, None, 0.5)):
            grads = random_grads(0, step, [(4,), (3,)], torch.float32)
            for each in (model, expected):
                each.zero_grad()
                each(grads).backward()
            if max_norm is not None:
                before = [grad.clone() for grad in grads_of(model)]
                norm = fastsync.clip_grad_norm_(sync, max_norm, optimizer=optimizer)
                assert_all_bitwise_equal(grads_of(model), before, "a pass over the gradients")
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), max_norm))
            optimizer.step()
            reference.step()
            assert not hasattr(optimizer, "grad_scale"), "the step after would be clipped as well"
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_fused_optimizer_clips_scaled_gradients() -> None:
    """Without unscale_: GradScaler multiplies its scale into the coefficient that waits for the step."""
    with group_of_one():
        model, expected = Given([torch.ones(4)]), Given([torch.ones(4)])
        sync = fastsync.attach(model)
        optimizer, reference = (FUSED["SGD"](each.parameters()) for each in (model, expected))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            grads = [torch.full((4,), 2.0)]
            for each in (model, expected):
                each.zero_grad()
            scaler.scale(model(grads)).backward()
            expected(grads).backward()
            if step % 2 == 0:  # the norm is that of the scaled gradients: 32
                max_norm = 8.0 if step == 0 else scaler.scale(torch.tensor(1.0))
                assert fastsync.clip_grad_norm_(sync, max_norm, optimizer=optimizer).item() == 32.0
                nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            reference.step()
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_is_not_fused_gets_clipped_gradients() -> None:
    with group_of_one():
        model = Given([torch.ones(4)])
        sync = fastsync.attach(model)
        optimizer = torch.optim.Adam(model.parameters())
        model([torch.full((4,), 2.0)]).backward()
        assert fastsync.clip_grad_norm_(sync, 2.0, optimizer=optimizer).item() == 4.0
        assert grads_of(model)[0].tolist() == pytest.approx([1.0] * 4)
        assert not hasattr(optimizer, "grad_scale")


def test_an_optimizer_of_other_gradients_too_is_refused() -> None:
    with group_of_one():
        model, other = Given([torch.ones(4)]), nn.Parameter(torch.ones(5))
        other.grad = torch.ones(5)
        sync = fastsync.attach(model)
        optimizer = FUSED["SGD"]([*model.parameters(), other])
        model([torch.ones(4)]).backward()
        with pytest.raises(ValueError, match=r"optimizer: it also steps a parameter of shape \[5\]"):
            fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer)
        other.grad = None
        fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer)
        with pytest.raises(ValueError, match="optimizer: serves only with what attach or register_comm_hook returned"):
            fastsync.clip_grad_norm_(model.parameters(), 1.0, optimizer=optimizer)


def test_gradients_that_were_changed_have_no_known_norm() -> None:
    with group_of_one():
        model = Given([torch.ones(4), torch.ones(3)])
        sync = fastsync.attach(model)

        def local_backward() -> None:
            with sync.no_sync():
                model([torch.ones(4), None]).backward()

        changes = {
            "clipping": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "backward": local_backward,
            "another gradient": lambda: setattr(model.weights[1], "grad", torch.ones(3)),
            "no gradient": lambda: setattr(model.weights[1], "grad", None),
            "zero_grad": model.zero_grad,
        }
        for change in changes.values():
            model.zero_grad()
            model([torch.ones(4), torch.ones(3)]).backward()
            change()
            with pytest.raises(RuntimeError, match="the gradients have been changed since they were synchronised"):
                fastsync.clip_grad_norm_(sync, 1.0)
        model.zero_grad()
        model([torch.ones(4), None]).backward()
        assert fastsync.clip_grad_norm_(sync, 1.0).item() == 2.0


# ---- with a GradScaler ---------------------------------------------------------------------------------------------

OPTIMIZERS = {**FUSED, "SGD, not fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("unscales_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_scaler_has_scaled_is_clipped_as_torch_does(name: str, unscales_first: bool) -> None:
    with group_of_one():
        for way in ("attach", "hook"):
            like = [torch.ones(4), torch.ones(3)]
            model, expected = given_ddp(like) if way == "hook" else Given(like), Given(like)
            sync = fastsync.register_comm_hook(model) if way == "hook" else fastsync.attach(model)
            optimizer, reference = (OPTIMIZERS[name](each.parameters()) for each in (model, expected))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            for step in range(5):
                grads = random_grads(0, step, [(4,), (3,)], torch.float32)
                optimizer.zero_grad()
                reference.zero_grad()
                scaler.scale(model(grads)).backward()
                expected(grads).backward()
                if unscales_first:
                    scaler.unscale_(optimizer)
                with patch.object(torch.Tensor, "item", side_effect=AssertionError("the host waited")):
                    norm = fastsync.clip_grad_norm_(sync, 0.25, optimizer=optimizer, scaler=scaler)
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.25))
                scaler.step(optimizer)
                scaler.update()
                reference.step()
                for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_scaler_that_is_not_enabled_changes_nothing() -> None:
    with group_of_one():
        model = Given([torch.ones(4)])
        sync = fastsync.attach(model)
        optimizer = torch.optim.SGD(model.parameters())
        model([torch.full((4,), 2.0)]).backward()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert fastsync.clip_grad_norm_(sync, 2.0, optimizer=optimizer, scaler=scaler).item() == 4.0
        assert grads_of(model)[0].tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("is_known", ["it was passed", "it has stepped"])
@pytest.mark.parametrize("gives_optimizer", [True, False])
@pytest.mark.parametrize("way", ["attach", "hook"])
def test_unscaled_gradients_are_not_clipped_by_the_norm_of_scaled_ones(
    way: str, gives_optimizer: bool, is_known: str
) -> None:
    with group_of_one():
        model = given_ddp([torch.ones(4)]) if way == "hook" else Given([torch.ones(4)])
        sync = fastsync.register_comm_hook(model) if way == "hook" else fastsync.attach(model)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if is_known == "it was passed":
            unscaled = {"optimizer": optimizer, "scaler": scaler}
            scaler.scale(model([torch.full((4,), 2.0)])).backward()
            assert fastsync.clip_grad_norm_(sync, 1.0, **unscaled).item() == 4.0
        else:
            scaler.scale(model([torch.full((4,), 0.0)])).backward()
            scaler.step(optimizer)
        scaler.update(1024.0)
        optimizer.zero_grad()
        scaler.scale(model([torch.full((4,), 2.0)])).backward()
        scaler.unscale_(optimizer)
        given = {"optimizer": optimizer} if gives_optimizer else {}
        with pytest.raises(RuntimeError, match=r"a GradScaler has unscaled .*; pass optimizer= and scaler="):
            fastsync.clip_grad_norm_(sync, 1.0, **given)
        assert grads_of(model)[0].tolist() == [2.0] * 4
        assert fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler).item() == 4.0


def test_the_objects_of_the_process_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining.stage", raising=False)  # nor are there pipelines
    with group_of_one(), patch.object(gc, "get_objects", side_effect=AssertionError("looked through all objects")):
        model = Given([torch.ones(4)])
        sync = fastsync.attach(model)
        model([torch.full((4,), 2.0)]).backward()
        assert fastsync.clip_grad_norm_(sync, 1.0).item() == 4.0


def test_what_another_optimizers_scaler_has_unscaled_does_not_count() -> None:
    with group_of_one():
        model, other = Given([torch.ones(4)]), nn.Parameter(torch.ones(5))
        sync = fastsync.attach(model)
        optimizer, of_other = torch.optim.SGD(model.parameters()), torch.optim.SGD([other])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(other.sum()).backward()
        scaler.unscale_(of_other)
        model([torch.full((4,), 2.0)]).backward()
        assert fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer).item() == 4.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_handles_that_share_an_optimizer_are_clipped_apart_with_a_scaler(name: str) -> None:
    with group_of_one():
        models = Given([torch.ones(4)]), Given([torch.ones(3)])
        expected = Given([torch.ones(4)]), Given([torch.ones(3)])
        syncs = [fastsync.attach(model) for model in models]
        optimizer, reference = (
            OPTIMIZERS[name]([p for model in each for p in model.parameters()]) for each in (models, expected)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            grads = random_grads(0, step, [(4,), (3,)], torch.float32)
            optimizer.zero_grad()
            reference.zero_grad()
            scaler.scale(models[0](grads[:1]) + models[1](grads[1:])).backward()
            (expected[0](grads[:1]) + expected[1](grads[1:])).backward()
            for model, sync in zip(expected, syncs, strict=True):
                norm = fastsync.clip_grad_norm_(sync, 0.25, optimizer=optimizer, scaler=scaler)
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.25))
            scaler.step(optimizer)
            scaler.update()
            reference.step()
            for pair in zip(models, expected, strict=True):
                torch.testing.assert_close(*(each.weights[0] for each in pair), rtol=1e-5, atol=1e-6)


def test_a_scaler_is_refused_where_it_cannot_tell() -> None:
    with group_of_one():
        model = Given([torch.ones(4)])
        sync = fastsync.attach(model, overlap=False)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model([torch.ones(4)]).backward()
        sync.synchronize()
        with pytest.raises(ValueError, match="scaler: serves only together with optimizer="):
            fastsync.clip_grad_norm_(sync, 1.0, scaler=scaler)
        with pytest.raises(ValueError, match="scaler: serves only with what attach or register_comm_hook returned"):
            fastsync.clip_grad_norm_(model.parameters(), 1.0, scaler=scaler)
        with pytest.raises(RuntimeError, match="it has scaled no loss yet"):
            fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
        model.zero_grad()
        scaler.scale(model([torch.ones(4)])).backward()
        sync.synchronize()
        scaler.unscale_(optimizer)  # before synchronize() as well, for all that anybody can tell
        with pytest.raises(RuntimeError, match=r"unscale_ came before or after synchronize\(\)"):
            fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="has stepped with these gradients already"):
            fastsync.clip_grad_norm_(sync, 1.0, optimizer=optimizer, scaler=scaler)
