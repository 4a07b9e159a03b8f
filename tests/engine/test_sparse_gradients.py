"""Embeddings with sparse=True: their gradients stay sparse, and hold what the mean of dense gradients holds."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fastsync
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import AVERAGING, average
from tests.models import Fails
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

ROWS, WIDTH = 11, 3
Grads = dict[str, Tensor | None]


class Words(nn.Module):
    """The sum of some words' vectors, through a layer. Its gradients are small integers."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
        self.words = kind(ROWS, WIDTH, sparse=True, dtype=dtype, **options)
        self.layer = nn.Linear(WIDTH, 2, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 5 - 2)

    def forward(self, tokens: Tensor | None) -> Tensor:
        """Takes word numbers [sentences, words]. Without any, only the layer gets a gradient."""
        if tokens is None:
            return self.layer(torch.ones(1, WIDTH, dtype=self.layer.weight.dtype)).sum()
        vectors = self.words(tokens)
        return self.layer(vectors.sum(1) if vectors.dim() == 3 else vectors).sum()


def tokens_of(rank: int, step: int = 0) -> Tensor:
    """Other words on each rank, some of them twice, and other numbers of them."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (2 + rank, 4), generator=generator)


def own_gradients(tokens: Tensor | None, state: dict[str, Any] | None = None, **options: Any) -> Grads:
    """Returns the gradients that a rank with these tokens has by itself."""
    model = Words(**options)
    if state is not None:
        model.load_state_dict(state)
    model(tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check(model: nn.Module, everyone: Sequence[Grads], weights: Sequence[float] | None = None) -> None:
    """Each gradient is the mean over the ranks, with the rows of those that count, and the same bits on all ranks."""
    weights = weights or [1.0] * len(everyone)
    for name, parameter in model.named_parameters():
        own = [(weight, grads[name]) for weight, grads in zip(weights, everyone, strict=True)]
        there = [(weight, grad) for weight, grad in own if grad is not None and weight > 0]
        mean = parameter.grad
        assert mean is not None
        if name == "words.weight":
            assert mean.is_sparse
            assert mean.is_coalesced()
            rows = torch.cat([grad.coalesce().indices()[0] for _, grad in there]).unique()
            assert_bitwise_equal(mean.indices()[0], rows)
        expected = sum(grad.to_dense().double() * weight for weight, grad in there) / sum(weights)
        tolerance = 0.0 if len(everyone) in (1, 2, 4) and weights == [1.0] * len(everyone) else 1e-6
        torch.testing.assert_close(mean.to_dense(), expected.to(mean.dtype), rtol=tolerance, atol=tolerance)
        check_same_on_all_ranks(mean.to_dense())


def check_same_on_all_ranks(tensor: Tensor) -> None:
    theirs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, tensor)
    for other in theirs:
        assert_bitwise_equal(other, tensor)


# ---- the mean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks(cases={"entry_point": AVERAGING, "shared_memory": [True, False]})
def test_the_mean_has_the_rows_of_all_ranks(rank: int, world_size: int, entry_point: str) -> None:
    """The oracle drill has tables of other dtypes, ranks without a gradient, and what accumulates."""
    model = Words(nn.EmbeddingBag)
    averaged = average(entry_point, model)
    for step in range(2):
        averaged.model.zero_grad()
        averaged.backward(averaged.model(tokens_of(rank, step)))
        check(model, [own_gradients(tokens_of(other, step), kind=nn.EmbeddingBag) for other in range(world_size)])
        norm = torch.cat([p.grad.to_dense().flatten() for p in model.parameters()]).norm()
        torch.testing.assert_close(averaged.handle.grad_stats().grad_norm, norm.float())


@on_ranks(2)
def test_sums_under_ddp_and_several_engines_in_one_backward(rank: int, world_size: int) -> None:
    tokens, everyone = tokens_of(rank), [own_gradients(tokens_of(other)) for other in range(world_size)]
    model = Words()
    ddp = DistributedDataParallel(model)
    fastsync.register_comm_hook(ddp, op="sum")
    (ddp(tokens) / world_size).backward()
    check(model, everyone)
    first, second = Words(), Words()
    fastsync.attach(first)
    fastsync.attach(second)
    (first(tokens) + second(tokens)).backward()
    for each in (first, second):
        check(each, everyone)


@on_ranks(2)
def test_16_bit_parameters_are_added_in_float32(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        embedding = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        fastsync.attach(embedding)
        factor = torch.tensor([1.0, 2.0**-9][rank], dtype=dtype)  # their sum is 1 in bfloat16
        (embedding(torch.tensor([4])) * factor).sum().backward()
        mean = embedding.weight.grad
        assert mean.dtype == dtype
        assert_bitwise_equal(mean.to_dense()[4], torch.full((WIDTH,), (1 + 2.0**-9) / 2, dtype=dtype))


@on_ranks(2)
def test_wires(rank: int, world_size: int) -> None:
    """16-bit wires carry the values, each rounded once. Other wires leave them as they are."""
    num_bytes = {}
    for wire in ("none", "bf16", "fp16", "int8", "int8+ef", "int4", "lowrank"):
        embedding = nn.Embedding(1000, 16, sparse=True)
        sync = fastsync.attach(embedding, wire)
        generator = torch.Generator().manual_seed(7)
        factors = torch.randn(world_size, 100, 16, generator=generator) * torch.tensor([1e6, 1e-3]).view(2, 1, 1)
        rows = torch.stack([torch.randperm(1000, generator=generator)[:100] for _ in range(world_size)])
        (embedding(rows[rank]) * factors[rank]).sum().backward()
        exact = torch.zeros(1000, 16)
        for theirs, factor in zip(rows, factors, strict=True):
            exact[theirs] += factor / 2
        grad = embedding.weight.grad.to_dense()
        bound = {"bf16": 2.0**-8, "fp16": 2.0**-11}.get(wire, 0.0)
        torch.testing.assert_close(grad, exact, rtol=bound, atol=0)
        assert sync.grad_stats().num_saturated == 0
        check_same_on_all_ranks(grad)
        num_bytes[wire] = sync.stats().wire_bytes
    assert num_bytes["bf16"] == num_bytes["fp16"] < 0.7 * num_bytes["none"]
    assert {num_bytes[wire] for wire in ("int8", "int4", "lowrank")} == {num_bytes["none"]}


@on_ranks(2)
def test_few_rows_travel_as_few_bytes(rank: int, world_size: int) -> None:
    """The statistics count the rows, and tell how they travel."""
    model = nn.Sequential(nn.Embedding(10_000, 16, sparse=True), nn.Linear(16, 1))
    sync = fastsync.attach(model)
    model(torch.arange(20) + rank).sum().backward()
    stats = sync.stats()
    assert [(bucket.is_sparse, bucket.numel) for bucket in stats.buckets] == [(False, 17), (True, 20 * 16)]
    rows = 20 * (16 * 4 + 8)  # values, and each row's number
    assert rows <= stats.buckets[1].wire_bytes < rows + 200
    assert stats.transport == "shared_memory"
    assert [line.partition(":")[0] for line in sync.explain().splitlines()] == [
        "through",
        "bucket 0, 17 values",
        "1 sparse gradient",
    ]


@on_ranks(2)
def test_a_model_of_sparse_parameters_alone(rank: int, world_size: int) -> None:
    """Then side values travel beside rows: piggybacked ones, buffers, and what tells steps apart."""
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True))
    model.register_buffer("mine", torch.full((3,), float(rank)))
    sync = fastsync.attach(model, broadcast_buffers=True, init_sync=False)
    for step in range(3):
        sync.piggyback("rank", torch.tensor([float(rank), step]))
        model.zero_grad()
        model(tokens_of(rank, step)).sum().backward()
        assert sync.piggybacked()["rank"].tolist() == [0.5, step]
        assert model.mine.tolist() == [0.0] * 3
        check_same_on_all_ranks(model[0].weight.grad.to_dense())


@on_ranks(2, cases={"entry_point": ["hook", "attach"]})
def test_ranks_with_the_same_data_are_told(rank: int, world_size: int, entry_point: str) -> None:
    for is_same in (True, False):  # the same values in other rows are other data
        model = average(entry_point, nn.Embedding(ROWS, WIDTH, sparse=True)).model
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(torch.tensor([1, 2]) if is_same else torch.tensor([1, 2 + rank])).sum().backward()
        told = [each for each in said if "have the same gradients in their first step" in str(each.message)]
        assert len(told) == (is_same and rank == 0)


# ---- ranks with different gradients ---------------------------------------------------------------------------------


@on_ranks(2, cases={"entry_point": AVERAGING})
def test_gradients_without_rows(rank: int, world_size: int, entry_point: str) -> None:
    for empty in ([0], [0, 1]):
        model = Words()
        averaged = average(entry_point, model)
        tokens = [tokens_of(other) if other not in empty else tokens_of(other)[:0] for other in range(world_size)]
        averaged.backward(averaged.model(tokens[rank]))
        check(model, [own_gradients(each) for each in tokens])
        assert model.words.weight.grad._nnz() == own_gradients(tokens[1])["words.weight"].coalesce()._nnz()


@on_ranks(2, cases={"entry_point": ["hook", "attach"]})
def test_weights(rank: int, world_size: int, entry_point: str) -> None:
    model = Words()
    averaged = average(entry_point, model)
    for weights in ([1.0, 3.0], [0.0, 2.0], [1e-30, 1e30]):
        averaged.model.zero_grad()
        averaged.handle.set_weight(weights[rank])
        loss = averaged.model(tokens_of(rank))
        averaged.backward(loss * float("nan") if weights[rank] == 0 else loss)
        check(model, [own_gradients(tokens_of(other)) for other in range(world_size)], weights)


# ---- a training loop ------------------------------------------------------------------------------------------------


@on_ranks(2, cases={"entry_point": ["hook", "attach"]})
def test_clipping(rank: int, world_size: int, entry_point: str) -> None:
    """The norm that the engine knows, and that of gradients that were changed: each row counts once."""
    model = Words()
    averaged = average(entry_point, model)

    def dense() -> Tensor:
        return torch.cat([p.grad.to_dense().flatten() for p in model.parameters()])

    for norm_type in (2.0, 1.0, torch.inf):
        averaged.model.zero_grad()
        averaged.backward(averaged.model(tokens_of(rank)))
        known = fastsync.clip_grad_norm_(averaged.handle, 1.0, norm_type=norm_type)
        clipped = dense()
        torch.testing.assert_close(clipped.norm(norm_type), torch.tensor(1.0))
        with averaged.no_sync():
            averaged.model(tokens_of(rank, 1)).backward()
        whole = dense()
        norm = fastsync.clip_grad_norm_(averaged.handle, 1.0, norm_type=norm_type)
        torch.testing.assert_close(norm, whole.norm(norm_type))
        torch.testing.assert_close(dense(), whole / norm)
        assert known > 1


@on_ranks(2)
def test_grad_scaler(rank: int, world_size: int) -> None:
    """A value that is not finite, in a sparse gradient of one rank, skips the step of both."""
    model = Words()
    sync = fastsync.attach(model, "fp16")
    optimizer = SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        before = model.words.weight.detach().clone()
        optimizer.zero_grad()
        loss = model.words(tokens_of(rank, step)).sum() * (factor if rank == 1 else 1.0) + model(None)
        scaler.scale(loss).backward()
        assert (sync.grad_stats().num_nonfinite > 0) == (factor != 1.0)
        scaler.unscale_(optimizer)
        fastsync.clip_grad_norm_(sync, 10.0, optimizer=optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.words.weight) == (factor != 1.0)
        check_same_on_all_ranks(model.words.weight.detach())
    assert scaler.get_scale() == 512.0


@on_ranks(2)
def test_states(rank: int, world_size: int) -> None:
    """Sparse gradients have no residuals, so a fresh state holds none to load into."""
    for compression in ("int8+ef", "lowrank"):
        model = Words()
        sync = fastsync.attach(model, compression)
        states = [sync.state_dict()]
        model(tokens_of(rank)).backward()
        states.append(sync.state_dict())
        for state in states:
            names = [*state["residuals"], *state.get("factors", ())]
            assert not [name for name in names if name.startswith("words")]
        sync.load_state_dict(states[1])
        model.zero_grad()
        model(tokens_of(rank, 1)).backward()
        check_same_on_all_ranks(model.words.weight.grad.to_dense())


@on_ranks(2)
def test_diloco(rank: int, world_size: int) -> None:
    """Between sites weights travel, which are dense."""
    model = Words()
    optimizer = SGD(model.parameters(), lr=0.25)
    with fastsync.DiLoCo(model, optimizer, sync_every=2, compression="none"):
        for step in range(4):
            optimizer.zero_grad()
            model(tokens_of(rank, step)).backward()
            assert model.words.weight.grad.is_sparse
            optimizer.step()
    check_same_on_all_ranks(model.words.weight.detach())


# ---- failures -------------------------------------------------------------------------------------------------------


@on_ranks(2, cases={"place": ["before", "behind"], "shared_memory": [True, False]}, timeout=60)
def test_a_backward_that_fails_on_one_rank(rank: int, world_size: int, place: str) -> None:
    """The other rank gets nan, and waits for nothing: the failing rank does other things meanwhile."""
    model = Words()
    sync = fastsync.attach(model)
    for step in range(3):
        model.zero_grad()
        tokens = tokens_of(rank, step)
        if rank == 1 and step == 1:
            # Autograd goes through the nodes from the newest to the oldest.
            oldest = Fails.apply(torch.zeros(1, requires_grad=True)).sum() if place == "behind" else 0.0
            vectors = model.words(tokens).sum(1)
            loss = model.layer(vectors if place == "behind" else Fails.apply(vectors)).sum() + oldest
            refused(lambda: loss.backward(), "as told", kind=ArithmeticError)
            assert (model.words.weight.grad is not None) == (place == "behind")
        else:
            model(tokens).backward()
        dist.barrier()
        if step != 1:
            check(model, [own_gradients(tokens_of(other, step)) for other in range(world_size)])
        elif rank == 0:
            assert model.words.weight.grad.to_dense().isnan().any()
            assert sync.grad_stats().num_nonfinite > 0


def go_on_without_one(rank: int, world_size: int, port: int) -> dict[str, Tensor]:
    model = Words()
    optimizer = SGD(model.parameters(), lr=0.25)
    sync = fastsync.attach(model)
    store = TCPStore("127.0.0.1", port, is_master=False)
    elastic = fastsync.Elastic(model, optimizer, sync, timeout=20.0, store=store)
    for step in elastic.steps(4):
        with step:
            if rank == 2 and step.index == 2:
                model.layer.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            optimizer.zero_grad()
            model(tokens_of(rank, step.index)).backward()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_lost_rank() -> None:
    """Under Elastic the step runs again without it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(go_on_without_one, 3, store.port, lost=[2])
    model = Words()
    optimizer = SGD(model.parameters(), lr=0.25)
    for step in range(4):
        ranks = range(3 if step < 2 else 2)
        everyone = [own_gradients(tokens_of(each, step), model.state_dict()) for each in ranks]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(grads[name].to_dense() for grads in everyone) / len(ranks)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][name], parameter.detach())
        assert_bitwise_equal(results[0][name], results[1][name])


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_arguments_that_sparse_gradients_do_not_go_with() -> None:
    model = Words()
    refused(lambda: fastsync.attach(model, op="sum"), "op:")
    refused(lambda: fastsync.attach(model, op="mean_of_used"), "op:")
    sync = fastsync.attach(model)  # nothing has remained
    refused(lambda: fastsync.shard_optimizer(sync, SGD(model.parameters(), lr=0.1)), "sync:")


