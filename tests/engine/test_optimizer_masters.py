"""``shard_optimizer`` with masters: the bits of float32 copies that torch's optimizer steps."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer

import fastsync
from fastsync.optimizer.masters import PARAMETER_WIRES
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.optimizer_shards import FURTHER, OF_WHOLE, OPTIMIZERS, SHAPES, WIRES, Weights
from tests.engine.sharded_trainings import BOTH_WAYS, loss_of, step, two_layers, values
from tests.engine.test_hosts import PAIRS, UNEQUAL, Nodes, run_on_hosts
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks
from tests.refused import refused

KINDS = OPTIMIZERS | FURTHER | OF_WHOLE
MAX_NORM = 0.5


def in_each_way(cases: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what one rank does, and each of two: that share memory, and that do not."""
    given = pytest.mark.parametrize("world_size", [1, 2])
    return lambda body: given(on_ranks(cases=BOTH_WAYS | cases)(body))


class Reference:
    """Float32 copies of the rounded weights, stepped by torch's optimizer with the averaged gradients."""

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        compression: Any = "none",
        wire: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """Takes the dtype that float32 parameters travel in."""
        self.model, self.sync = model, fastsync.attach(model, compression, **options)
        self.roundings = [wire if p.dtype == torch.float32 else p.dtype for p in model.parameters()]
        self.masters = [
            p if rounding == torch.float32 else nn.Parameter(p.detach().float().clone())
            for p, rounding in zip(model.parameters(), self.roundings, strict=True)
        ]
        self.optimizer: Optimizer = KINDS[kind](groups(self.masters))

    def step(self, scaler: GradScaler, norm: Tensor | None) -> None:
        for master, weight in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        if norm is not None:
            divisor = (norm + 1e-6).div_(MAX_NORM).clamp_(min=1.0)
            if self.optimizer.param_groups[0].get("fused"):
                self.optimizer.grad_scale = divisor
            else:
                for master in self.masters:
                    if master.grad is not None:
                        master.grad.mul_(divisor.reciprocal())
        scaler.step(self.optimizer)
        vars(self.optimizer).pop("grad_scale", None)
        with torch.no_grad():
            everything = zip(self.masters, self.model.parameters(), self.roundings, strict=True)
            for master, weight, rounding in everything:
                if master.grad is not None:
                    weight.copy_(master.to(rounding))
                master.grad = weight.grad = None


def groups(weights: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.02}]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks(cases=BOTH_WAYS)
def test_steps_are_those_of_float32_copies(rank: int, world_size: int) -> None:
    """Rounded, where parameters travel in bf16. One and two ranks take steps of further optimizers, too."""
    for wire in PARAMETER_WIRES:
        for seed in range(2):
            train_both(rank, world_size, 10 * world_size + seed, wire)
    for seed, kind in enumerate(["NAdam", "Adagrad", "Rprop", *OF_WHOLE] if world_size <= 2 else []):
        train_both(rank, world_size, 300 + seed, ("none", "bf16")[seed % 2], kind)


@pytest.mark.parametrize("nodes", [PAIRS, UNEQUAL], ids=["pairs", "unequal"])
def test_each_host_steps_masters_of_its_own(nodes: Nodes) -> None:
    run_on_hosts(train_on_hosts, nodes)


def train_on_hosts(rank: int, world_size: int, nodes: Nodes) -> None:
    for seed in range(2):
        train_both(rank, world_size, seed)


