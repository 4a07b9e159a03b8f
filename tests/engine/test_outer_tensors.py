"""What of a model DiLoCo averages: what is unfrozen, added or replaced, masters, buffers, wrappers, and its modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from fastsync import DiLoCo, LocalSGD, TopK
from fastsync.sync.optimizer_steps import innermost
from tests.engine.sites import assert_sites_are_equal, make_model, make_optimizer, make_site, train_step, weights
from tests.engine.wrappers import OptimizerWrapper, Quantised
from tests.ranks import on_ranks
from tests.refused import refused


@on_ranks(2, cases={"kind": [LocalSGD, DiLoCo], "unfreezes": [False, True]})
def test_parameters_that_are_unfrozen_or_added_later_are_averaged(
    rank: int, world_size: int, unfreezes: bool, kind: type[DiLoCo]
) -> None:
    model = make_model()
    model[0].requires_grad_(not unfreezes)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with kind(model, optimizer, sync_every=2) as sync:
        for step in range(8):
            if step == 4 and unfreezes:
                model[0].requires_grad_(True)
            elif step == 4:
                torch.manual_seed(1)
                model.append(nn.Linear(3, 3).bfloat16().float())
                optimizer.add_param_group({"params": model[5].parameters()})
            train_step(model, optimizer, rank, step)
            if step % 2 == 1:
                assert_sites_are_equal(model, world_size)
        resumed = copy.deepcopy(sync.state_dict())
    sync.load_state_dict(resumed)


@on_ranks(2)
def test_a_mean_of_what_was_unfrozen_is_saved_before_it_is_merged(rank: int, world_size: int) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)

    def begin(of: nn.Module, optimizer: torch.optim.Optimizer) -> DiLoCo:
        return DiLoCo(of, optimizer, sync_every=2, fragment_sync_delay=1)

    with begin(model, optimizer) as sync:
        model[0].requires_grad_(True)
        for step in range(2):
            train_step(model, optimizer, rank, step)
        saved, (other, of_other) = copy.deepcopy(sync.state_dict()), copy.deepcopy((model, optimizer))
        train_step(model, optimizer, rank, 2)
    other[0].requires_grad_(False)
    sync = begin(other, of_other)
    sync.load_state_dict(saved)
    with sync:
        other[0].requires_grad_(True)
        train_step(other, of_other, rank, 2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(other), weights(model), strict=True))
    assert_sites_are_equal(other, world_size)


@on_ranks(2)
def test_local_sgd_takes_the_mean_of_what_was_frozen(rank: int, world_size: int) -> None:
    model = nn.ParameterList([torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.complex64)])
    model[1].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=1.0)
    with LocalSGD(model, optimizer, sync_every=1):
        model[0].grad = torch.full((3,), 1.0 + rank)
        optimizer.step()
        for parameter in (model[1], model[2]):
            parameter.data.fill_(1.0 + 2.0 * rank)  # as a teacher of moving averages does, past version counters
        optimizer.step()
        assert torch.equal(model[1], torch.full((2,), 2.0))
        assert torch.equal(model[2], torch.full((2,), 2.0 + 0j))


@on_ranks(2)
def test_the_ranks_have_to_add_the_same(rank: int, world_size: int) -> None:
    """And a weight that is gone is named."""
    model, optimizer, sync = make_site(LocalSGD, sync_every=2)
    sync.__enter__()
    train_step(model, optimizer, rank, 0)
    model.append(nn.Linear(3, 3 + rank))
    refused(lambda: train_step(model, optimizer, rank, 1), "5.weight")
    model, optimizer, sync = make_site(LocalSGD, sync_every=1)
    sync.__enter__()
    model[4] = nn.Linear(16, 5)
    refused(lambda: train_step(model, optimizer, rank, 0), "parameter 4.weight of [3, 16]", kind=RuntimeError)


class Counts(nn.Module):
    """Whose forward puts another tensor in a buffer's place, and makes one at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("late", None)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = self.mean + inputs.mean(0)
            self.late = inputs.mean(0) if self.late is None else 0.5 * (self.late + inputs.mean(0))
        return inputs


