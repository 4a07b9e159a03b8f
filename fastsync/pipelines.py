"""Stages of ``torch.distributed.pipelining``: whose schedules change gradients where no hook sees it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

from torch import Tensor


def has_a_stage_of(parameters: Iterable[Tensor]) -> bool:
    """Tells whether any of them is part of a pipeline's stage.

    Where there may be stages it looks for them among all objects: call it once.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return False
    ours = {id(parameter) for parameter in parameters}
    stages = [each for each in gc.get_objects() if issubclass(type(each), module._PipelineStageBase)]
    return any(id(parameter) in ours for stage in stages for parameter in stage.submod.parameters())


def check_no_stage(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError where gradients of a pipeline's stage would be averaged as backward goes on."""
    if has_a_stage_of(parameters):
        raise ValueError(
            "overlap: these are the parameters of a pipeline's stage, whose schedule runs a backward for every "
            "micro-batch, or computes gradients past all hooks, as zero-bubble schedules do; use "
            "fastsync.attach(..., overlap=False), and call synchronize() after schedule.step()"
        )