def train_both(rank: int, world_size: int, seed: int, parameter_compression: str = "none", kind: str = "") -> None:
    rng, own = random.Random(seed), random.Random(f"{seed} {rank}")
    kind = kind or list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    first, choice = ([(9, 20)], [(33, 65), (300, 257)]) if kind.startswith("Muon") else ([(3,), (0,)], SHAPES)
    shapes = [*first, *(rng.choice(choice) for _ in range(rng.randint(1, 6)))]
    kinds = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
    dtypes = [rng.choice(kinds) if 0 not in shape else torch.float32 for shape in shapes]
    wire = rng.choice(WIRES)
    compression = fastsync.Compression(
        wire.removesuffix("+ef"), reduce="fp32", error_feedback="+ef" in wire, algorithm="one_shot"
    )
    model, plain = mixed(shapes, dtypes), mixed(shapes, dtypes)
    optimizer = KINDS[kind](groups(list(model.parameters())))
    sync = fastsync.attach(model, compression, bucket_cap_mb=0.1)
    fastsync.shard_optimizer(sync, optimizer, master_weights=True, parameter_compression=parameter_compression)
    reference = Reference(plain, kind, compression, PARAMETER_WIRES[parameter_compression] or torch.float32)
    is_fused = optimizer.param_groups[0].get("fused")
    scales = is_fused and rng.random() < 0.5
    scaler, other = (GradScaler("cpu", init_scale=2.0**6, growth_interval=3, enabled=scales) for _ in range(2))
    clips = rng.random() < 0.5
    for number in range(6):
        # torch's fused SGD refuses a group of which some have momentum.
        used = [i for i in range(len(shapes)) if kind in ("momentum", "nesterov") or i == 0 or rng.random() < 0.8]
        grads = {i: torch.randn(shapes[i], generator=generator(own)).to(dtypes[i]) for i in used}
        if scales and number == 4 and rank == world_size - 1:
            grads[0].view(-1)[:1] = torch.inf
        scaler.scale(model(grads)).backward()
        other.scale(plain(grads)).backward()
        norm = None
        if clips:
            norm = fastsync.clip_grad_norm_(sync, MAX_NORM, optimizer=optimizer, scaler=scaler if scales else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reference.step(other, norm)
        other.update()
        assert scaler.get_scale() == other.get_scale()
        assert_same_as(reference, model, optimizer, f"{kind} {wire}, step {number}")


def mixed(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> Weights:
    model = Weights(shapes)
    for weight, dtype in zip(model.weights, dtypes, strict=True):
        weight.data = weight.data.to(dtype)
    return model


def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(10**9))


def assert_same_as(reference: Reference, model: nn.Module, optimizer: Optimizer, told: str = "") -> None:
    same(values(model), values(reference.model), told)
    state = optimizer.state_dict()["state"]
    for index, exact in reference.optimizer.state_dict()["state"].items():
        own = dict(state.get(index, {}))
        own.pop("master", None)
        same(own, exact, f"{told}: state of {index}")
    own_groups = [p for group in optimizer.param_groups for p in group["params"]]
    of_reference = [p for group in reference.optimizer.param_groups for p in group["params"]]
    own_copies = {id(master) for master in reference.masters} - {id(p) for p in reference.model.parameters()}
    for index, (weight, master) in enumerate(zip(own_groups, of_reference, strict=True)):
        if id(master) in own_copies and weight.numel() > 0 and index in state:
            same(state[index].get("master", weight.detach().float()), master.data, f"{told}: master")  # made by a step


def same(one: Any, other: Any, told: str = "") -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{told}: {text}")


# ---- a small model --------------------------------------------------------------------------------------------------


NARROW, IN_BF16 = torch.bfloat16, torch.float32
"""16-bit parameters have masters, and so have float32 ones that travel in bf16."""


def attached(kind: str = "AdamW", dtype: torch.dtype = NARROW) -> tuple[nn.Module, Optimizer, GradientSynchronizer]:
    model = two_layers().to(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    options: dict[str, Any] = {"master_weights": True} if dtype == NARROW else {"parameter_compression": "bf16"}
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer, **options)
    return model, optimizer, sync


def copies_of_two_layers(dtype: torch.dtype = NARROW) -> Reference:
    reference = Reference(two_layers().to(dtype), "AdamW", wire=torch.bfloat16)
    reference.optimizer = OPTIMIZERS["AdamW"](reference.masters)
    return reference


def step_copies(reference: Reference, rank: int, number: int) -> None:
    loss_of(reference.model, rank, number).backward()
    reference.step(GradScaler("cpu", enabled=False), None)


def masters(optimizer: Optimizer) -> list[Tensor]:
    """Returns copies of all masters. Every rank calls it."""
    return [state["master"].clone() for state in optimizer.state_dict()["state"].values()]


@on_ranks(2)
def test_masters_are_once_in_a_host_s_memory(rank: int, world_size: int) -> None:
    """Without the option there are none, and the state is narrow."""
    narrow = two_layers().to(NARROW)
    own = AdamW(narrow.parameters(), fused=True)
    fastsync.shard_optimizer(fastsync.attach(narrow), own)
    model, optimizer, _ = attached()
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer, rank)
    step(narrow, own, rank)
    assert own.state[narrow[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert own.state[narrow[0].weight]["exp_avg"].dtype == NARROW
    state = optimizer.state[model[0].weight]
    assert {name: each.dtype for name, each in state.items()} == dict.fromkeys(state, torch.float32)
    assert not torch.equal(state["master"], model[0].weight.float())
    dist.barrier()
    if rank == 1:
        state["master"].fill_(7.0)
    dist.barrier()
    assert state["master"].eq(7.0).all()


@on_ranks(3, shared_memory=False)
def test_without_shared_memory_a_rank_has_the_masters_of_its_shard(rank: int, world_size: int) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    for state in optimizer.state.values():
        assert all(state[name].is_meta for name in ("master", "exp_avg", "exp_avg_sq"))
    whole = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    own = torch.tensor(sum(each.nbytes for each in sync._optimizer_shards._home._held.values()))
    assert own < whole
    dist.all_reduce(own)
    assert own == whole


@on_ranks(3, shared_memory=False)
def test_parameters_in_bf16_take_half_the_bytes(rank: int, world_size: int) -> None:
    sent = []
    for wire in PARAMETER_WIRES:
        model = nn.Linear(300, 100)
        optimizer = AdamW(model.parameters())
        sync = fastsync.attach(model)
        fastsync.shard_optimizer(sync, optimizer, parameter_compression=wire)
        model(torch.full((1, 300), 1.0 + rank)).sum().backward()
        optimizer.step()
        sent.append(sync.stats().parameter_wire_bytes)
        assert " of parameters sent" in repr(sync.stats())
        sync.detach()
    assert 0.49 < sent[1] / sent[0] < 0.51
    assert torch.equal(model.weight, model.weight.bfloat16().float())


# ---- saved and loaded -----------------------------------------------------------------------------------------------


@in_each_way(
    {"kind, dtype": [("AdamW", IN_BF16), *((kind, NARROW) for kind in ("AdamW", "amsgrad", "momentum", "SGD"))]}
)
def test_a_resumed_training_has_the_same_bits(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    model, optimizer, sync = attached(kind, dtype)
    for number in range(3):
        step(model, optimizer, rank, number)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for number in range(3, 6):
        step(model, optimizer, rank, number)
    end, end_masters = values(model), masters(optimizer)
    sync.detach()
    for before in range(2):
        model, optimizer, sync = attached(kind, dtype)
        for _ in range(before):
            step(model, optimizer, rank, 9)
        saved = torch.load(io.BytesIO(file.getvalue()))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        same(masters(optimizer), [state["master"] for state in saved["optimizer"]["state"].values()])
        for number in range(3, 6):
            step(model, optimizer, rank, number)
        same(values(model), end)
        same(masters(optimizer), end_masters)
        sync.detach()


@in_each_way({})
def test_a_plain_training_s_file_begins_the_masters(rank: int, world_size: int) -> None:
    """And a plain training goes on from a file with masters."""
    plain = two_layers().to(NARROW)
    own = AdamW(plain.parameters(), lr=0.1, fused=True)
    handle = fastsync.attach(plain)
    for number in range(2):
        step(plain, own, rank, number)
    handle.detach()
    model, optimizer, _ = attached()
    for _ in range(2):
        step(model, optimizer, rank, 7)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    reference = Reference(plain, "AdamW")
    reference.optimizer = AdamW(reference.masters, fused=True)
    reference.optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    for number in range(2, 4):
        step(model, optimizer, rank, number)
        step_copies(reference, rank, number)
    assert_same_as(reference, model, optimizer)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert own.state[plain[0].weight]["exp_avg"].dtype == NARROW
    step(plain, own, rank, 4)


# ---- weights that somebody writes -----------------------------------------------------------------------------------


@in_each_way({"dtype": [NARROW, IN_BF16]})
def test_a_master_takes_what_was_written_to_its_weight(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Of other values it keeps the bits that the weight does not have. A model that is loaded is written whole."""
    model, optimizer, _ = attached("SGD", dtype)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    step(model, optimizer, rank)
    weight, written = model[0].weight, torch.zeros(70, 5, dtype=torch.bool)
    written[3:9] = True
    before = masters(optimizer)[0]
    dist.barrier()
    with torch.no_grad():
        weight[3:9] = 3.0
    dist.barrier()
    step_by_nothing(model, optimizer)
    same(masters(optimizer)[0], torch.where(written, 3.0, before))
    same(weight.data, torch.where(written, 3.0, before).bfloat16().to(dtype))
    other = {name: (value + 1).bfloat16().to(dtype) for name, value in model.state_dict().items()}
    dist.barrier()
    model.load_state_dict(other)
    dist.barrier()
    step_by_nothing(model, optimizer)
    same(dict(model.state_dict()), other)
    same(masters(optimizer), [parameter.data.float() for parameter in model.parameters()])


def step_by_nothing(model: nn.Module, optimizer: Optimizer) -> None:
    sum((p * 0).sum() for p in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


@in_each_way({})
def test_weights_that_were_exchanged_for_a_while_change_nothing(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    reference = copies_of_two_layers()
    for number in range(3):
        step(model, optimizer, rank, number)
        step_copies(reference, rank, number)
        kept = values(model)
        dist.barrier()
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(1.0)
        dist.barrier()
        with torch.no_grad():
            for weight, value in zip(model.parameters(), kept, strict=True):
                weight.copy_(value)
        dist.barrier()
    assert_same_as(reference, model, optimizer)


# ---- the end, and what is refused -----------------------------------------------------------------------------------


@in_each_way({})
def test_detach_leaves_state_that_torch_steps(rank: int, world_size: int) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    saved = copy.deepcopy(optimizer.state_dict())
    before = values(model)
    sync.detach()
    assert optimizer.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    same(optimizer.state[model[0].weight]["exp_avg"], saved["state"][0]["exp_avg"].bfloat16())
    handle = fastsync.attach(model)
    step(model, optimizer, rank, 1)
    assert_same_on_all_ranks(values(model))
    handle.detach()
    fastsync.shard_optimizer(fastsync.attach(model), optimizer, master_weights=True)
    with torch.no_grad():
        for weight, value in zip(model.parameters(), before, strict=True):
            weight.copy_(value)
    optimizer.load_state_dict(saved)
    other, own, _ = attached()
    for number in range(3):
        step(other, own, rank, number)
        if number > 0:
            step(model, optimizer, rank, number)
    same(masters(optimizer), masters(own))


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_arguments_that_are_refused(rank: int, world_size: int) -> None:
    model = two_layers().to(NARROW)
    optimizer = AdamW(model.parameters(), fused=True)
    shard = partial(fastsync.shard_optimizer, fastsync.attach(model), optimizer)
    for wrong in ("int8", torch.bfloat16, ["bf16"]):
        refused(lambda: shard(parameter_compression=wrong), "parameter_compression:")
    refused(lambda: shard(master_weights="float32"), "master_weights:")
    trained, own, _ = attached()
    step(trained, own, rank)
    state = copy.deepcopy(own.state_dict())
    optimizer.load_state_dict(state)
    refused(lambda: shard(master_weights=True), "master of parameter 0.weight was rounded to torch.bfloat16, because")
    if world_size > 1:  # a rank without masters is told, its optimizer stays as it was, and loads 16-bit state
        model = two_layers().to(NARROW)
        optimizer = AdamW(model.parameters(), fused=True)
        shard = partial(fastsync.shard_optimizer, fastsync.attach(model), optimizer)
        refused(lambda: shard(master_weights=rank == 0), "masters, rounded to torch.bfloat16, of parameters 0 1 2 3")
        optimizer.load_state_dict(state)
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == NARROW


@in_each_way({"dtype": [NARROW, IN_BF16]})
def test_frozen_weights_keep_their_masters(rank: int, world_size: int, dtype: torch.dtype) -> None:
    model, optimizer, _ = attached(dtype=dtype)
    reference = copies_of_two_layers(dtype)
    for number in range(6):
        for each in (model, reference.model):
            each[0].weight.requires_grad_(number not in (2, 3))
        step_copies(reference, rank, number)
        step(model, optimizer, rank, number)
    assert_same_as(reference, model, optimizer)