@on_ranks(2, cases={"kind": [LocalSGD, DiLoCo]})
def test_buffers_that_forward_replaces_or_makes_are_averaged(rank: int, world_size: int, kind: type[DiLoCo]) -> None:
    model = nn.Sequential(Counts(), make_model())
    alone = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    with kind(model, optimizer, sync_every=3):
        for step in range(3):
            train_step(model, optimizer, rank, step)
        assert_sites_are_equal(model, world_size)
    for step in range(3):
        train_step(alone, make_optimizer(alone), rank, step)
    for name in ("mean", "late"):
        expected = getattr(alone[0], name)
        torch.distributed.all_reduce(expected)
        torch.testing.assert_close(getattr(model[0], name), expected / world_size)


# ---- optimizers with weights of their own ---------------------------------------------------------------------------


class InState(AdamW):
    """Steps float32 masters that lie in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "master" not in state:
                    state["master"], state["moment"] = parameter.detach().float(), torch.zeros(parameter.shape)
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["master"] -= 1e-3 * state["moment"]
                parameter.data.copy_(state["master"])


class InList(SGD):
    """Steps float32 masters by an optimizer of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.masters = [each.detach().clone().float() for group in self.param_groups for each in group["params"]]
        self.inner = Adam(self.masters, lr=lr)

    def step(self, closure: Any = None) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for master, parameter in zip(self.masters, parameters, strict=True):
            parameter.data.copy_(master)


def in_wrapper(params: Any, lr: float) -> OptimizerWrapper:
    return OptimizerWrapper(InList(params, lr))


def copy_to_masters(optimizer: Any) -> Callable[[list[Tensor]], None]:
    """Returns the on_merge of an optimizer whose masters are in a list of its own."""
    inner = innermost(optimizer)

    def copy(parameters: list[Tensor]) -> None:
        of_parameter = dict(zip(inner.param_groups[0]["params"], inner.masters, strict=True))
        for parameter in parameters:
            of_parameter[parameter].copy_(parameter.detach())

    return copy


def make_narrow_model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def narrow_step(model: nn.Module, optimizer: Any, site: int, step: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * site + step))
    model(inputs.to(model[0].weight.dtype)).float().square().sum().backward()
    optimizer.step()


