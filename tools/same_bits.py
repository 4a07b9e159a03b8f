"""Does this build give bitwise what that one gave? Random cases, run on both; needs the public interface alone.

    python -m tools.same_bits OLD NEW --cases 500 --seed 0

OLD and NEW are checkouts with a built ``.venv`` each. A case is one model on 1 to 4 Gloo ranks. Compared are each
gradient and statistic, on every rank and after every step, and at the end the state for checkpoints, bit for bit. Every
nan counts as the same one. The exit status is 0 if all is equal and nothing has raised.

With three and more ranks Gloo adds in an order that depends on the length of the buffer: a build that sends
more or less beside the gradients rounds otherwise, and is right. Half of such cases have multiples of 12, whose means
are exact in every wire. The others say so by ``gloo_rounds=True``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync

SHAPES = [(1,), (3,), (8,), (127,), (128,), (129,), (7, 40), (40, 7), (300,), (5, 3, 11), (1025,), (64, 65), (777, 333)]
EXPONENTS = {"exact": (-4, 5), "ordinary": (0, 1), "special": (0, 1), "wide": (-30, 31), "tiny": (-149, -119)}
"""Bounds of the powers of two that values are multiplied with. Of special ones some are inf or nan."""
CASE_SECONDS = 60  # that a rank waits for the others

Bits = dict[str, str]  # what a case gave on one rank: a hash by what it is of
MISSING: Bits = {"error": "no result: this case or one before has raised, died or taken too long"}


class Case(SimpleNamespace):
    """What one model does. Everything follows from the seed and the number."""

    def __init__(self, seed: int, number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        self.seed, self.number = rng.randrange(2**31), number
        self.world_size = rng.choice([1, 2, 2, 2, 3, 3, 4, 4])
        self.entry_point = rng.choice(["hook", "attach", "attach without overlap", "one call"])
        self.compression = _draw_compression(rng, self.world_size)
        gloo_adds = self.world_size > 2 and self.compression.get("reduce") != "fp32"
        self.values = "exact" if gloo_adds and rng.random() < 0.5 else rng.choice(list(EXPONENTS))
        self.gloo_rounds = gloo_adds and self.values != "exact"
        self.shapes = rng.choices(SHAPES, k=rng.randint(1, 9))
        self.dtype = rng.choice(["float32", "float32", "float64", "float16", "bfloat16"])
        self.bucket_cap_mb = rng.choice([2.0**-10, 2.0**-8, 0.5, 25.0])
        self.skips_parameters, self.accumulates = rng.random() < 0.3, rng.random() < 0.3


def _draw_compression(rng: random.Random, world_size: int) -> dict[str, Any]:
    """Arguments of a ``fastsync.Compression``."""
    wire = rng.choice(["none", "bf16", "fp16", "int8", "int8"])
    if wire != "int8" and rng.random() < 0.4:
        return {"wire": wire}
    chosen = {"wire": wire, "reduce": "fp32", "error_feedback": wire != "none" and rng.random() < 0.5}
    per_node = rng.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    if per_node > 1:
        chosen["ranks_per_node"] = per_node
    elif algorithm := rng.choice([None, "one_shot", "two_shot"]):
        chosen["algorithm"] = algorithm
    return chosen


class Given(nn.Module):
    """A model whose gradients are the tensors that it is called with; None stands for a parameter that is not used."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        zeros = [torch.zeros(shape, dtype=getattr(torch, case.dtype)) for shape in case.shapes]
        # Matrices lie in memory as their transposes.
        self.weights = nn.ParameterList(nn.Parameter(zero.t() if zero.dim() == 2 else zero) for zero in zeros)

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        products = [weight * grad for weight, grad in zip(self.weights, grads, strict=True) if grad is not None]
        return torch.stack([product.double().sum() for product in products]).sum()


