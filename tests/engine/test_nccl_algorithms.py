"""Every wire and every algorithm, through both doors, for several steps: on NCCL ranks as on Gloo's.

The bodies are the same for both, so that what runs on a CPU proves the tests that need a GPU. What the ranks add up
themselves, in rank order, is compared bit by bit with a bucket's way worked out on the CPU by ``fastsync.reference``,
what they keep for the next step included. What an all_reduce adds is only as exact as its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression, reference
from fastsync.compression import Algorithm, Wire
from tests.models import Given, assert_all_bitwise_equal, assert_same_on_all_ranks, grads_of, random_grads
from tests.ranks import run_ranks

SHAPES = [(7, 33), (300,), (1,), (2, 3, 4), (513, 17)]
STEPS = 4
WIRES: list[Wire] = ["none", "bf16", "fp16", "int8"]
ALGORITHMS: list[Algorithm] = ["one_shot", "two_shot"]
DTYPE_OF = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}
# A sum of n values takes n - 1 additions, each off by at most this part of the magnitudes (docs/design.md, Numerics);
# a value has been rounded once before, and its product with 1/n once.
UNIT = {"none": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
on_a_cpu = pytest.param("cpu", id="gloo")
on_a_gpu = pytest.param("cuda", id="nccl", marks=pytest.mark.gpu)
on_both = pytest.mark.parametrize("device", [on_a_cpu, on_a_gpu])
on_1_2_and_4_ranks = pytest.mark.parametrize("world_size", [1, 2, 4])


def start(function: Callable[..., Any], world_size: int, device: str, *args: Any) -> list[Any]:
    backend = "gloo" if device == "cpu" else "nccl"
    return run_ranks(function, world_size, device, *args, backend=backend, timeout=140, shared_memory=False)


# ---- doors ----------------------------------------------------------------------------------------------------------


def hooked(like: Sequence[Tensor], compression: Compression) -> nn.Module:
    ddp = DistributedDataParallel(Given(like))
    fastsync.register_comm_hook(ddp, compression)
    return ddp


def attached(like: Sequence[Tensor], compression: Compression) -> nn.Module:
    model = Given(like)
    fastsync.attach(model, compression)
    return model


DOORS = {"hook": hooked, "attach": attached}


def gradients(rank: int, step: int) -> list[Tensor]:
    """None is so small that float16 has only a subnormal for it, so that a bucket's scale cannot be seen."""
    return [grad + grad.sign() / 64 for grad in random_grads(rank, step, SHAPES, torch.float32)]


def of_all_ranks(world_size: int, step: int) -> list[list[Tensor]]:
    return [gradients(rank, step) for rank in range(world_size)]


def averaged(model: nn.Module, grads: Sequence[Tensor], device: str) -> list[Tensor]:
    """One step. Every rank has the same afterwards."""
    model.zero_grad()
    model([grad.to(device) for grad in grads]).backward()
    result = [grad.clone() for grad in grads_of(model)]
    assert_same_on_all_ranks(result)
    return result


def doors(compression: Compression, device: str) -> dict[str, nn.Module]:
    like = [grad.to(device) for grad in gradients(0, 0)]
    return {name: door(like, compression) for name, door in DOORS.items()}


# ---- added by the ranks, in rank order: the reference's bits --------------------------------------------------------


def _as_the_reference(rank: int, world_size: int, device: str) -> None:
    for wire in WIRES:
        for algorithm in ALGORITHMS:
            compression = Compression(wire, reduce="fp32", algorithm=algorithm)
            models = doors(compression, device)
            for step in range(STEPS):
                everyone = of_all_ranks(world_size, step)
                mean = reference.all_reduce_mean(everyone, DTYPE_OF[wire], reduce="fp32", algorithm=algorithm)
                for name, model in models.items():
                    what = f"{compression}, {name}: step {step}, gradient"
                    assert_all_bitwise_equal(averaged(model, everyone[rank], device), mean, what)


@on_both
@on_1_2_and_4_ranks
def test_sums_by_the_ranks_are_the_references(world_size: int, device: str) -> None:
    start(_as_the_reference, world_size, device)


def _two_levels(rank: int, world_size: int, device: str) -> None:
    for wire in WIRES:
        compression = Compression(wire, ranks_per_node=2)
        models = doors(compression, device)
        for step in range(STEPS):
            everyone = of_all_ranks(world_size, step)
            mean = reference.two_level_mean(everyone, 2, DTYPE_OF[wire])
            for name, model in models.items():
                what = f"{compression}, {name}: step {step}, gradient"
                assert_all_bitwise_equal(averaged(model, everyone[rank], device), mean, what)