@on_ranks(2, cases={"make": [InState, InList, in_wrapper], "dtype": [torch.bfloat16, torch.float16, torch.float32]})
def test_masters_of_an_optimizer_follow_each_mean(
    rank: int, world_size: int, make: Callable[..., Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(rank)
    model = make_narrow_model(dtype)
    optimizer = make(model.parameters(), lr=1e-3)
    on_merge = None if make is InState else copy_to_masters(optimizer)
    with LocalSGD(model, optimizer, sync_every=4, on_merge=on_merge):
        for number in range(8):
            narrow_step(model, optimizer, rank, number)
        assert_sites_are_equal(model, world_size)
        common = [each.float() for each in weights(model)]
        narrow_step(model, optimizer, rank, 8)
        # One step of this size moves no weight further than its lr, or a rounding, from what all had in common.
        for mine, before in zip(weights(model), common, strict=True):
            torch.testing.assert_close(mine.float(), before, rtol=2.0**-7, atol=0.02)
            assert not torch.equal(mine.float(), before)
    assert_sites_are_equal(model, world_size)


class Signed(SGD):
    """Steps of one size, as Adam's first ones and Lion's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


@on_ranks(2, cases={"make": [InList, in_wrapper, Signed, SGD, AdamW]})
def test_who_may_have_masters_has_to_tell(rank: int, world_size: int, make: Callable[..., Any]) -> None:
    """Before any mean, which it might take back. PyTorch's own have none."""
    torch.manual_seed(0)
    model = make_narrow_model(torch.bfloat16)
    optimizer = make(model.parameters(), lr=1e-3)
    if make in (SGD, AdamW):
        with LocalSGD(model, optimizer, sync_every=2):
            for number in range(2):
                narrow_step(model, optimizer, rank, number)
            assert_sites_are_equal(model, world_size)
        return
    with pytest.raises(ValueError, match="on_merge=lambda parameters: None"), DiLoCo(model, optimizer):
        narrow_step(model, optimizer, rank, 0)
    with LocalSGD(model, optimizer, sync_every=2, on_merge=lambda parameters: None):
        narrow_step(model, optimizer, rank, 0)


@on_ranks(2)
def test_on_merge_gets_what_was_written_to(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    calls: list[list[Tensor]] = []
    with DiLoCo(model, optimizer, sync_every=4, fragments=2, on_merge=calls.append):
        for step in range(4):
            train_step(model, optimizer, rank, step)
        everything, first, second = calls
    assert [id(each) for each in everything] == [id(each) for each in model.parameters()]
    assert [id(each) for each in first + second] == [id(each) for each in model.parameters()]
    assert len(calls) == 5  # the last means of the block
    refused(lambda: DiLoCo(model, optimizer, on_merge=5), "on_merge:")


# ---- wrappers, modes and defaults -----------------------------------------------------------------------------------


@on_ranks(2, cases={"holds": ["parameter", "buffer"]})
def test_frozen_wrappers_become_rank_0s(rank: int, world_size: int, holds: str) -> None:
    model = make_model()
    base = Quantised(torch.full((3, 3), 1 + rank, dtype=torch.int8), torch.tensor(0.5 + rank))
    if holds == "parameter":
        model.base = nn.Parameter(base, requires_grad=False)
    else:
        model.register_buffer("base", base)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with LocalSGD(model, optimizer, sync_every=2):
        for step in range(3):
            inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * rank + step))
            model[4](model[3](model[2](model[1](model[0](inputs))))).square().sum().backward()
            optimizer.step()
    plain = model.base.data if holds == "parameter" else model.base
    assert int(plain.q[0, 0]) == 1
    assert float(plain.scale) == 0.5


@on_ranks(2, cases={"frozen": [False, True]})
def test_what_was_made_in_inference_mode_is_averaged(rank: int, world_size: int, frozen: bool) -> None:
    """A table of positions that grows in an evaluation, or a frozen parameter that comes from one."""
    model = make_model()
    with torch.inference_mode():
        table = torch.full((3,), 2.0 * rank)
        model.register_buffer("table", table)
        if frozen:
            model.register_parameter("scale", nn.Parameter(torch.full((3,), 4.0 * rank), requires_grad=False))
    optimizer = make_optimizer(model)
    with LocalSGD(model, optimizer, sync_every=2):
        assert model.table.eq(0).all()  # all begin with those of rank 0
        with torch.inference_mode():
            model.table = torch.arange(5.0) + rank
            if frozen:
                model.scale += 1 + rank
        for step in range(2):
            train_step(model, optimizer, rank, step)
        assert torch.equal(model.table, torch.arange(5.0) + 0.5)
        assert not frozen or torch.equal(model.scale, torch.full((3,), 1.5))
    assert_sites_are_equal(model, world_size)


@on_ranks(2, cases={"compression": ["int8+ef", TopK()], "is_old": [False, True]})
def test_states_of_compiled_and_of_plain_models_are_one(
    rank: int, world_size: int, compression: Any, is_old: bool
) -> None:
    """An earlier version had the wrapper's names in its states."""
    options: dict[str, Any] = {"sync_every": 2, "compression": compression}

    def train(sync: DiLoCo, model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
        with sync:
            for step in steps:
                train_step(model, optimizer, rank, step)
        return weights(model)

    def begin(compiled: bool) -> tuple[DiLoCo, nn.Module, Any]:
        model = make_model()
        model.append(nn.BatchNorm1d(3))
        optimizer = SGD(model.parameters(), lr=0.1)
        of = torch.compile(model, backend="eager") if compiled else model
        return DiLoCo(of, optimizer, **options), model, optimizer

    results = []
    for compiled in (False, True):
        sync, model, optimizer = begin(compiled)
        train(sync, model, optimizer, range(3))
        state = copy.deepcopy(sync.state_dict())
        if is_old and compiled:
            for part in (state["outer"][0]["weights"], state["unsent"][0].get("residuals", {})):
                for name in list(part):
                    part[f"_orig_mod.{name}"] = part.pop(name)
        resumed, other, its = begin(not compiled)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        results.append(train(resumed, other, its, range(3, 7)))
    assert all(map(torch.equal, *results))
