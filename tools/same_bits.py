"""Does this build give bitwise what that one gave? Random cases, run on both; needs the public interface alone.

    python -m tools.same_bits OLD NEW --cases 500 --seed 0
    python -m tools.same_bits OLD NEW --seed 0 --case 17

OLD and NEW are checkouts with a built ``.venv`` each. A case is one model on 1 to 4 Gloo ranks: an entry point, a
compression, shapes, dtypes, values, and some steps. Compared are, on every rank and after every step, each gradient,
piggybacked value and statistic, and at the end the state for checkpoints, bit for bit. Every nan counts as the same
one, for whose payload a sum keeps depends on the order of its operands. Errors have to be the same too. The exit status
is 0 if all is equal.

The order in which Gloo's all-reduce adds the values of three and more ranks depends on the length of the buffer: a
build that sends more or less beside a bucket's gradients rounds otherwise, and is right. So half of the cases of that
kind have multiples of 12, whose means and sums are exact in every wire: if one of these differs, something is wrong.
The others say so by ``gloo_rounds=True``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync

SHAPES = [(1,), (3,), (8,), (127,), (128,), (129,), (7, 40), (40, 7), (300,), (1,), (5, 3, 11), (1025,), (64, 65)]
LARGE_SHAPES = [(600_001,), (777, 333), (2**18,)]  # more than one piece of a bucket
EXPONENTS = {"ordinary": (0, 0), "wide": (-30, 30), "tiny": (-149, -120), "huge": (100, 127)}
"""Binary ones, that the values of a gradient are multiplied with."""
DTYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16", "mixed"]
TORCH_HOOKS = {"none": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
ENTRY_POINTS = ("hook", "hook", "torch hook", "attach", "attach", "attach without overlap", "one call")
CASE_SECONDS = 60
"""How long a rank waits for the others in a case."""

Bits = dict[str, str]
"""What a case gave on one rank: a hash by what it is of."""


@dataclass(frozen=True)
class Case:
    """What one model does. Everything follows from the seed and the number."""

    number: int
    seed: int
    world_size: int
    entry_point: str
    compressions: list[dict[str, Any]]
    """Of the first half of the steps, and of the second."""
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    bucket_cap_mb: float
    num_steps: int
    values: str
    gloo_rounds: bool
    """Whether bits depend on the order in which Gloo adds."""
    num_special: int
    """How many values of a gradient, at most, are inf or nan."""
    skips_parameters: bool
    accumulates: bool
    piggybacks: bool
    freezes: bool
    reloads: bool

    @classmethod
    def draw(cls, seed: int, number: int) -> Case:
        rng = random.Random(f"{seed}/{number}")
        world_size, entry_point = rng.choice([1, 2, 2, 2, 3, 3, 4, 4]), rng.choice(ENTRY_POINTS)
        compressions = [_draw_compression(rng, entry_point, world_size)] * 2
        if entry_point != "torch hook" and rng.random() < 0.2:
            compressions[1] = _draw_compression(rng, entry_point, world_size)
        shapes = rng.choices(SHAPES, k=rng.randint(1, 9))
        if rng.random() < 0.15:
            shapes.insert(rng.randrange(len(shapes) + 1), rng.choice(LARGE_SHAPES))
        is_lossless = all(each["wire"] == "none" for each in compressions)
        dtype = rng.choice(DTYPES + ["complex64"] * is_lossless)
        gloo_adds = world_size > 2 and any(each.get("reduce") != "fp32" for each in compressions)
        values = "exact" if gloo_adds and rng.random() < 0.5 else rng.choice(["ordinary", "zeros", *EXPONENTS])
        has_attached = entry_point.startswith("attach")
        return cls(
            number=number,
            seed=rng.randrange(2**31),
            world_size=world_size,
            entry_point=entry_point,
            compressions=compressions,
            shapes=shapes,
            dtypes=[rng.choice(DTYPES[2:-1]) if dtype == "mixed" else dtype for _ in shapes],
            bucket_cap_mb=rng.choice([2.0**-10, 2.0**-8, 0.5, 25.0]),
            num_steps=rng.randint(2, 6),
            values=values,
            gloo_rounds=gloo_adds and values not in ("exact", "zeros"),
            num_special=rng.choice([0, 0, 0, 3]),
            skips_parameters=rng.random() < 0.3,
            accumulates=rng.random() < 0.3,
            piggybacks=has_attached and rng.random() < 0.3,
            freezes=has_attached and rng.random() < 0.15,
            reloads=entry_point in ("hook", "attach") and rng.random() < 0.2,
        )


def _draw_compression(rng: random.Random, entry_point: str, world_size: int) -> dict[str, Any]:
    """Arguments of a ``fastsync.Compression``."""
    if entry_point == "torch hook":
        return {"wire": rng.choice(list(TORCH_HOOKS))}
    wire = rng.choice(["none", "bf16", "fp16", "int8", "int8"])
    if wire != "int8" and rng.random() < 0.4:
        return {"wire": wire}
    chosen: dict[str, Any] = {"wire": wire, "reduce": "fp32"}
    if wire != "none" and rng.random() < 0.5:
        chosen["error_feedback"] = True
    per_node = rng.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    if per_node > 1 and rng.random() < 0.6:
        chosen["ranks_per_node"] = per_node
    elif algorithm := rng.choice([None, "one_shot", "two_shot"]):
        chosen["algorithm"] = algorithm
    return chosen


class Given(nn.Module):
    """A model whose gradients are the tensors that it is called with; None stands for a parameter that is not used."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        zeros = [torch.zeros(s, dtype=getattr(torch, dtype)) for s, dtype in zip(case.shapes, case.dtypes, strict=True)]
        # Every third matrix lies in memory as its transpose.
        self.weights = nn.ParameterList(
            nn.Parameter(zero.t().contiguous().t() if zero.dim() == 2 and index % 3 == 0 else zero)
            for index, zero in enumerate(zeros)
        )

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        products = [w * g.conj() for w, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack([product.real.double().sum() for product in products]).sum()


def random_grads(case: Case, model: Given, rng: random.Random) -> list[Tensor | None]:
    """This rank's, for one backward. At least one parameter that is not frozen gets one."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    free = [index for index, weight in enumerate(model.weights) if weight.requires_grad]
    used = rng.sample(free, rng.randint(1, len(free))) if case.skips_parameters else free
    return [_values(case, w, generator) if i in used else None for i, w in enumerate(model.weights)]


def _values(case: Case, like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (*like.shape, 2) if like.is_complex() else like.shape
    if case.values == "exact":
        drawn = 12.0 * torch.randint(-4, 5, shape, generator=generator).double()
    elif case.values == "zeros":
        drawn = torch.zeros(shape, dtype=torch.float64)
    else:
        low, high = EXPONENTS[case.values]
        exponents = torch.randint(low, high + 1, shape, generator=generator)
        drawn = torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents)
    if case.num_special:
        places = torch.randint(drawn.numel(), (case.num_special,), generator=generator)
        drawn.view(-1)[places] = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=torch.float64)
    return (torch.view_as_complex(drawn) if like.is_complex() else drawn).to(like.dtype)


class EntryPoint:
    """One of the ways into the engine, with what a step has to call."""

    def __init__(self, case: Case) -> None:
        self.name, cap, model = case.entry_point, case.bucket_cap_mb, Given(case)
        self.model, self.called = model, model
        compression = fastsync.Compression(**case.compressions[0])
        self.handle: Any = None
        if self.name.endswith("hook"):
            self.called = DistributedDataParallel(
                model, bucket_cap_mb=cap, find_unused_parameters=case.skips_parameters
            )
        if self.name == "hook":
            self.handle = fastsync.register_comm_hook(self.called, compression)
        elif self.name == "torch hook":
            self.handle = fastsync.HookState(module=model)
            self.called.register_comm_hook(self.handle, getattr(fastsync, TORCH_HOOKS[compression.wire]))
        elif self.name != "one call":
            overlap = self.name == "attach"
            self.handle = fastsync.attach(model, compression, bucket_cap_mb=cap, overlap=overlap)

    def no_sync(self) -> AbstractContextManager[Any]:
        if self.name in ("one call", "attach without overlap"):
            return nullcontext()
        return (self.handle if self.name == "attach" else self.called).no_sync()

    def sync(self, compression: dict[str, Any]) -> Any:
        """What is left to do once backward is over. Returns statistics."""
        if self.name == "one call":
            return fastsync.all_reduce_gradients(self.model, fastsync.Compression(**compression))
        if self.name == "attach without overlap":
            self.handle.synchronize()
        return self.handle.grad_stats()


def run_case(case: Case, rank: int) -> Iterator[tuple[str, Tensor | None]]:
    """Everything that has to be the same, by name."""
    rng = random.Random(f"{case.seed}/{rank}")
    shared = random.Random(case.seed)  # what all ranks have to do alike
    entry_point = EntryPoint(case)
    model, handle, compression = entry_point.model, entry_point.handle, case.compressions[0]
    for step in range(case.num_steps):
        if step == case.num_steps // 2:
            if case.compressions[1] != compression:
                compression = case.compressions[1]
                if handle is not None:
                    handle.compression = fastsync.Compression(**compression)
            if case.reloads:
                handle.load_state_dict(handle.state_dict())
            if case.freezes and len(case.shapes) > 1:
                model.weights[shared.randrange(len(case.shapes))].requires_grad_(False).grad = None
        model.zero_grad(set_to_none=shared.random() < 0.5)
        if case.piggybacks:
            handle.piggyback("value", 12.0 * torch.arange(rank, rank + 5.0))
        for _ in range(shared.randint(0, 2) if case.accumulates else 0):
            with entry_point.no_sync():
                entry_point.called(random_grads(case, model, rng)).backward()
        entry_point.called(random_grads(case, model, rng)).backward()
        stats = entry_point.sync(compression)
        for name, parameter in model.named_parameters():
            yield f"step {step}, gradient of {name}", parameter.grad
        for name in ("grad_norm", "num_nonfinite", "num_saturated"):
            yield f"step {step}, {name}", getattr(stats, name)
        if case.piggybacks:
            yield f"step {step}, piggybacked", handle.piggybacked()["value"]
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
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
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
            faulthandler.dump_traceback_later(
                2 * CASE_SECONDS, exit=True
            )  # the group's limit comes first, and says more
            bits: Bits = {}
            try:
                for name, tensor in run_case(Case.draw(seed, number), rank):
                    bits[name] = hash_of(tensor)
            except Exception as error:
                bits["error"] = f"{type(error).__name__}: {error}"
            lines.write(json.dumps([number, bits]) + "\n")
            if "error" in bits:
                os._exit(0)  # the other ranks may be stuck, and destructors would wait for them
            gc.collect()  # DDP is part of reference cycles
    dist.destroy_process_group()


def run_ranks(checkout: Path, world_size: int, seed: int, numbers: Sequence[int]) -> dict[int, list[Bits]]:
    """What the first of these cases, as many as went well and the one after, gave on each rank of a checkout."""
    # DDP warns of a backward that leaves no parameter out.
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [str(checkout / ".venv/bin/python"), __file__, "--as-rank"]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        arguments = [json.dumps([rank, world_size, folder, seed, list(numbers)]) for rank in range(world_size)]
        for process in [subprocess.Popen([*command, each], cwd=checkout, env=environment) for each in arguments]:
            process.wait()
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        results = [dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {} for file in files]
    gone = {"error": "no result: the process has died, or did not come to the case's end in time"}
    done: dict[int, list[Bits]] = {}
    for number in numbers:
        done[number] = [of_rank.get(number, gone) for of_rank in results]
        if any("error" in bits for bits in done[number]):
            break
    return done


def run_all(checkout: Path, seed: int, numbers: Iterable[int]) -> dict[int, list[Bits]]:
    """What each case gave on each rank of a checkout."""
    done: dict[int, list[Bits]] = {}
    for world_size in range(1, 5):
        batch = [number for number in numbers if Case.draw(seed, number).world_size == world_size]
        while batch:
            done.update(run_ranks(checkout, world_size, seed, batch))
            batch = [number for number in batch if number not in done]
        print(f"same_bits: {checkout}: the cases of {world_size} ranks have run", flush=True)
    return done


def difference(old: Sequence[Bits], new: Sequence[Bits]) -> str | None:
    """The first thing that is not the same, and on which rank; None where all is."""
    for rank, (was, is_) in enumerate(zip(old, new, strict=True)):
        for name in ("error", *was, *is_):
            if was.get(name) != is_.get(name):
                return f"rank {rank}, {name}: {was.get(name, 'absent')} became {is_.get(name, 'absent')}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.same_bits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, metavar="OLD", help="a checkout with a built .venv")
    parser.add_argument("new", type=Path, metavar="NEW", help="another one, or the same")
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="from which all cases follow (default: %(default)s)")
    parser.add_argument("--case", type=int, metavar="N", help="only the one of that number")
    options = parser.parse_args()
    numbers = range(options.cases) if options.case is None else [options.case]
    old, new = (run_all(checkout.resolve(), options.seed, numbers) for checkout in (options.old, options.new))
    different = {number: what for number in numbers if (what := difference(old[number], new[number])) is not None}
    for number, what in different.items():
        print(f"{Case.draw(options.seed, number)}\n  {what}\n  again: --seed {options.seed} --case {number}")
    for error in sorted({bits["error"] for of_ranks in old.values() for bits in of_ranks if "error" in bits}):
        print(f"same_bits: OLD raises {error}")
    num_rounded = sum(Case.draw(options.seed, number).gloo_rounds for number in different)
    print(
        f"same_bits: {len(numbers) - len(different)} of {len(numbers)} cases are equal; {len(different)} differ, "
        f"{num_rounded} of them where Gloo rounds"
    )
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        rank_main(*json.loads(sys.argv[2]))
    else:
        sys.exit(main())
