"""Optimizers that take steps of their own kind: each ends where one process with the batches of all ranks ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastsync
from fastsync.distributed import dist_mean
from tests.engine.entry_points import average
from tests.models import Mlp, assert_same_on_all_ranks, batch
from tests.ranks import on_ranks
from tests.refused import refused

Loss = Callable[[], Tensor]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as the implementation that most projects copy: a closure between two moves."""

    def __init__(self, params: Any, rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data
        self.base.step()


def _sam(optimizer: Any, loss_of: Loss, agreed: Callable[[Tensor], Tensor]) -> None:
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step(lambda: loss_of().backward())


def _with_a_closure(optimizer: Any, loss_of: Loss, agreed: Callable[[Tensor], Tensor]) -> None:
    """LBFGS decides by the loss how far it goes, so it has to be the same on all ranks."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return agreed(loss)

    optimizer.step(closure)


LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=4)
KINDS: dict[str, tuple[Any, Any]] = {
    "SAM": (partial(Sam, rho=0.05, lr=0.1, momentum=0.9), _sam),
    "LBFGS": (LBFGS, _with_a_closure),
    "LBFGS, strong_wolfe": (partial(LBFGS, line_search_fn="strong_wolfe"), _with_a_closure),
}


@on_ranks(2, cases={"entry_point": ["attach", "hook"], "kind": KINDS})
def test_steps_with_a_closure(rank: int, world_size: int, entry_point: str, kind: str) -> None:
    make, step = KINDS[kind]
    torch.manual_seed(0)
    given = average(entry_point, Mlp())
    torch.manual_seed(0)
    whole = Mlp()
    optimizer, reference = (make(model.parameters()) for model in (given.model, whole))
    for number in range(4):

        def of_all(number: int = number) -> Tensor:
            return torch.stack([whole(batch(other, number)).square().mean() for other in range(world_size)]).mean()

        step(optimizer, lambda number=number: given.model(batch(rank, number)).square().mean(), dist_mean)
        step(reference, of_all, lambda loss: loss)
    assert_same_on_all_ranks(list(given.model.parameters()))
    for mine, theirs in zip(given.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@on_ranks(2, cases={"is_fused": [True, False]})
def test_a_compiled_step(rank: int, world_size: int, is_fused: bool) -> None:
    """Clipped, in the step itself if the optimizer is fused. What no rank has averaged is refused there, too."""
    torch._logging.set_logs(dynamo=logging.ERROR)  # it warns that it leaves out what optimizers mark for profilers
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Mlp())
    model, whole = models
    sync = fastsync.attach(model)
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=is_fused) for each in models)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        model(batch(rank, number)).square().mean().backward()
        torch.stack([whole(batch(other, number)).square().mean() for other in range(world_size)]).mean().backward()
        fastsync.clip_grad_norm_(sync, 0.01, optimizer=optimizer)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        step()
        reference.step()
    assert_same_on_all_ranks(list(model.parameters()))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    with sync.no_sync():
        model(batch(rank, 0)).square().mean().backward()
    refused(lambda: step(), "was about to step with gradients that no rank", kind=RuntimeError)


class Private(torch.optim.SGD):
    """Makes .grad of the gradients of each sample, as Opacus's DPOptimizer does in its step."""

    def write(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            norms = parameter.grad_sample.flatten(1).norm(dim=1).clamp(min=1.0)
            clipped = parameter.grad_sample / norms.view(-1, *[1] * parameter.dim())
            parameter.grad = clipped.mean(0)


def _write_samples(model: nn.Module, inputs: Tensor) -> None:
    parameters = list(model.parameters())
    each = [torch.autograd.grad(model(row).square().sum(), parameters) for row in inputs]
    for parameter, samples in zip(parameters, zip(*each, strict=True), strict=True):
        parameter.grad_sample = torch.stack(samples)


@on_ranks(2, cases={"overlap": [True, False]})
def test_gradients_that_are_written_after_backward(rank: int, world_size: int, overlap: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    torch.manual_seed(0)
    whole = nn.Linear(4, 3)
    sync = fastsync.attach(model, overlap=overlap)
    optimizer, reference = (Private(each.parameters(), lr=0.1) for each in (model, whole))
    inputs = [torch.randn(8, 4, generator=torch.Generator().manual_seed(other)) for other in range(world_size)]
    model(inputs[rank]).square().sum().backward()
    _write_samples(model, inputs[rank])
    optimizer.write()
    if overlap:
        message = r"Private was about to step with a \.grad that was made of \.grad_sample after the ranks had averaged"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        return
    sync.synchronize()
    optimizer.step()
    _write_samples(whole, torch.cat(inputs))
    reference.write()
    reference.step()
    assert_same_on_all_ranks(list(model.parameters()))
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
