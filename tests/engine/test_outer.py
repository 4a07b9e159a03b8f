"""DiLoCo and LocalSGD against plain PyTorch: several sites played in one process."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

import fastsync
from fastsync import Compression, DiLoCo, LocalSGD, TopK
from fastsync._checks import resolve_group
from fastsync.outer.fragment import split
from fastsync.outer.surviving_group import SurvivingGroup
from fastsync.outer.topk import BLOCK, decode, encode
from fastsync.sync.optimizer_steps import innermost, unwrapped
from tests.engine.same_data import same_data_is_meant
from tests.engine.sites import (
    assert_sites_are_equal,
    make_model,
    make_muon_and_adamw,
    make_optimizer,
    make_site,
    train_step,
    weights,
)
from tests.engine.wrappers import OptimizerWrapper
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
MEAN = partial(SGD, lr=1.0)


def play(
    sites: int, steps: int, sync_every: int, make: Callable[..., Any], fragments: int, delay: int, alpha: float,
    make_inner: Callable[[nn.Module], Any] = make_optimizer,
) -> list[list[Tensor]]:  # fmt: skip
    """What DiLoCo is to do, with the fragments' steps as the paper has them: the weights of each site in the end."""
    models = [make_model() for _ in range(sites)]
    optimizers = [make_inner(model) for model in models]
    parts = [
        [name for name, _ in part] for part in map(dict.items, split(dict(models[0].named_parameters()), fragments))
    ]
    outer = [[models[0].get_parameter(name).detach().clone() for name in part] for part in parts]
    outer_optimizers = [make(part) for part in outer]
    due: dict[int, list[int]] = {}

    def average(index: int) -> None:
        for place, name in enumerate(parts[index]):
            differences = [outer[index][place] - model.get_parameter(name).detach() for model in models]
            total = differences[0]
            for difference in differences[1:]:
                total = total + difference
            outer[index][place].grad = total / sites
        outer_optimizers[index].step()

    def merge(index: int, alpha: float) -> None:
        for place, name in enumerate(parts[index]):
            for model in models:
                own = model.get_parameter(name).detach()
                own.copy_(outer[index][place] if alpha == 0 else torch.lerp(outer[index][place], own, alpha))

    for step in range(1, steps + delay + 1):
        if step <= steps:
            for site in range(sites):
                train_step(models[site], optimizers[site], site, step)
        merged = due.pop(step, [])
        for index in range(fragments):
            if step <= steps and step % sync_every == (index + 1) * sync_every // fragments % sync_every:
                average(index)
                due.setdefault(step + delay, []).append(index)
        for index in merged + due.pop(step, []):
            merge(index, alpha)
    for step in range(steps + 1, steps + sync_every + 1):  # the last means, of those that have moved since
        for index in range(fragments):
            if step % sync_every == (index + 1) * sync_every // fragments % sync_every:
                of_sites = [[model.get_parameter(name).detach() for name in parts[index]] for model in models]
                if any(not torch.equal(a, b) for own in of_sites for a, b in zip(own, outer[index], strict=True)):
                    average(index)
                merge(index, 0.0)
    return [weights(model) for model in models]


CASES = [
    (4, NESTEROV, 1, 0, 0.0, make_optimizer), (1, MEAN, 1, 0, 0.0, make_optimizer),
    (5, NESTEROV, 3, 0, 0.0, make_optimizer), (5, NESTEROV, 3, 4, 0.0, make_optimizer),
    (4, NESTEROV, 2, 1, 0.5, make_optimizer), (3, partial(torch.optim.Adam, lr=0.1), 1, 2, 0.25, make_optimizer),
    (4, NESTEROV, 1, 0, 0.0, make_muon_and_adamw),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(cases={"case": CASES})
def test_it_does_what_the_papers_say(rank: int, world_size: int, case: tuple[Any, ...]) -> None:
    """Several optimizers may be given in another order than they step in."""
    sync_every, make, fragments, delay, alpha, make_inner = case
    model = make_model()
    optimizer = make_inner(model)
    with DiLoCo(
        model, tuple(reversed(optimizer)) if isinstance(optimizer, list) else optimizer, sync_every=sync_every,
        outer_optimizer=make, fragments=fragments, compression="none", fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    ) as sync:  # fmt: skip
        for step in range(1, 14):
            train_step(model, optimizer, rank, step)
        assert sync.state_dict()["step"] == 13
    expected = play(world_size, 13, sync_every, make, fragments, delay, alpha, make_inner)[rank]
    assert all(map(torch.equal, weights(model), expected))


class _Halved(SGD):
    """Halves the gradients, as an optimizer that clips changes them."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


def _wrapped(parameters: Any, lr: float) -> OptimizerWrapper:
    return OptimizerWrapper(SGD(parameters, lr))


class _StepsAnother:
    """Wraps an optimizer, and is none itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


def _wrapped_twice(parameters: Any, lr: float) -> _StepsAnother:
    return _StepsAnother(_StepsAnother(_wrapped(parameters, lr)))


@on_ranks(1, cases={"kind": [_Halved, _wrapped, _wrapped_twice]})
def test_each_step_counts_once(rank: int, world_size: int, kind: Any) -> None:
    others = [SGD(make_model().parameters(), lr=0.1)]  # PyTorch then wraps the step of both classes
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=4) as diloco:
        get_optimizer_state_dict(model, innermost(unwrapped(optimizer)))  # steps a new one with zeros
        for step in range(8):
            train_step(model, optimizer, 0, step)
        assert diloco.state_dict()["step"] == 8
        assert diloco.stats()[0].num_steps == 2
    del others


