"""What attach computes: the gradients that one process would have had for all samples, on every rank the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import reference
from tests.models import (
    SMALL_BUCKETS,
    Given,
    Mlp,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    batch,
    grads_of,
    random_grads,
)
from tests.ranks import run_ranks

WIRES = ["none", "bf16", "fp16"]
WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(7, 33), (5,), (300,), (), (2, 3, 4), (1,)]


def _synced(model: Given, grads: list[Tensor | None]) -> list[Tensor]:
    model.zero_grad()
    model(grads).backward()
    return [grad.clone() for grad in grads_of(model)]


# ---- against DDP ------------------------------------------------------------------------------------------------


def _trains_like_ddp(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)  # attach and DDP both begin with rank 0's parameters
    model = Mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS)
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(20):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(batch(rank, step)).square().mean().backward()
            optimizer.step()
        if world_size == 2:  # more summands than two are added in an order that depends on the place in the bucket
            assert_all_bitwise_equal(grads_of(model), grads_of(plain), f"step {step}, gradient")
            assert_all_bitwise_equal(list(model.parameters()), list(plain.parameters()), f"step {step}, parameter")
        assert_same_on_all_ranks([*grads_of(model), *model.parameters()])
    assert len(sync.stats().buckets) >= 3
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_is_as_with_ddp(world_size: int) -> None:
    run_ranks(_trains_like_ddp, world_size)


# ---- against one process ----------------------------------------------------------------------------------------


class TiedTransformer(nn.Module):
    """A language model of one transformer block, whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.block = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs[:, :8].abs().mul(5).long().clamp(max=16)
        return self.head(self.block(self.embedding(tokens)))


