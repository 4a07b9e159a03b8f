"""PyTorch's own tests of DDP, with our hook and without. What passes without it has to pass with it, or to say why not.

Most of them are written for GPUs. Here they run on CPU ranks: what asks for a GPU gets the CPU.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import unittest
from functools import partial
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from tests.drill.attempts import Attempts

REPEATS = False
REASONS = {
    "can only be called once": "the test registers a hook of its own",
    "averaged already": "a model has one hook: the test wraps it in DDP twice",
    "has a communication hook already": "DDP's mixed precision has a hook of its own",
    "test_ddp_grad_div_uneven_inputs": "a hook divides by all ranks, as PyTorch's own hooks do",
    "test_ddp_profiling": "the test counts all-reduces; ranks of one host send none",
}
"""Of a difference: a part of its error, or of its test's name, and why it is none of ours."""
WITH_HOOK = "FASTSYNC_DRILL_HOOK"
SECONDS = 900.0


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


def tests_on_cpu() -> type[unittest.TestCase]:
    """The class with PyTorch's tests of DDP. Changes torch in this process."""
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common.skip_if_no_gpu = lambda test: test
    theirs: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    changed: Any = torch.cuda
    for name in ("set_device", "synchronize", "manual_seed", "empty_cache"):
        setattr(changed, name, lambda *_, **__: None)
    changed.device_count, changed.current_device = lambda: int(os.environ["WORLD_SIZE"]), lambda: 0
    changed, move, wrap = nn.Module, nn.Module.to, DistributedDataParallel.__init__
    changed.cuda = lambda self, *_: self
    changed.to = lambda self, *to, **options: move(self, *map(on_cpu, to), **with_cpu(options))

    def init(self: DistributedDataParallel, module: nn.Module, **options: Any) -> None:
        wrap(self, module, **{k: v for k, v in options.items() if k not in ("device_ids", "output_device")})
        if os.environ[WITH_HOOK] == "1":
            importlib.import_module("fastsync").register_comm_hook(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    class TestOnCpu(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            torch.set_num_threads(1)
            with OnCpu():
                super()._run(*args, **options)

    return TestOnCpu


if os.environ.get(WITH_HOOK):  # pytest collects it here
    TestOnCpu = tests_on_cpu()


def results(with_hook: bool) -> dict[str, str | None]:
    """By test what its failure says, None where it passed; without those that were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-k", "ddp or DistributedDataParallel", "--timeout=60", f"--junitxml={folder}/report.xml"]
        told = {WITH_HOOK: str(int(with_hook)), "BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": folder}
        command = [sys.executable, "-m", "pytest", *options, "-o", "python_files=pytorch.py", __file__]
        subprocess.run(command, env=os.environ | told, capture_output=True, timeout=SECONDS)
        tests = list(ElementTree.parse(f"{folder}/report.xml").iter("testcase"))
    return {test.attrib["name"]: test.findtext("failure") for test in tests if test.find("skipped") is None}


def compare(name: str, failure: str | None, note: str) -> str:
    assert failure is None, f"{name}: {failure.strip().splitlines()[-1]}"
    return note


def attempts(seed: int, deadline: float) -> Attempts:
    """Of each test that passes without the hook."""
    plain, ours = results(with_hook=False), results(with_hook=True)
    passed = [name for name, failure in plain.items() if failure is None]
    note = f"{len(plain) - len(passed)} more need a GPU, or what is not here"
    for name in passed:
        failure = ours.get(name, "it did not run")
        if reason := next((why for part, why in REASONS.items() if failure and part in failure + name), None):
            yield f"differs: {reason}", partial(compare, name, None, "")
        else:
            yield "passes as without our hook", partial(compare, name, failure, note)