@on_ranks(2, cases={"option": ["sum", "mean_of_used", "optimizer"]})
def test_a_frozen_embedding_goes_with_these_arguments(rank: int, world_size: int, option: str) -> None:
    """Until it is unfrozen, and gets a gradient."""
    model = Words()
    model.words.weight.requires_grad_(False)
    trained = SGD(model.layer.parameters(), lr=0.1)
    sync = fastsync.attach(model, op="mean" if option == "optimizer" else option)
    if option == "optimizer":
        fastsync.shard_optimizer(sync, trained)
    model(tokens_of(rank)).backward()
    everyone = [own_gradients(tokens_of(other))["layer.weight"] for other in range(world_size)]
    factor = 1.0 if option == "sum" else 1 / world_size
    assert_bitwise_equal(sync.averaged_gradients()["layer.weight"], sum(everyone) * factor)
    trained.step()
    model.words.weight.requires_grad_(True)
    refused(lambda: model(tokens_of(rank)).backward(), "words.weight got a sparse gradient,")


@on_ranks(2)
def test_gradients_that_cannot_be_averaged_are_refused(rank: int, world_size: int) -> None:
    """Those of loose parameters, whose modules tell what is sparse, and of a weight that has dense ones as well."""
    message = r"parameter 0 got a sparse gradient.*pass the module.*, or use sparse=False in the embedding"
    for entry_point in ("attach", "synchronize", "all_reduce"):
        model = Words()
        given: Any = list(model.parameters())
        averaged = average(entry_point, given)
        with pytest.raises(ValueError, match=message):
            averaged.backward(model(tokens_of(rank)))
    model = Words()
    model.layer = nn.Linear(WIDTH, ROWS)
    model.layer.weight = model.words.weight
    fastsync.attach(model)
    refused(lambda: model(tokens_of(rank)).backward(), "got a gradient that is not sparse by rows")
    embedding = nn.Embedding(ROWS, WIDTH, sparse=rank == 1)
    refused(lambda: fastsync.attach(embedding), ", sparse gradients")
