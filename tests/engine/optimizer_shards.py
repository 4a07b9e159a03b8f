"""Random trainings twice on the same ranks: with ``shard_optimizer``, and with attach and every rank's own step."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import ExponentialLR

import fastsync
from fastsync.optimizer import register_elementwise, register_tensorwise
from fastsync.sync import clip
from tests.reference import SUM_TOLERANCE

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, fused=True, maximize=True),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda p: SGD(p, lr=0.01, weight_decay=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "one by one": lambda p: AdamW(p, lr=0.01),
    "foreach": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1, foreach=True),
}
"""Those of random trainings."""
FURTHER: dict[str, Any] = {
    "NAdam": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam, foreach": lambda p: NAdam(p, lr=0.01, maximize=True, foreach=True),
    "RAdam": lambda p: RAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam, foreach": lambda p: RAdam(p, lr=0.01, foreach=True),
    "Adamax": lambda p: Adamax(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adagrad, fused": lambda p: Adagrad(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adadelta": lambda p: Adadelta(p, lr=0.5, weight_decay=0.1, maximize=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "RMSprop, centered": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "RMSprop, foreach": lambda p: RMSprop(p, lr=0.01, weight_decay=0.1, centered=True, foreach=True),
    "Rprop": lambda p: Rprop(p, lr=0.01),
    "ASGD": lambda p: ASGD(p, lr=0.01, t0=2, weight_decay=0.1),
    "ASGD, foreach": lambda p: ASGD(p, lr=0.01, t0=2, foreach=True),
    "Lion": lambda p: Lion(p, 0.01, 0.1),
}
OF_WHOLE: dict[str, Any] = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Muon, match_rms_adamw": lambda p: torch.optim.Muon(p, 0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "Normalized": lambda p: Normalized(p, 0.02),
}
"""Those whose steps need whole tensors."""


class Lion(Optimizer):
    """A user's own, whose constructor has no defaults, and which counts steps by an int."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p))
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 0.1).sign_(), alpha=-group["lr"] / state["step"])
                state["exp_avg"].lerp_(p.grad, 0.01)


class Normalized(Optimizer):
    """A user's own: momentum, divided by its norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(momentum / (momentum.norm() + 1e-6), alpha=-group["lr"])


register_elementwise(Lion, state=("exp_avg",))
register_tensorwise(Normalized, state=("momentum",))
SHAPES = [(3,), (17, 5), (), (64,), (1000,), (33, 65), (0,), (4, 3, 3, 3), (300, 257), (130_000,), (2, 1)]
WIRES = ["none", "none", "none", "bf16", "fp16", "int8", "int4", "int8+ef", "bf16+ef"]


class Weights(nn.Module):
    """Weights whose gradients are what ``forward`` is given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        if len(self.weights) > 1 and self.weights[1].dim() == 4:
            self.weights[1].data = self.weights[1].data.to(memory_format=torch.channels_last)
        if self.weights[0].dim() == 2:
            self.weights[0].data = self.weights[0].data.t().contiguous().t()

    def forward(self, grads: dict[int, Tensor]) -> Tensor:
        return sum(((self.weights[i] * g).sum() for i, g in grads.items()), torch.zeros(()))

    def groups(self) -> list[dict[str, Any]]:
        weights = list(self.weights)
        return [{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.02}]


@dataclass
class Case:
    """A training, drawn from a seed."""

    seed: int
    world_size: int
    optimizer: str = ""

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.optimizer = self.optimizer or rng.choice(list(OPTIMIZERS))
        is_of_matrices = self.optimizer.startswith("Muon")
        shapes = [shape for shape in SHAPES if len(shape) == 2] if is_of_matrices else SHAPES
        self.shapes = [(9, 20) if is_of_matrices else (3,), *(rng.choice(shapes) for _ in range(rng.randint(0, 8)))]
        # torch's fused SGD leaves some values of a first momentum of 16 bits as they were in memory.
        narrow = [] if self.optimizer in ("momentum", "nesterov") else [torch.bfloat16]
        self.dtype = rng.choice([torch.float32] * 4 + [torch.float64, *narrow])
        wire = rng.choice(WIRES)
        # In two_shot the residuals of error feedback depend on where a shard begins.
        algorithm = "one_shot" if "+ef" in wire else rng.choice([None, "one_shot", "two_shot"])
        self.compression = fastsync.Compression(
            wire.removesuffix("+ef"),
            reduce="fp32" if algorithm or "+ef" in wire else None,
            algorithm=algorithm,
            error_feedback="+ef" in wire,
        )
        self.cap = rng.choice([0.001, 0.1, 25])
        self.clips, self.accumulates, self.scales = (rng.random() < 0.4 for _ in range(3))
        # torch's fused SGD leaves a first momentum as it was in memory, if a GradScaler skips that step.
        self.scales &= self.is_fused and self.optimizer not in ("momentum", "nesterov")
        self.weighs = rng.random() < 0.2
        self.overlaps = rng.random() < 0.5
        # torch's fused SGD refuses a group of which some have momentum.
        self.use = 1.0 if "momentum" in self.optimizer or self.optimizer == "nesterov" else 0.8

    @property
    def is_fused(self) -> bool:
        return self.optimizer not in ("one by one", "foreach", *FURTHER, *OF_WHOLE) or "fused" in self.optimizer


