"""Moves an attached engine to another process group, with its settings and what it keeps between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from .synchronizer import GradientSynchronizer


def move_to_group(sync: GradientSynchronizer, group: dist.ProcessGroup, ranks_per_node: int | None) -> None:
    """As ``GradientSynchronizer.use_group``, for parameters that the group serves."""
    state, growth = sync.state_dict(), group.size() / sync._group.size()
    before = sync._engine, sync._group, sync._ranks_per_node
    try:
        sync._begin(group, ranks_per_node, sync._asked)
    except BaseException:  # the group is too small for the compression, or could not be measured
        sync._engine, sync._group, sync._ranks_per_node = before
        raise
    before[0].detach()
    sync._called_step = sync._claimed_step = -1
    sync._engine.set_enabled(sync._is_enabled)
    if sync._overlaps:
        sync._engine.attach(list(sync._named.values()))
    if sync._weight is not None:
        sync._engine.set_weight(sync._weight)
    sync._follow_buffers()
    _rescale(state["residuals"], sync._op, growth)
    sync.load_state_dict(state)  # first, so that nothing is lost where rank 0 does not answer
    of_rank_0 = [(state["step"], state["scales"])]
    dist.broadcast_object_list(of_rank_0, group=group, group_src=0)
    step, scales = of_rank_0[0]
    # Others than ours are told to all ranks at the next sync.
    ours = [(sync._named[name], scale) for name, scale in scales.items() if name in sync._named]
    sync._engine.set_step(step)
    sync._engine.set_scales(ours)


def _rescale(residuals: dict[str, Any], op: str, growth: float) -> None:
    """Has what is not sent yet add as much to the mean, or the sum, as it would have in a group of another size."""
    for residual in residuals.values():
        if op == "mean":
            residual["own"] *= growth
        elif residual["of_sums"] is not None:
            residual["of_sums"] /= growth  # the engine keeps it of means