def random_grads(case: Case, model: Given, rng: random.Random) -> list[Tensor | None]:
    """This rank's, for one backward. At least one parameter gets one."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    num_used = rng.randint(1, len(model.weights)) if case.skips_parameters else len(model.weights)
    used = rng.sample(range(len(model.weights)), num_used)
    return [_values(case.values, w, generator) if i in used else None for i, w in enumerate(model.weights)]


def _values(kind: str, like: Tensor, generator: torch.Generator) -> Tensor:
    exponents = torch.randint(*EXPONENTS[kind], like.shape, generator=generator)
    drawn = torch.ldexp(torch.randn(like.shape, generator=generator, dtype=torch.float64), exponents)
    if kind == "exact":
        drawn = 12.0 * exponents.double()
    if kind == "special":
        drawn.view(-1)[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")][: drawn.numel()])
    return drawn.to(like.dtype)


def run_case(case: Case, rank: int) -> Iterator[tuple[str, Tensor | None]]:
    """Everything that has to be the same, by name."""
    rng = random.Random(f"{case.seed}/{rank}")
    shared = random.Random(case.seed)  # what all ranks have to do alike
    compression, cap = fastsync.Compression(**case.compression), case.bucket_cap_mb
    model = called = Given(case)
    handle: Any = None
    if case.entry_point == "hook":
        called = DistributedDataParallel(model, bucket_cap_mb=cap, find_unused_parameters=case.skips_parameters)
        handle = fastsync.register_comm_hook(called, compression)
    elif case.entry_point != "one call":
        handle = fastsync.attach(model, compression, bucket_cap_mb=cap, overlap=case.entry_point == "attach")
    # The others average what has been accumulated once they are told to.
    no_sync = {"hook": called, "attach": handle}.get(case.entry_point)
    for step in range(4):
        model.zero_grad(set_to_none=shared.random() < 0.5)
        for _ in range(shared.randint(0, 2) if case.accumulates else 0):
            with no_sync.no_sync() if no_sync else nullcontext():
                called(random_grads(case, model, rng)).backward()
        called(random_grads(case, model, rng)).backward()
        if case.entry_point == "attach without overlap":
            handle.synchronize()
        stats = handle.grad_stats() if handle else fastsync.all_reduce_gradients(model, compression)
        for name, parameter in model.named_parameters():
            yield f"step {step}, gradient of {name}", parameter.grad
        for name in ("grad_norm", "num_nonfinite", "num_saturated"):
            yield f"step {step}, {name}", getattr(stats, name)
    if handle is not None:
        yield from _leaves("state_dict", handle.state_dict())
    if case.entry_point.startswith("attach"):
        handle.detach()


def _leaves(name: str, state: object) -> Iterator[tuple[str, Tensor | None]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(f"{name}[{key!r}]", value)
    else:
        yield name, torch.tensor(state) if isinstance(state, int | float) else state


def hash_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    values = tensor.detach()
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
    data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + data).hexdigest()[:16]


def rank_main(rank: int, world_size: int, folder: str, seed: int, numbers: Sequence[int]) -> None:
    """Runs these cases as one rank of a checkout, and writes a line for each. Ends with the first that raises."""
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", world_size), timedelta(seconds=CASE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    with Path(folder, str(rank)).open("w", buffering=1) as lines:
        for number in numbers:
            try:
                bits = {name: hash_of(tensor) for name, tensor in run_case(Case(seed, number), rank)}
            except Exception as error:
                bits = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps([number, bits]) + "\n")
            if "error" in bits:
                os._exit(0)  # the other ranks may be stuck, and destructors would wait for them
            gc.collect()  # DDP is part of reference cycles
    dist.destroy_process_group()


def run_all(checkout: Path, seed: int, numbers: Iterable[int]) -> dict[int, list[Bits]]:
    """What each case gave on each rank of a checkout. After one that raises those of as many ranks are left out."""
    # DDP warns of a backward that leaves no parameter out.
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [str(checkout / ".venv/bin/python"), __file__, "--as-rank"]
    done: dict[int, list[Bits]] = {}
    for world_size in range(1, 5):
        batch = [number for number in numbers if Case(seed, number).world_size == world_size]
        with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
            arguments = [json.dumps([rank, world_size, folder, seed, batch]) for rank in range(world_size)]
            for process in [subprocess.Popen([*command, each], cwd=checkout, env=environment) for each in arguments]:
                process.wait()
            files = [Path(folder, str(rank)) for rank in range(world_size)]
            results = [dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {} for file in files]
        done |= {number: [of_rank.get(number, MISSING) for of_rank in results] for number in batch}
        print(f"same_bits: {checkout}: the cases of {world_size} ranks have run", flush=True)
    return done


def difference(old: Sequence[Bits], new: Sequence[Bits]) -> str | None:
    """The first thing that is not the same, or went wrong, and on which rank; None where all is equal."""
    for rank, (was, is_) in enumerate(zip(old, new, strict=True)):
        for name in ("error", *was, *is_):
            if (name == "error" and name in was | is_) or was.get(name) != is_.get(name):
                return f"rank {rank}, {name}: {was.get(name, 'absent')} became {is_.get(name, 'absent')}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.same_bits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs=2, metavar="CHECKOUT", help="with a built .venv: old, then new")
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="from which all cases follow")
    parser.add_argument("--case", type=int, metavar="N", help="only the one of that number")
    options = parser.parse_args()
    numbers = range(options.cases) if options.case is None else [options.case]
    old, new = (run_all(checkout.resolve(), options.seed, numbers) for checkout in options.checkouts)
    different = {number: what for number in numbers if (what := difference(old[number], new[number])) is not None}
    for number, what in different.items():
        print(f"{Case(options.seed, number)}\n  {what}\n  again: --seed {options.seed} --case {number}")
    num_rounded = sum(Case(options.seed, number).gloo_rounds for number in different)
    print(f"same_bits: {len(different)} of {len(numbers)} cases differ, {num_rounded} of them where Gloo rounds")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        rank_main(*json.loads(sys.argv[2]))
    else:
        sys.exit(main())