class Branches(nn.Module):
    """Takes one of two branches by step, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += 1
        return self.branches[self.step % 2](inputs)


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, bias=False),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "conv net": _conv_net,
    "transformer with a shared weight": TiedTransformer,
    "unused branches": Branches,
}


def _like_one_process(rank: int, world_size: int) -> None:
    for name, build in MODELS.items():
        torch.manual_seed(3)
        _assert_like_one_process(rank, world_size, name, build().double())


def _assert_like_one_process(rank: int, world_size: int, name: str, model: nn.Module) -> None:
    alone = copy.deepcopy(model)
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (alone, model)]
    for step in range(20):
        samples = [batch(other, step, dtype=torch.float64) for other in range(world_size)]
        for each, inputs, optimizer in zip(
            (alone, model), (torch.cat(samples), samples[rank]), optimizers, strict=True
        ):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()
        for (parameter_name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"{name}, step {step}: {parameter_name}"
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        assert_same_on_all_ranks([*grads_of(model), *model.parameters()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_have_the_gradients_of_one_process(world_size: int) -> None:
    run_ranks(_like_one_process, world_size)


def _exact(rank: int, world_size: int) -> None:
    # Whole numbers, and a world size that is a power of two: every sum and mean is exact, at any width.
    grads = [[torch.full(shape, float(4 * r + i)) for i, shape in enumerate(SHAPES)] for r in range(world_size)]
    expected = [torch.stack(same).mean(dim=0) for same in zip(*grads, strict=True)]
    for wire in WIRES:
        for cap in (SMALL_BUCKETS, 25):
            model = Given(grads[0])
            sync = fastsync.attach(model, wire, bucket_cap_mb=cap)
            for step in range(3):
                assert_all_bitwise_equal(_synced(model, grads[rank]), expected, f"{wire}, {cap} MiB, step {step}")
            assert sync.grad_stats().num_saturated == 0
            norm = torch.cat([grad.flatten() for grad in expected]).norm()
            torch.testing.assert_close(sync.grad_stats().grad_norm, norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_exact_where_floats_are(world_size: int) -> None:
    run_ranks(_exact, world_size)


# ---- against the specification ----------------------------------------------------------------------------------


def _like_the_reference(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            grads = [random_grads(r, 0, SHAPES, dtype) for r in range(world_size)]
            model = Given(grads[0])
            fastsync.attach(model, wire)
            expected = reference.all_reduce_mean(grads, WIRE_DTYPES[wire])
            assert_all_bitwise_equal(_synced(model, grads[rank]), expected, f"{dtype} over {wire}")


def test_bitwise_the_reference() -> None:
    run_ranks(_like_the_reference, 2, shared_memory=False)


def _fp16_example(rank: int, world_size: int) -> None:
    mine = torch.tensor([[1e5, 1.2e5], [-5e4, 0.0]][rank])
    model = Given([mine])
    sync = fastsync.attach(model, "fp16")
    assert _synced(model, [mine])[0].tolist() == [24992.0, 60000.0]
    assert sync.grad_stats().num_nonfinite == 0


def test_fp16_does_not_overflow() -> None:
    run_ranks(_fp16_example, 2)


def _scales_follow_as_in_the_hook(rank: int, world_size: int) -> None:
    """Over steps whose magnitudes change a lot, attach and the hook give the same bits and keep the same scales."""
    like = random_grads(0, 0, SHAPES, torch.float32)
    model, ddp = Given(like), DistributedDataParallel(Given(like))
    sync, hook = fastsync.attach(model, "fp16"), fastsync.register_comm_hook(ddp, "fp16")
    for step, factor in enumerate((1.0, 1.0, 1e4, 1e-3, 1e-3, 1e-6, 0.0, 1.0, 1e9)):
        mine = [grad * factor for grad in random_grads(rank, step, SHAPES, torch.float32)]
        ddp.zero_grad()
        ddp(mine).backward()
        actual = _synced(model, mine)
        if step < 2:  # DDP regroups its buckets after the first, which start anew
            sync.load_state_dict(hook.state_dict())
            continue
        assert_all_bitwise_equal(actual, grads_of(ddp), f"step {step}")
        assert sync.state_dict() == hook.state_dict()
        assert torch.equal(sync.grad_stats().num_saturated, hook.grad_stats().num_saturated)


def test_fp16_scales_follow_as_in_the_hook() -> None:
    run_ranks(_scales_follow_as_in_the_hook, 2)


# ---- kinds of parameters ----------------------------------------------------------------------------------------


def _mixed_dtypes(rank: int, world_size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
    grads = [[torch.full((40, i + 1), r + 1.0).to(dtype) for i, dtype in enumerate(dtypes * 2)] for r in range(2)]
    model = Given(grads[0])
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        expected = [torch.full_like(grad, 1.5) for grad in grads[0]]
        assert_all_bitwise_equal(_synced(model, grads[rank]), expected, f"step {step}")
    assert len(sync.stats().buckets) >= 5, "a bucket holds one dtype"


def test_several_dtypes_in_one_model() -> None:
    run_ranks(_mixed_dtypes, 2)


def _memory_layouts(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    shape = (8, 5, 4, 3)  # as many as fill a bucket of its own
    weight = nn.Parameter(torch.zeros(shape).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.zeros(6, 4).t())
    sync = fastsync.attach([transposed, weight], overlap=False, bucket_cap_mb=SMALL_BUCKETS)
    mine = [torch.randint(-8, 8, shape).float(), torch.randint(-8, 8, (4, 6)).float()]
    given = [
        lambda g: g.clone(),
        lambda g: g.to(memory_format=torch.channels_last) if g.dim() == 4 else g.t().contiguous().t(),
        lambda g: torch.stack([g, g], dim=-1)[..., 0],  # every other element of a larger block
        lambda g: g.flatten()[:1].expand(g.shape),  # one element under all indices
    ]
    for step, layout in enumerate(given):
        expected = []
        for parameter, grad in zip((weight, transposed), mine, strict=True):
            parameter.grad = layout(grad)
            total = parameter.grad.clone()
            torch.distributed.all_reduce(total)
            expected.append(total / world_size)
        sync.synchronize()
        for parameter, mean in zip((weight, transposed), expected, strict=True):
            assert torch.equal(parameter.grad, mean), f"layout {step}"
    assert [bucket.numel for bucket in sync.stats().buckets] == [weight.numel(), transposed.numel()]


def test_gradients_of_any_memory_layout() -> None:
    run_ranks(_memory_layouts, 2)


def _odd_gradients(rank: int, world_size: int) -> None:
    # Two gradients in one memory, each in a bucket of its own.
    first, second, small = (nn.Parameter(torch.zeros(shape)) for shape in ((20, 20), (400,), (3,)))
    sync = fastsync.attach([first, second, small], bucket_cap_mb=SMALL_BUCKETS)
    for _ in range(3):
        for parameter in (first, second, small):
            parameter.grad = None
        loss = (small * (rank + 1)).sum()
        (loss + ((first.view(-1) + second.view(400)) * (rank + 1)).sum()).backward()
        assert first.grad.data_ptr() == second.grad.data_ptr(), "they do not share memory: nothing is shown"
        for parameter in (first, second, small):
            assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
    assert len(sync.stats().buckets) == 3

    # A gradient with the conjugate bit.
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    fastsync.attach([weight])
    (weight.conj() * torch.tensor(1.0 + 2.0j * (rank + 1))).real.sum().backward()
    assert torch.equal(weight.grad.resolve_conj(), torch.full((3,), 1.0 + 3.0j))

    # Gradients of another dtype than their parameter's, of which one is missing on one rank.
    weights = [nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = torch.float32
    fastsync.attach(weights)
    for step in range(2):
        for weight in weights:
            weight.grad = None
        loss = weights[0].float().sum() * (rank + 1)
        if rank == 0 or step == 0:
            loss = loss + weights[1].float().sum() * (rank + 1)
        loss.backward()
        assert weights[0].grad.unique().tolist() == [1.5]
        assert weights[1].grad.unique().tolist() == [1.5 if step == 0 else 0.5]


def test_gradients_that_share_memory_or_have_another_type() -> None:
    run_ranks(_odd_gradients, 2)


def _empty_and_scalar(rank: int, world_size: int) -> None:
    model = Given([torch.tensor(1.0), torch.zeros(0), torch.ones(3)])
    sync = fastsync.attach(model)
    _synced(model, [torch.tensor(float(rank)), torch.zeros(0), torch.full((3,), 2.0 * rank)])
    assert model.weights[0].grad == 0.5
    assert model.weights[1].grad.numel() == 0
    assert torch.equal(model.weights[2].grad, torch.ones(3))
    assert sync.stats().numel == 4


def test_scalars_and_empty_parameters() -> None:
    run_ranks(_empty_and_scalar, 2)


# ---- buckets ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Layers used in the order of their sizes, whatever the order in which they were registered."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({str(size): nn.Parameter(torch.ones(size * 256)) for size in order})

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs
        for size in sorted(self.scales, key=int):
            total = total * (self.scales[size].sum() / self.scales[size].numel())
        return total


def _buckets_follow_the_first_backward(rank: int, world_size: int) -> None:
    model = Chain([2, 4, 1, 3])
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)  # 256 elements
    for _ in range(2):
        model(torch.ones(())).backward()
        assert [bucket.numel for bucket in sync.stats().buckets] == [4 * 256, 3 * 256, 2 * 256, 256]


def test_buckets_follow_the_first_backward() -> None:
    run_ranks(_buckets_follow_the_first_backward, 2)


def _sends_while_backward_goes_on(rank: int, world_size: int) -> None:
    model = Chain([1, 2, 3])
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    model(torch.ones(())).backward()
    with torch.profiler.profile() as profile:
        model(torch.ones(())).backward()
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    ours = [name for name in names if name.startswith("fastsync::")]
    assert ours == ["fastsync::pack"] * 3 + ["fastsync::wait", "fastsync::unpack"] * 3
    last_multiply = max(index for index, name in enumerate(names) if "MulBackward" in name)
    assert names.index("fastsync::pack") < last_multiply, "nothing was sent before backward was over"


def test_buckets_are_sent_while_backward_goes_on() -> None:
    run_ranks(_sends_while_backward_goes_on, 2)


def _overflow_arrives(rank: int, world_size: int) -> None:
    mine = [torch.ones(3), torch.tensor([1.0, float("inf") if rank == 0 else 1.0]), torch.full((2,), float("nan"))]
    for wire in WIRES:
        model = Given(mine)
        sync = fastsync.attach(model, wire)
        finite, infinite, nan = _synced(model, mine)
        assert torch.equal(finite, torch.ones(3))
        assert infinite[0] == 1
        assert not infinite[1].isfinite()
        assert nan.isnan().all()
        assert sync.grad_stats().num_nonfinite == 3


def test_inf_and_nan_reach_every_rank() -> None:
    run_ranks(_overflow_arrives, 2)


def _loss_scaler_skips_everywhere(rank: int, world_size: int) -> None:
    for wire in WIRES:
        _assert_loss_scaler_skips(rank, wire)


def _assert_loss_scaler_skips(rank: int, wire: str) -> None:
    model = nn.Linear(4, 1)
    fastsync.attach(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1))
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert unchanged == (step == 2), f"step {step}"
        assert_same_on_all_ranks(list(model.parameters()))
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9]


def test_a_grad_scaler_skips_the_same_step_everywhere() -> None:
    run_ranks(_loss_scaler_skips_everywhere, 2)


def _sends_a_small_bucket_first(rank: int, world_size: int) -> None:
    mib = 2**20
    floats = [nn.Parameter(torch.ones(mib // 4)) for _ in range(4)]
    doubles = [nn.Parameter(torch.ones(mib // 8, dtype=torch.float64)) for _ in range(2)]
    sync = fastsync.attach([*floats, *doubles], fastsync.Compression("int8", error_feedback=True), bucket_cap_mb=2)
    for step in range(3):
        for parameter in (*floats, *doubles):
            parameter.grad = None
        sync.piggyback("step", torch.tensor(float(step + rank)))
        sum((parameter * (1.0 + rank)).sum() for parameter in (*floats, *doubles)).backward()  # type: ignore[union-attr]
        assert sync.piggybacked()["step"].item() == step + 0.5
        for parameter in (*floats, *doubles):
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1.5))
    first, *others = [bucket.numel for bucket in sync.stats().buckets]
    assert first in (mib // 4, mib // 8)
    assert first + sum(others) == mib + mib // 4
    assert mib // 2 in others, "the others are as large as was asked for"


def test_the_first_of_several_buckets_is_small() -> None:
    run_ranks(_sends_a_small_bucket_first, 2)


# ---- what every rank gets from rank 0 -----------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def _of_every_dtype(rank: int) -> nn.Module:
    model = nn.Linear(2, 2)
    for index, dtype in enumerate(DTYPES):
        values = torch.full((3, 2), (rank + index) % 2 + 1, dtype=torch.uint8).to(torch.float32)
        frozen = values.t() if index % 2 else values  # contiguous or not
        model.register_parameter(f"frozen_{index}", nn.Parameter(frozen.to(dtype), requires_grad=False))
        model.register_buffer(f"buffer_{index}", values.to(dtype))
        model.register_buffer(f"scalar_{index}", values[0, 0].to(dtype))
    return model


def _bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def _rank_0s_are_everybodys(rank: int, world_size: int) -> None:
    model, expected = _of_every_dtype(rank), _of_every_dtype(0)
    fastsync.attach(model)
    for name, tensor in expected.state_dict().items():
        if name not in ("weight", "bias"):
            assert _bytes(model.state_dict()[name]) == _bytes(tensor), f"rank {rank}: {name}"
    fastsync.check_consistency(model)

    loose = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), rank), requires_grad=False)]
    fastsync.attach(loose)
    assert loose[1].tolist() == [0, 0]

    model = nn.Linear(2, 2)
    model.register_parameter("table", nn.Parameter(torch.zeros(2 + rank, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match=r"rank 0: parameter table of shape \[2\], .*torch.int64; rank 1: .*\[3\]"):
        fastsync.attach(model)


def test_rank_0s_parameters_and_buffers_are_everybodys_whatever_their_dtype() -> None:
    run_ranks(_rank_0s_are_everybodys, 2)
