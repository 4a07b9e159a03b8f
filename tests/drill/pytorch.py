"""PyTorch's own tests of DDP. What passes without our hook has to pass with it, or to have a reason.

Most of them are written for GPUs. Here they run on CPU ranks: what asks for a GPU gets the CPU.
"""

from __future__ import annotations

import importlib
import tempfile
import unittest
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import fastsync
from tests.drill import pytorchs_own

REASONS = {
    "can only be called once": "the test registers a hook of its own",
    "averaged already": "a model has one hook: the test wraps it in DDP twice",
    "has a communication hook already": "DDP's mixed precision has a hook of its own",
    "test_ddp_grad_div_uneven_inputs": "a hook divides by all ranks, as PyTorch's own hooks do",
    "test_ddp_profiling": "the test counts all-reduces; ranks of one host send none",
}
"""Of a difference: a part of its error, or of its test's name, and why it is none of ours."""
RANKS = {"BACKEND": "gloo", "WORLD_SIZE": "2"}


def on_cpu(asked: Any) -> Any:
    is_gpu = isinstance(asked, int) and not isinstance(asked, bool)
    return torch.device("cpu") if is_gpu or str(asked).startswith("cuda") else asked


def with_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: on_cpu(value) if name == "device" else value for name, value in options.items()}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        return function(*args, **with_cpu(kwargs or {}))


@pytest.fixture(scope="module")
def theirs() -> Iterator[type[unittest.TestCase]]:
    """The class with PyTorch's tests of DDP. Meanwhile torch is changed in this process."""
    with pytest.MonkeyPatch.context() as changed, tempfile.TemporaryDirectory() as folder:
        common: Any = importlib.import_module("torch.testing._internal.common_distributed")
        changed.setattr(common, "skip_if_lt_x_gpu", lambda *_, **__: lambda test: test)
        changed.setattr(common, "skip_if_no_gpu", lambda test: test)
        tests = pytorchs_own.on_cpu(pytorchs_own.import_tests(RANKS | {"TEMP_DIR": folder}, changed), OnCpu)
        tests.has_our_hook = False
        for name in ("set_device", "synchronize", "manual_seed", "empty_cache"):
            changed.setattr(torch.cuda, name, lambda *_, **__: None)
        changed.setattr(torch.cuda, "device_count", lambda: int(RANKS["WORLD_SIZE"]))
        changed.setattr(torch.cuda, "current_device", lambda: 0)
        move, wrap = nn.Module.to, DistributedDataParallel.__init__
        changed.setattr(nn.Module, "to", lambda self, *to, **how: move(self, *map(on_cpu, to), **with_cpu(how)))

        def init(self: DistributedDataParallel, module: nn.Module, **options: Any) -> None:
            wrap(self, module, **{k: v for k, v in options.items() if k not in ("device_ids", "output_device")})
            if tests.has_our_hook:
                fastsync.register_comm_hook(self)

        changed.setattr(DistributedDataParallel, "__init__", init)

        yield tests
        pytorchs_own.end_ranks()


def problem_of(theirs: Any, name: str, has_our_hook: bool) -> str:
    theirs.has_our_hook = has_our_hook
    return pytorchs_own.problem_of(theirs(name))


def test_with_our_hook(theirs: Any, subtests: pytest.Subtests) -> None:
    tests = [each for each in dir(theirs) if each.startswith("test_")]
    for name in [each for each in tests if "ddp" in each.lower() or "DistributedDataParallel" in each]:
        with subtests.test(name):
            without = problem_of(theirs, name, has_our_hook=False)
            pytorchs_own.compare(without, partial(problem_of, theirs, name, True), name, REASONS)