@dataclass
class Training:
    case: Case
    is_shared: bool
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.case
        self.model = Weights(case.shapes, case.dtype)
        self.optimizer: Optimizer = (OPTIMIZERS | FURTHER | OF_WHOLE)[case.optimizer](self.model.groups())
        # Ranks that keep shards add up by themselves, whatever `reduce` says.
        compression = case.compression if self.is_shared else replace(case.compression, reduce="fp32")
        self.sync = fastsync.attach(self.model, compression, bucket_cap_mb=case.cap)
        if self.is_shared:
            fastsync.shard_optimizer(self.sync, self.optimizer, overlap_gather=case.overlaps)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        self.scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=3, enabled=case.scales)

    def step(self, grads: dict[int, Tensor], clips: bool, norm: Tensor | None, weight: float) -> Tensor | None:
        """Takes a step. Returns the norm if it clips, or takes the given one for it."""
        if self.case.weighs:
            self.sync.set_weight(weight)
        if self.case.accumulates and grads:
            with self.sync.no_sync():
                self.scaler.scale(self.model(grads) / 2).backward()
        loss = self.scaler.scale(self.model(grads))
        loss.backward() if grads else self.sync.synchronize()
        if clips:
            scaler = self.scaler if self.case.scales else None
            optimizer = self.optimizer if self.case.is_fused or scaler else None
            own_norm = clip._norm

            def same_norm(*arguments: Any) -> Tensor:
                found = own_norm(*arguments)
                if norm is not None:  # Squares are added up in another order. A root has half of its sum's error.
                    rtol = SUM_TOLERANCE + torch.finfo(norm.dtype).eps
                    torch.testing.assert_close(found, norm, rtol=rtol, atol=0, equal_nan=True)
                return found if norm is None else norm

            with patch.object(clip, "_norm", same_norm):
                norm = fastsync.clip_grad_norm_(self.sync, 0.5, optimizer=optimizer, scaler=scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm


def assert_same(shared: Training, plain: Training, number: int) -> None:
    """Raises AssertionError unless both trainings have the same bits."""

    def check(own: Any, reference: Any, what: str) -> None:
        told = f"{shared.case}, step {number}, {what}"
        torch.testing.assert_close(own, reference, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{told}: {text}")

    for name, parameter in plain.model.named_parameters():
        check(shared.model.get_parameter(name).data, parameter.data, name)
    own, reference = (each.optimizer.state_dict() for each in (shared, plain))
    assert own["param_groups"] == reference["param_groups"]
    for index, state in own["state"].items():
        check(state, reference["state"][index], f"state of {index}")
    assert shared.scaler.get_scale() == plain.scaler.get_scale()


def train_both(rank: int, world_size: int, seed: int, num_steps: int, optimizer: str = "") -> str:
    """Takes so many steps of both, and compares them after each. Half-way each loads the other's state."""
    case = Case(seed, world_size, optimizer)
    own = random.Random(f"{seed} {rank}")
    shared, plain = Training(case, is_shared=True), Training(case, is_shared=False)
    for number in range(num_steps):
        if number == num_steps // 2:
            states = [copy.deepcopy(each.optimizer.state_dict()) for each in (plain, shared)]
            for each, state in zip((shared, plain), states, strict=True):
                each.optimizer.load_state_dict(state)
        clips = case.clips and case.rng.random() < 0.7
        used = [[i for i in range(len(case.shapes)) if case.rng.random() < case.use] for _ in range(world_size)]
        weights = [case.rng.choice([0.5, 1.0, 3.0]) for _ in range(world_size)]
        overflows = case.scales and case.rng.random() < 0.15
        grads = {}
        for i in used[rank]:
            generator = torch.Generator().manual_seed(own.randrange(10**9))
            grads[i] = torch.randn(case.shapes[i], generator=generator).to(case.dtype)
        if overflows and rank == number % world_size and grads:
            grads[min(grads)].view(-1)[:1] = torch.inf
        if not all(used):
            continue  # a GradScaler wants a gradient of each rank
        norm = shared.step(grads, clips, None, weights[rank])
        exact = plain.step(grads, clips, norm, weights[rank])
        assert (norm is None) == (exact is None)
        assert_same(shared, plain, number)
    return case.optimizer