@on_both
def test_two_levels_are_the_references(device: str) -> None:
    start(_two_levels, 4, device)


# ---- added by the process group -------------------------------------------------------------------------------------


def bound(everyone: Sequence[Sequence[Tensor]], index: int, wire: Wire) -> Tensor:
    """How far an all_reduce's mean may be from the true one, in any order of its additions."""
    world_size = len(everyone)
    magnitude = torch.stack([grads[index].double().abs() for grads in everyone]).mean(dim=0)
    return magnitude * ((1 + UNIT[wire]) ** (world_size + 1) - 1)


def _all_reduce(rank: int, world_size: int, device: str) -> None:
    for wire in ("none", "bf16", "fp16"):
        models = doors(Compression(wire), device)
        for step in range(STEPS):
            everyone = of_all_ranks(world_size, step)
            exact = [torch.stack(grads).double().mean(dim=0) for grads in zip(*everyone, strict=True)]
            mean = reference.all_reduce_mean(everyone, DTYPE_OF[wire])
            for name, model in models.items():
                what = f"{wire}, {name}: step {step}, gradient"
                got = averaged(model, everyone[rank], device)
                if world_size <= 2:  # one addition, which has no order
                    assert_all_bitwise_equal(got, mean, what)
                for index, (actual, true) in enumerate(zip(got, exact, strict=True)):
                    error = (actual.cpu().double() - true).abs()
                    assert (error <= bound(everyone, index, wire)).all(), f"{what} {index} is off by {error.max()}"


@on_both
@on_1_2_and_4_ranks
def test_sums_by_the_process_group_are_as_exact_as_their_dtype(world_size: int, device: str) -> None:
    start(_all_reduce, world_size, device)


# ---- with memory of what was lost, and by chance --------------------------------------------------------------------


FEEDBACK = [
    Compression(wire, reduce="fp32", algorithm=algorithm, error_feedback=True)
    for wire in WIRES
    if wire != "none"
    for algorithm in ALGORITHMS
]
CHANCE = [
    Compression("int8", rounding="stochastic", algorithm=algorithm, error_feedback=feedback)
    for algorithm in ALGORITHMS
    for feedback in (False, True)
]
BETWEEN_NODES = [
    Compression(wire, ranks_per_node=2, error_feedback=True, rounding=rounding)
    for wire, rounding in (("bf16", "nearest"), ("fp16", "nearest"), ("int8", "nearest"), ("int8", "stochastic"))
]


def _every_step(rank: int, world_size: int, device: str, compressions: Sequence[Compression]) -> list[list[Tensor]]:
    """What each of them gives in each step through each door, on the CPU."""
    results = []
    for compression in compressions:
        for model in doors(compression, device).values():
            for step in range(STEPS):
                got = averaged(model, gradients(rank, step), device)
                results.append([grad.cpu() for grad in got])
    return results


def check_against_the_cpu(world_size: int, device: str, compressions: Sequence[Compression]) -> None:
    """Gloo's ranks are the CPU's result; those of ``device`` must give its bits, and on a CPU the mean."""
    expected, *_ = start(_every_step, world_size, "cpu", compressions)
    if device == "cuda":
        actual, *_ = start(_every_step, world_size, device, compressions)
        for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            compression = compressions[index // (len(DOORS) * STEPS)]
            assert_all_bitwise_equal(got, wanted, f"{compression}, result {index}: gradient")
    for index, got in enumerate(expected):
        true = torch.stack([flat(grads) for grads in of_all_ranks(world_size, index % STEPS)]).mean(dim=0)
        assert (flat(got) - true).norm() <= 0.05 * true.norm()


def flat(grads: Sequence[Tensor]) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in grads])


@on_both
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("compressions", [FEEDBACK, CHANCE], ids=["error feedback", "stochastic"])
def test_what_depends_on_the_steps_before_is_the_cpus(
    compressions: Sequence[Compression], world_size: int, device: str
) -> None:
    check_against_the_cpu(world_size, device, compressions)


@on_both
def test_two_levels_that_depend_on_the_steps_before_are_the_cpus(device: str) -> None:
    check_against_the_cpu(4, device, BETWEEN_NODES)
