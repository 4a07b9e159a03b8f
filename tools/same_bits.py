"""Does this build give bitwise what that one gave? Random cases, run on both; needs the public interface alone.

    python -m tools.same_bits OLD NEW --cases 500 --seed 0
    python -m tools.same_bits OLD NEW --seed 0 --case 17

OLD and NEW are checkouts with a built ``.venv`` each. A case is one model on 1 to 4 Gloo ranks: an entry point, a
compression, shapes, dtypes, values, and some steps. Compared are, on every rank and after every step, each gradient,
piggybacked value and statistic, and at the end the state for checkpoints, bit for bit. Every nan counts as the same
one, for whose payload a sum keeps depends on the order of its operands. Errors have to be the same too. The exit status
is 0 if all is equal.

Where ranks add by themselves, they do so in rank order. The order in which Gloo's all-reduce adds the values of three
and more ranks depends on the length of the buffer: two runs of one build are equal, but a build that sends more or less
beside a bucket's gradients rounds otherwise, and is right. So half of the cases of that kind have multiples of 12,
whose means and sums are exact in every wire: if one of these differs, something is wrong. The others say so by
``gloo_rounds=True``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
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
MAGNITUDES = {"ordinary": (0, 0), "wide": (-30, 30), "tiny": (-149, -120), "huge": (100, 127), "zeros": (0, 0)}
"""Binary exponents that the values of a gradient are multiplied with."""
DTYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16", "mixed"]
CASE_SECONDS = 60.0
"""How long a case may take before it counts as hanging."""

Bits = dict[str, str]
"""What a case gave on one rank: a hash by what it is of."""


@dataclass(frozen=True)
class Case:
    """What one model does. Everything follows from the seed and the number."""

    number: int
    seed: int
    world_size: int
    entry_point: str
    compression: dict[str, Any]
    then: dict[str, Any] | None
    """The compression of the second half of the steps, where it is another."""
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
    rides: bool
    freezes: bool
    reloads: bool

    @classmethod
    def draw(cls, seed: int, number: int) -> Case:
        rng = random.Random(f"{seed}/{number}")
        world_size = rng.choice([1, 2, 2, 2, 3, 3, 4, 4])
        entry_point = rng.choice(
            ["hook", "hook", "torch hook", "attach", "attach", "attach without overlap", "one call"]
        )
        compression = _draw_compression(rng, entry_point, world_size)
        then = (
            _draw_compression(rng, entry_point, world_size)
            if entry_point != "torch hook" and rng.random() < 0.2
            else None
        )
        shapes = rng.choices(SHAPES, k=rng.randint(1, 9))
        if rng.random() < 0.15:
            shapes.insert(rng.randrange(len(shapes) + 1), rng.choice(LARGE_SHAPES))
        wires = {each["wire"] for each in (compression, then) if each}
        dtype = rng.choice(DTYPES + ["complex64"] * (wires == {"none"}))
        few = DTYPES[2:-1]
        gloo_adds = world_size > 2 and any(each.get("reduce") != "fp32" for each in (compression, then) if each)
        values = "exact" if gloo_adds and rng.random() < 0.5 else rng.choice(["ordinary", "ordinary", *MAGNITUDES])
        return cls(
            number=number,
            seed=rng.randrange(2**31),
            world_size=world_size,
            entry_point=entry_point,
            compression=compression,
            then=then,
            shapes=shapes,
            dtypes=[rng.choice(few) if dtype == "mixed" else dtype for _ in shapes],
            bucket_cap_mb=rng.choice([2.0**-10, 2.0**-8, 0.5, 25.0]),
            num_steps=rng.randint(2, 6),
            values=values,
            gloo_rounds=gloo_adds and values not in ("exact", "zeros"),
            num_special=rng.choice([0, 0, 0, 3]),
            skips_parameters=rng.random() < 0.3,
            accumulates=rng.random() < 0.3,
            rides=entry_point.startswith("attach") and rng.random() < 0.3,
            freezes=entry_point.startswith("attach") and rng.random() < 0.15,
            reloads=entry_point in ("hook", "attach") and rng.random() < 0.2,
        )


def _draw_compression(rng: random.Random, entry_point: str, world_size: int) -> dict[str, Any]:
    """Arguments of a ``fastsync.Compression``."""
    if entry_point == "torch hook":
        return {"wire": rng.choice(["none", "bf16", "fp16"])}
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
        losses = [_product(w, g) for w, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack([loss.double() for loss in losses]).sum()


def _product(weight: Tensor, grad: Tensor) -> Tensor:
    product = weight * grad.conj()
    return (torch.view_as_real(product)[..., 0] if product.is_complex() else product).sum()


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
        low, high = MAGNITUDES[case.values]
        exponents = torch.randint(low, high + 1, shape, generator=generator)
        drawn = torch.ldexp(torch.randn(shape, generator=generator, dtype=torch.float64), exponents)
    if case.num_special:
        places = torch.randint(drawn.numel(), (case.num_special,), generator=generator)
        drawn.view(-1)[places] = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=torch.float64)
    return (torch.view_as_complex(drawn) if like.is_complex() else drawn).to(like.dtype)


class EntryPoint:
    """One of the ways into the engine, with what a step has to call."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Given(case)
        self.handle: Any = None
        self.called: Any = self.model
        if case.entry_point in ("hook", "torch hook"):
            self.called = DistributedDataParallel(
                self.model, bucket_cap_mb=case.bucket_cap_mb, find_unused_parameters=case.skips_parameters
            )
            if case.entry_point == "hook":
                self.handle = fastsync.register_comm_hook(self.called, fastsync.Compression(**case.compression))
            else:
                hooks = {"none": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
                self.handle = fastsync.HookState(module=self.model)
                self.called.register_comm_hook(self.handle, getattr(fastsync, hooks[case.compression["wire"]]))
        elif case.entry_point != "one call":
            self.handle = fastsync.attach(
                self.model,
                fastsync.Compression(**case.compression),
                bucket_cap_mb=case.bucket_cap_mb,
                overlap=case.entry_point == "attach",
            )

    def no_sync(self) -> AbstractContextManager[Any]:
        if self.case.entry_point in ("one call", "attach without overlap"):
            return nullcontext()
        context: AbstractContextManager[Any] = (
            self.handle if self.case.entry_point == "attach" else self.called
        ).no_sync()
        return context

    def sync(self, compression: dict[str, Any]) -> Any:
        """What is left to do once backward is over."""
        if self.case.entry_point == "one call":
            return fastsync.all_reduce_gradients(self.model, fastsync.Compression(**compression))
        if self.case.entry_point == "attach without overlap":
            self.handle.synchronize()
        return _value(self.handle, "grad_stats")

    def close(self) -> None:
        if self.case.entry_point.startswith("attach"):
            self.handle.detach()


def run_case(case: Case, rank: int) -> Iterator[tuple[str, Tensor | None]]:
    """Everything that has to be the same, by name."""
    rng = random.Random(f"{case.seed}/{rank}")
    shared = random.Random(case.seed)  # what all ranks have to do alike
    entry_point = EntryPoint(case)
    compression = case.compression
    for step in range(case.num_steps):
        if step == case.num_steps // 2:
            if case.then is not None:
                compression = case.then
                if entry_point.handle is not None:
                    entry_point.handle.compression = fastsync.Compression(**compression)
            if case.reloads:
                entry_point.handle.load_state_dict(entry_point.handle.state_dict())
            if case.freezes and len(case.shapes) > 1:
                frozen = entry_point.model.weights[shared.randrange(len(case.shapes))].requires_grad_(False)
                frozen.grad = None
        entry_point.model.zero_grad(set_to_none=shared.random() < 0.5)
        if case.rides:
            send = entry_point.handle.piggyback if hasattr(entry_point.handle, "piggyback") else entry_point.handle.ride
            send("rider", 12.0 * torch.arange(rank, rank + 5.0))
        for _ in range(shared.randint(0, 2) if case.accumulates else 0):
            with entry_point.no_sync():
                entry_point.called(random_grads(case, entry_point.model, rng)).backward()
        entry_point.called(random_grads(case, entry_point.model, rng)).backward()
        stats = entry_point.sync(compression)
        for name, parameter in entry_point.model.named_parameters():
            yield f"step {step}, gradient of {name}", parameter.grad
        yield f"step {step}, grad_norm", stats.grad_norm
        yield f"step {step}, num_nonfinite", stats.num_nonfinite
        yield f"step {step}, num_saturated", stats.num_saturated
        if case.rides:
            yield f"step {step}, rider", _value(entry_point.handle, "piggybacked", "riders")["rider"]
    if entry_point.handle is not None:
        yield from _leaves("state_dict", entry_point.handle.state_dict())
    entry_point.close()


def _value(handle: Any, *names: str) -> Any:
    """What a method of the first of these names returns, or a property holds: checkouts have different ones."""
    found = getattr(handle, next(name for name in names if hasattr(handle, name)))
    return found() if callable(found) else found


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


def rank_main(rank: int, world_size: int, folder: str, seed: int, numbers: Sequence[int], limit: float) -> None:
    """Runs these cases as one rank of a checkout, and writes a line for each. Ends with the first that raises."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=limit))
    gc.freeze()
    with Path(folder, str(rank)).open("w", buffering=1) as lines:
        for number in numbers:
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
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        # DDP warns of a backward that leaves no parameter out.
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [str(checkout / ".venv/bin/python"), __file__, "--as-rank"]
        options = {"world_size": world_size, "folder": folder, "seed": seed, "numbers": numbers, "limit": CASE_SECONDS}
        ranks = [
            subprocess.Popen([*command, json.dumps({**options, "rank": rank})], cwd=checkout, env=environment)
            for rank in range(world_size)
        ]
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        _wait(ranks, files)
        results = [dict(json.loads(line) for line in _lines(file)) for file in files]
    gone = {"error": "no result: the process has died, or did not come to the case's end in time"}
    done: dict[int, list[Bits]] = {}
    for number in numbers:
        done[number] = [of_rank.get(number, gone) for of_rank in results]
        if any("error" in bits for bits in done[number]):
            break
    return done


def _wait(ranks: Sequence[subprocess.Popen[bytes]], files: Sequence[Path]) -> None:
    """Until all have ended, or have written nothing for longer than a case may take."""
    newest, size = time.monotonic(), -1
    try:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
            if (written := sum(file.stat().st_size for file in files if file.exists())) != size:
                newest, size = time.monotonic(), written
            if time.monotonic() > newest + 2 * CASE_SECONDS:  # a rank's own limit comes first, and says more
                return
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def run_all(checkout: Path, seed: int, numbers: Iterable[int]) -> dict[int, list[Bits]]:
    """What each case gave on each rank of a checkout."""
    done: dict[int, list[Bits]] = {}
    left: dict[int, list[int]] = {}
    for number in numbers:
        left.setdefault(Case.draw(seed, number).world_size, []).append(number)
    for world_size, batch in sorted(left.items()):
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
    started = time.monotonic()
    old, new = (run_all(checkout.resolve(), options.seed, numbers) for checkout in (options.old, options.new))
    different: list[Case] = []
    for number in numbers:
        if (what := difference(old[number], new[number])) is not None:
            different.append(case := Case.draw(options.seed, number))
            print(f"{case}\n  {what}")
            print(f"  python -m tools.same_bits {options.old} {options.new} --seed {options.seed} --case {number}")
    errors = {bits["error"] for of_ranks in old.values() for bits in of_ranks if "error" in bits}
    print("".join(f"same_bits: OLD raises {error}\n" for error in sorted(errors)), end="")
    print(
        f"same_bits: {len(numbers) - len(different)} of {len(numbers)} cases are equal; {len(different)} differ, "
        f"{sum(case.gloo_rounds for case in different)} of them where Gloo rounds; {time.monotonic() - started:.0f} s"
    )
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        rank_main(**json.loads(sys.argv[2]))
    else:
        sys.exit(main())
