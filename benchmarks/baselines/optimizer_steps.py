"""What follows a backward in a training: clipping by norm and the step of fused AdamW, or Muon's step."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import fastsync
from benchmarks.baselines.gradients import Gradients, Step
from fastsync.sync.clip import clip_grad_norm_
from fastsync.sync.stats import SyncStats

MAX_NORM = 1e9
"""So large that gradients stay what they are, and can be checked. Clipping does the same work."""
SETTINGS = {"lr": 0.0, "fused": True}
"""The optimizer does all of its work, and the weights stay as they are."""
LIMIT_BYTES = 40
"""The memory traffic of sum, clip and step for each value, of all ranks of a host, where parameters and state lie once:
8 for the gradients of two ranks, 8 for their mean, and 8 for each of the parameter and the two averages."""


class OptimizerStep(Step):
    """A training step: the backward of another one, then clipping, then the optimizer."""

    def __init__(
        self,
        training: Step,
        clip: Callable[[], object],
        optimizers: Sequence[Optimizer],
        result: Callable[[], Tensor] | None = None,
    ) -> None:
        self._training, self._clip, self._optimizers = training, clip, optimizers
        self._result = result or training.result
        self._has_gradients = False

    def prepare(self) -> None:
        self._training.prepare()

    def run(self) -> None:
        self._training.run()
        self.update()

    def update(self) -> None:
        self._clip()
        for optimizer in self._optimizers:
            optimizer.step()

    def begin_with_update(self) -> None:
        """A whole step, from the optimizer's step to the end of backward: a forward may hide what is left of it.

        The first one has no gradients to step with.
        """
        if self._has_gradients:
            self.update()
        self._training.prepare()
        self._training.run()
        self._has_gradients = True

    def result(self) -> Tensor:
        return self._result()

    def stats(self) -> SyncStats | None:
        return self._training.stats()


def by_torch(training: Step, group: ProcessGroup, zero: bool = False) -> OptimizerStep:
    """Each rank steps what it has. With ``zero`` it steps some parameters, and gets the others from other ranks."""
    parameters = list(training.model.parameters())
    if zero:
        optimizer: Optimizer = ZeroRedundancyOptimizer(parameters, AdamW, process_group=group, **SETTINGS)
    else:
        optimizer = AdamW(parameters, **SETTINGS)
    is_sharded = isinstance(parameters[0], DTensor)

    def clip() -> object:
        return _clip_shards(parameters, group) if is_sharded else nn.utils.clip_grad_norm_(parameters, MAX_NORM)

    return OptimizerStep(training, clip, [optimizer])


def muon_by_torch(training: Step, group: ProcessGroup) -> OptimizerStep:
    """Each rank steps all. Muon needs no clipping."""
    optimizers = [optimizer for _, optimizer in _of_muon(list(training.model.parameters()))]
    return OptimizerStep(training, lambda: None, optimizers)


def _of_muon(parameters: list[nn.Parameter]) -> list[tuple[list[nn.Parameter], Optimizer]]:
    """Returns Muon with the matrices, and AdamW with the others if there are any."""
    matrices, others = ([p for p in parameters if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    muon: Optimizer = torch.optim.Muon(matrices, lr=SETTINGS["lr"])
    return [(matrices, muon), *([(others, AdamW(others, **SETTINGS))] if others else [])]


def _clip_shards(parameters: list[Tensor], group: ProcessGroup) -> None:
    """Does what ``torch.nn.utils.clip_grad_norm_`` does. That keeps groups which the next size no longer has."""
    grads = [parameter.grad.to_local() for parameter in parameters]
    square = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(square, group=group)
    torch._foreach_mul_(grads, (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0))


def by_attach(
    workload: Gradients,
    group: ProcessGroup,
    training: Callable[[nn.Module], Step],
    shared: bool,
    **options: Any,
) -> Step:
    """Each rank steps all parameters or, if they are shared, its own shard, with these options."""
    model = copy.deepcopy(workload.model())  # whose weights are no views of one tensor
    optimizer = AdamW(model.parameters(), **SETTINGS)
    sync = fastsync.attach(model, process_group=group)
    if shared:
        fastsync.shard_optimizer(sync, optimizer, **options)

    def means() -> Tensor:
        return torch.cat([mean.reshape(-1) for mean in sync.averaged_gradients().values()])

    return OptimizerStep(
        training(model), lambda: clip_grad_norm_(sync, MAX_NORM, optimizer=optimizer), [optimizer], means
    )


def muon_by_attach(
    workload: Gradients, group: ProcessGroup, training: Callable[[nn.Module], Step], shared: bool
) -> Step:
    """As ``by_attach``, with a handle for each of the two optimizers. If they are shared, matrices have owners."""
    model = copy.deepcopy(workload.model())
    parts = _of_muon(list(model.parameters()))
    handles = [fastsync.attach(parameters, process_group=group) for parameters, _ in parts]
    for handle, (_, optimizer) in zip(handles, parts, strict=True):
        if shared:
            fastsync.shard_optimizer(handle, optimizer)

    def means() -> Tensor:
        of_parts = [handle.averaged_gradients().values() for handle in handles]
        mean_of = {
            id(parameter): mean
            for (parameters, _), of_part in zip(parts, of_parts, strict=True)
            for parameter, mean in zip(parameters, of_part, strict=True)
        }
        return torch.cat([mean_of[id(parameter)].reshape(-1) for parameter in model.parameters()])

    return OptimizerStep(training(model), lambda: None, [optimizer for _, optimizer in parts], means)


class BareMuon(Step):
    """One rank's step of all matrices, with the means. No backward."""

    def __init__(self, workload: Gradients, group: ProcessGroup) -> None:
        model, self._mean = copy.deepcopy(workload.model()), workload.mean
        parameters = list(model.parameters())
        for parameter, mean in zip(parameters, self._mean.float().split([p.numel() for p in parameters]), strict=True):
            parameter.grad = mean.view_as(parameter)
        self._optimizer = _of_muon(parameters)[0][1]

    def run(self) -> None:
        self._optimizer.step()

    def result(self) -> Tensor:
        return self._mean.float()


class BareCopy(Step):
    """Copies memory, whose reads and writes are this rank's share of ``LIMIT_BYTES`` a value. No backward."""

    def __init__(self, workload: Gradients, group: ProcessGroup) -> None:
        numel = -(-workload.flat_grads.numel() * LIMIT_BYTES // (8 * workload.world_size))
        self._source, self._copy = torch.ones(numel), torch.zeros(numel)
        self._mean = workload.mean

    def run(self) -> None:
        self._copy.copy_(self._source)

    def result(self) -> Tensor:
        return self._mean.float()