def train_with_everything(model: nn.Module, optimizer: torch.optim.Optimizer, site: int) -> None:
    """Three steps with a scheduler, clipping and a scaler, which skips another one of site 1."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(4 if site == 1 else 3):
        inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * site + step))
        optimizer.zero_grad()
        loss = model(inputs).square().sum() * (torch.inf if (site, step) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@on_ranks(2)
def test_schedulers_clipping_and_scalers_work_on_each_site(rank: int, world_size: int) -> None:
    model, alone = make_model(), [make_model() for _ in range(world_size)]
    optimizer = make_optimizer(model)
    with LocalSGD(model, optimizer, sync_every=3):
        train_with_everything(model, optimizer, rank)
    for site, lone in enumerate(alone):
        train_with_everything(lone, make_optimizer(lone), site)
    fastsync.check_consistency(model)
    for mine, *theirs in zip(weights(model), *map(weights, alone), strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs).mean(0), rtol=1e-6, atol=1e-7)


@on_ranks(3)
def test_local_sgd_takes_the_mean_of_the_weights_and_of_floating_buffers(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = SGD(model.parameters(), lr=0.0)
    bn = model[1]
    with LocalSGD(model, optimizer, sync_every=1) as sync:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0**rank)
            bn.running_mean.fill_(float(rank))
            bn.num_batches_tracked.fill_(rank)
        for outer in sync._state.fragments[0].outer.values():
            outer.data.zero_()
        with pytest.warns(UserWarning, match="were changed before the first step"):  # it is meant here
            optimizer.step()
    assert all(torch.allclose(p, torch.tensor(7 / 3)) for p in model.parameters())
    assert torch.equal(bn.running_mean, torch.ones(2))
    assert int(bn.num_batches_tracked) == rank


@on_ranks(2)
def test_factors_begin_anew_where_sites_are_left(rank: int, world_size: int) -> None:
    """Sites may have other ones, if a mean has failed on some of them."""
    model = make_model()
    optimizer = make_optimizer(model)
    alone = [torch.distributed.new_group([each]) for each in range(2)]
    with DiLoCo(model, optimizer, sync_every=1, compression="lowrank:2") as sync:
        fragment = sync._state.fragments[0]

        def factors() -> list[Tensor]:
            return list(fragment.averager.state_dict()["factors"].values())

        first = factors()
        train_step(model, optimizer, rank, 1)
        assert not all(map(torch.equal, factors(), first))
        fragment.use_group(alone[rank])
        assert all(map(torch.equal, factors(), first))
        fragment.use_group(torch.distributed.group.WORLD)


@on_ranks(2, cases={"compression": ["int8+ef", TopK()]})
def test_what_is_not_sent_adds_as_much_where_sites_are_left(rank: int, world_size: int, compression: Any) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=1, compression=compression)
    with sync:
        fragment = sync._state.fragments[0]

        def unsent() -> Tensor:
            state = fragment.averager.state_dict()
            return state["unsent"] if "unsent" in state else torch.cat([*state["residuals"].values()])

        train_step(model, optimizer, rank, 1)
        before = unsent().clone()
        assert before.any()
        fragment.use_group(torch.distributed.new_group([rank], use_local_synchronization=True))
        assert torch.equal(unsent(), before / 2)
        fragment.use_group(torch.distributed.group.WORLD)
        assert torch.equal(unsent(), before)


@on_ranks(2, cases={"compression": [Compression("int8", error_feedback=True), TopK(decay=1.0)]})
def test_what_is_not_sent_now_is_sent_later(rank: int, world_size: int, compression: Any) -> None:
    weight = nn.Parameter(torch.zeros(2 * BLOCK))
    model = nn.ParameterList([weight])
    optimizer = SGD([weight], lr=1.0)
    generator = torch.Generator().manual_seed(rank)
    changes = [torch.randn(2 * BLOCK, generator=generator) for _ in range(30)]
    with DiLoCo(model, optimizer, sync_every=1, compression=compression, outer_optimizer=MEAN) as sync:
        for change in changes:
            weight.grad = -change
            optimizer.step()
    unsent = sync.state_dict()["unsent"][0]
    kept = unsent["unsent"] if isinstance(compression, TopK) else next(iter(unsent["residuals"].values()))
    total = torch.stack([*changes]).sum(0)
    totals = [torch.empty_like(total) for _ in range(2)]
    torch.distributed.all_gather(totals, total + kept)
    expected = sum(totals) / 2
    # The differences point against the changes, and so does what is left of them.
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-4)


@on_ranks(2, cases={"compression": [Compression("int8", error_feedback=True), TopK()]})
def test_it_resumes_bit_for_bit_with_fragments_on_their_way(rank: int, world_size: int, compression: Any) -> None:
    options = {"sync_every": 3, "fragments": 2, "fragment_sync_delay": 2, "compression": compression}

    def trained(stop: int) -> list[Tensor]:
        """Ten steps, in the middle of which everything is saved and goes on in new objects."""
        model, optimizer, sync = make_site(DiLoCo, **options)
        with sync:
            for step in range(1, stop + 1):
                train_step(model, optimizer, rank, step)
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        model, optimizer, sync = make_site(DiLoCo, **options)
        for each, saved in zip((model, optimizer, sync), state, strict=True):
            each.load_state_dict(saved)
        with sync:
            for step in range(stop + 1, 11):
                train_step(model, optimizer, rank, step)
        return weights(model)

    expected = trained(0)
    for stop in (3, 4, 5):
        assert all(map(torch.equal, trained(stop), expected))


@on_ranks(4)
def test_sites_of_several_ranks_under_fully_shard(rank: int, world_size: int) -> None:
    same_data_is_meant()  # within a site
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    site = rank // 2
    model, alone = make_model(), make_model()
    fully_shard(model, mesh=mesh["ranks"])
    optimizer, lone_optimizer = make_optimizer(model), make_optimizer(alone)
    with LocalSGD(model, optimizer, sync_every=3, process_group=mesh["sites"]):
        for step in range(1, 4):
            train_step(model, optimizer, site, step)
            train_step(alone, lone_optimizer, site, step)
    for mine, mean in zip(model.parameters(), weights(alone), strict=True):
        torch.distributed.all_reduce(mean)  # of both sites, twice
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor().detach(), mean / 4, rtol=1e-6, atol=1e-7)


def trained_until_one_is_lost(rank: int, world_size: int, delay: int, compression: Any) -> list[Tensor]:
    model = make_model()
    optimizer = make_optimizer(model)
    options: Any = {"fragments": 2, "fragment_sync_delay": delay, "compression": compression}
    says_so = pytest.warns(UserWarning, match=r"ranks \[2\] were lost")
    with says_so, DiLoCo(model, optimizer, sync_every=2, **options) as sync:
        of_three = weakref.ref(sync._sites.group)
        for step in range(1, 9):
            if rank == 2 and step == 4:
                os._exit(0)
            train_step(model, optimizer, rank, step)
        assert sync._sites.ranks == [0, 1]
    gc.collect()
    assert of_three() is None, "the group of before still has its connections"
    return [outer.detach() for fragment in sync._state.fragments for outer in fragment.outer.values()]


@pytest.mark.parametrize(
    ("delay", "compression", "shared_memory"),
    [(0, "int8+ef", True), (1, "int8+ef", False), (0, "none", False), (0, TopK(), True)],
)
def test_the_others_go_on_without_a_site_that_is_lost(delay: int, compression: Any, shared_memory: bool) -> None:
    """Long before the time-out, which is ten minutes."""
    lost = {"lost": [2], "timeout": 60, "shared_memory": shared_memory}
    first, second, _ = run_ranks(trained_until_one_is_lost, 3, delay, compression, **lost)
    assert all(map(torch.equal, first, second))


def _waits_for_a_rank_that_knows_of_a_loss(rank: int, world_size: int, has_seen_it: bool) -> list[int]:
    sites = SurvivingGroup(resolve_group(None), timedelta(minutes=10))
    resolve_group(None).barrier().wait()
    if rank == 2:
        os._exit(0)
    error = RuntimeError("rank 2 is lost")
    if rank == 1 and has_seen_it:
        with pytest.raises(RuntimeError):
            sites.group.recv([torch.zeros(1)], 2, 0).wait()
    if rank == 0:
        with pytest.raises(RuntimeError) as closed:
            sites.group.recv([torch.zeros(1)], 1, 0).wait()
        error = closed.value
    sites.go_on(lambda: 0, lambda progress: None, error)
    sites.group.barrier().wait()  # a rank that ends is lost to one that still connects
    return sites.ranks


@pytest.mark.parametrize("has_seen_it", [False, True], ids=["was told", "its connection broke"])
def test_a_rank_that_waits_for_one_that_knows_of_a_loss_hears_of_it(has_seen_it: bool) -> None:
    """Also if its own connections to the lost rank have nothing to tell: it has sent all, and waits for the other."""
    ranks = run_ranks(_waits_for_a_rank_that_knows_of_a_loss, 3, has_seen_it, lost=[2], timeout=60)
    assert ranks[:2] == [[0, 1], [0, 1]]


class StoreOfPython(torch.distributed.Store):
    """Through which no heartbeat can go."""

    def __init__(self, file: str, world_size: int) -> None:
        super().__init__()
        self._file = torch.distributed.FileStore(file, world_size)

    def set(self, key: str, value: Any) -> None:
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        return self._file.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._file.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._file.wait(keys, *timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._file.compare_set(key, expected, desired)

    def clone(self) -> StoreOfPython:
        return self


def _left_of_a_store_of_python(rank: int, world_size: int, file: str) -> tuple[list[int], dict[int, int]]:
    torch.distributed.destroy_process_group()
    store = StoreOfPython(file, world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = SurvivingGroup(resolve_group(None), timedelta(minutes=10))
    came: dict[int, int] = {}
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(world_size)])
    if rank == 2:
        os._exit(0)
    group.go_on(lambda: 10 + rank, came.update, RuntimeError("the connection broke"))
    group.group.barrier().wait()
    return group.ranks, came


def test_the_others_go_on_where_the_store_carries_no_heartbeats(tmp_path: Path) -> None:
    """As soon as the process has ended, and not after the time-out."""
    first, second, _ = run_ranks(_left_of_a_store_of_python, 3, str(tmp_path / "store"), lost=[2], timeout=60)
    assert first == second == ([0, 1], {0: 10, 1: 11})


@on_ranks(2, cases={"kind, compression": [(DiLoCo, "int8+ef"), (DiLoCo, "fp16"), (DiLoCo, TopK()), (LocalSGD, "none")]})
def test_who_has_come_further_tells_the_others(
    rank: int, world_size: int, kind: type[DiLoCo], compression: Any
) -> None:
    """Rank 1 takes a mean for lost that rank 0 has got."""
    model, optimizer, sync = make_site(kind, sync_every=2, timeout=2.0, compression=compression)
    with sync:
        averager = sync._state.fragments[0].averager
        arrive = averager.synchronize

        def fail() -> None:
            arrive()
            raise RuntimeError("the connection broke")

        for step in range(1, 9):
            if rank == 1 and step == 4:
                averager.synchronize = fail
            train_step(model, optimizer, rank, step)
    assert_sites_are_equal(model, world_size)


@on_ranks(2)
def test_ranks_begin_with_rank_0s_weights_and_buffers(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False).fill_(float(rank))
    model[1].running_mean.fill_(10.0 * rank)
    model[1].num_batches_tracked.fill_(rank)
    DiLoCo(model, SGD(model.parameters(), lr=0.0))
    fastsync.check_consistency(model)
    assert model[1].running_mean.eq(0).all()


@on_ranks(3)
def test_ranks_may_have_made_different_numbers_of_groups(rank: int, world_size: int) -> None:
    for _ in range(rank):
        torch.distributed.new_group([rank], use_local_synchronization=True)
    model, optimizer, sync = make_site(LocalSGD, sync_every=1)
    with sync:
        train_step(model, optimizer, rank, 0)
    fastsync.check_consistency(model)


def same(mine: Any, theirs: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, Tensor):
        return not mine.any() if theirs is None else torch.equal(mine, theirs)  # nothing is unsent
    return mine == theirs


@on_ranks(2, cases={"compression": [Compression("int8", error_feedback=True), TopK()]})
def test_a_refused_state_changes_nothing(rank: int, world_size: int, compression: Any) -> None:
    def trained(steps: int, **options: Any) -> DiLoCo:
        model, optimizer, sync = make_site(DiLoCo, sync_every=2, fragments=2, **options)
        with sync:
            for step in range(steps):
                train_step(model, optimizer, rank, step)
        return sync

    sync, other = trained(4, compression=compression), trained(6, compression=compression)
    before, theirs = copy.deepcopy(sync.state_dict()), other.state_dict()
    without_optimizer = [each | {"optimizer": {"state": {}, "param_groups": []}} for each in theirs["outer"]]
    unfit = [
        theirs | {"unsent": [theirs["unsent"][0], {"unsent": torch.zeros(3)}]},  # the second is another compression's
        theirs | {"outer": [theirs["outer"][0], without_optimizer[1]]},
        {name: part for name, part in theirs.items() if name != "due"},
        theirs | {"outer": [each | {"buffers": torch.zeros(5)} for each in theirs["outer"]]},
    ]
    for state in unfit:
        refused(lambda: sync.load_state_dict(state), "state")
        assert same(sync.state_dict(), before)
    sync.load_state_dict(theirs)
    assert same(sync.state_dict(), theirs)


@on_ranks(2)
def test_ranks_with_other_settings_or_models_are_refused(rank: int, world_size: int) -> None:
    def begin(model: nn.Module, **options: Any) -> None:
        DiLoCo(model, make_optimizer(model), **options)

    refused(lambda: begin(make_model(), sync_every=10 + rank), "do not agree")
    refused(lambda: begin(make_model(), compression=TopK(fraction=0.01 * (1 + rank))), "do not agree")
    outer = partial(SGD, lr=0.5 + 0.5 * rank)
    refused(lambda: begin(make_model(), outer_optimizer=outer), "outer_optimizer SGD {'lr': 0.5")
    refused(lambda: begin(nn.Linear(2, 2 + rank)), "do not agree")


@on_ranks(2)
def test_rounding_of_narrow_weights_is_no_movement(rank: int, world_size: int) -> None:
    model = make_model().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.0)
    with DiLoCo(model, optimizer, sync_every=1, compression="none") as sync:
        outer = list(sync._state.fragments[0].outer.values())
        with torch.no_grad():
            for weight in outer:
                weight.mul_(1 + 2.0**-12)  # which bfloat16 does not hold
        before = [weight.detach().clone() for weight in outer]
        for _ in range(3):
            optimizer.step()
    assert all(torch.equal(weight, was) for weight, was in zip(outer, before, strict=True))


@pytest.mark.parametrize("numel", [100, BLOCK, 3 * BLOCK + 100])
def test_top_k_sends_the_largest_of_each_block(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    k = TopK().values_a_block
    sent = decode(encode(values, k), k, numel)
    for block, came in zip(values.split(BLOCK), sent.split(BLOCK), strict=True):
        chosen = block.abs().topk(k).indices
        assert set(came.nonzero().flatten().tolist()) <= set(chosen.tolist())
        assert torch.equal(came[chosen].sign(), block[chosen].sign())
        torch.testing.assert_close(came.abs().sum(), block[chosen].abs().sum())


@pytest.mark.usefixtures("one_rank")
def test_bad_arguments_are_refused() -> None:
    model = make_model()
    given: dict[str, dict[str, Any]] = {
        "sync_every": {"sync_every": 0},
        "fragments": {"fragments": 7},
        "fragment_sync_delay": {"sync_every": 5, "fragment_sync_delay": 5},
        "fragment_update_alpha": {"fragment_update_alpha": 1.0},
        "compression": {"compression": "int3"},
    }
    for argument, options in given.items():
        refused(lambda: DiLoCo(model, make_optimizer(model), **options), f"{argument}:")
    with DiLoCo(model, make_optimizer(model), sync_every=7, compression="bf16") as diloco:
        diloco.step()
        assert repr(diloco) == "DiLoCo(451 values, sync_every: 7, compression: bf16, all_reduce, step 1, ranks [0])"
