"""``attach``, for trainers without DistributedDataParallel: one line, and every backward averages its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._checks import (
    MEAN_OF_USED,
    check_bool,
    check_op,
    is_positive,
    named_parameters,
    resolve_group,
    sparse_weights,
    with_gradients,
)
from .compression import AnyCompression
from .handles_in_use import check_free
from .ignored_states import IgnoredStates, States
from .in_ddp import check_not_in_ddp
from .micro_batches import MicroBatches
from .sent_buffers import SentBuffers
from .sync_weights import check_can_be_written
from .synchronizer import BUCKET_CAP_MB, GradientSynchronizer


def attach(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    overlap: bool = True,
    init_sync: bool = True,
    op: str = "mean",
    broadcast_buffers: bool = False,
    ignored_states: States = (),
    check_weights: bool = True,
    micro_batches: int | None = None,
) -> GradientSynchronizer:
    """Makes a trainer data-parallel: from now on, when ``backward()`` returns, every ``.grad`` is the mean over ranks.

    The model stays as it is, and so does the optimizer; with ``shard_optimizer`` each rank then steps a shard of it.
    Call it on every rank once the model is on its device. Ranks must make several calls in the same order. Every rank
    must run the same number of backwards that reach any of the parameters. A parameter without a gradient on this rank
    counts as zeros if another rank has one; see ``op`` for another mean. It keeps ``grad is None`` if no rank has one.
    Parameters that the model gets later are not averaged. An optimizer that steps one raises RuntimeError: detach and
    attach again.

    Gradients of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True`` stay sparse: each rank sends the rows
    that it has, and ``.grad`` gets the rows of all ranks, coalesced. They travel at the end of backward. On a GPU the
    host then waits for them.

    Args:
        module_or_params: a model, which stays attached as long as it lives, or some parameters, until ``detach()``.
        compression: a wire (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"lowrank"``), a wire with
            error feedback (``"int8+ef"``), or ``"auto"``, which measures the group and chooses. See ``AnyCompression``.
            A single rank rounds as well.
        bucket_cap_mb: how large a bucket gets, in MiB. Smaller ones start earlier and cost more latency.
        process_group: the group to average over, or a one-dimensional ``DeviceMesh``; None for the default group. Pass
            a new group if backward has other collectives, such as SyncBatchNorm's, and ranks may miss gradients.
        overlap: send during ``backward()``. If false, call ``synchronize()`` after it, or after a pipeline's step.
        init_sync: first give every rank the parameters and buffers of the group's rank 0.
        op: ``"mean"``, or ``"sum"`` for a loss that is divided by the number of samples of all ranks. A second backward
            adds the new gradients of all ranks to the first sum. ``"mean_of_used"`` is the mean over the ranks that
            have a new gradient of the parameter, as with experts that see no token on some ranks.
        broadcast_buffers: with each sync give all ranks the buffers of rank 0, for modules that had buffers at the
            start.
        ignored_states: modules, parameters and buffers of the model that are left to each rank, such as experts. They
            are not averaged, broadcast, clipped or compared, and ranks may have different ones.
        check_weights: compare samples of the parameters over the ranks. They are read right after an optimizer's step,
            the first one and one in 50, and travel beside the gradients of a later sync. Where they differ,
            ``backward()`` raises RuntimeError on every rank, and names the first parameter. Only ranks on like machines
            are compared, because others may round differently. Pass False if weights are meant to differ, as with
            ``nn.Embedding(max_norm=)``.
        micro_batches: how many micro-batches a step has, a power of two. Then a step gives the same bits on any number
            of ranks. Put forward and backward into ``for index in sync.micro_batches():``; nothing is sent before its
            end. It goes with ``compression="none"`` and ``op="mean"``, and with float32 and float64 parameters on one
            CPU or GPU.

    Raises:
        ValueError: an argument is refused, or the ranks hold different parameters or settings. Or a parameter is
            averaged already, or of a kind that fastsync does not handle.
    """
    if not is_positive(bucket_cap_mb):
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb!r}")
    check_op(op, MEAN_OF_USED)
    check_bool(broadcast_buffers, "broadcast_buffers")
    check_bool(check_weights, "check_weights")
    if broadcast_buffers and not isinstance(module_or_params, nn.Module):
        raise ValueError("broadcast_buffers: loose parameters have no buffers; pass their module")
    owner = module_or_params if isinstance(module_or_params, nn.Module) else None
    ignored = IgnoredStates(ignored_states, owner)
    given = named_parameters(module_or_params, "module_or_params", but=ignored.ids())
    named = with_gradients(given, "module_or_params")
    trained = {f"module_or_params: parameter {name}": p for name, p in named.items() if p.requires_grad}
    check_can_be_written(trained)
    check_free(named, "module_or_params")
    check_not_in_ddp(named, "module_or_params")
    group = resolve_group(process_group)
    sparse = sparse_weights(module_or_params)
    micro = None if micro_batches is None else MicroBatches(micro_batches, named)
    if micro is not None:
        _check_goes_with_micro_batches(op, sparse, broadcast_buffers, bool(ignored.ids()))
        overlap = False
    if op != "mean":
        _check_not_sparse([name for name, p in named.items() if p.requires_grad and id(p) in sparse], op)
        sparse = frozenset()  # they are frozen, and what they get once they are not is refused
    sync = GradientSynchronizer(named, compression, group, bucket_cap_mb, op, overlap, sparse, check_weights, micro)
    sync._ignored = ignored
    sync._without_gradients = {name: p for name, p in given.items() if name not in named}
    sync._buffers = None if owner is None else SentBuffers(owner, broadcast_buffers, ignored)
    sync._send_buffers()
    if init_sync:
        sync._init_sync()
    sync._engine.attach(list(named.values()), overlap)
    sync._keep(owner)
    return sync


def _check_goes_with_micro_batches(op: str, sparse: frozenset[int], broadcast_buffers: bool, ignores: bool) -> None:
    """Raises ValueError for an argument whose result would depend on the number of ranks."""
    why = "the result would depend on the number of ranks"
    if op != "mean":
        raise ValueError(f"op: with micro_batches expected 'mean', got {op!r}; {why}")
    if sparse:
        raise ValueError(f"micro_batches: an embedding has sparse=True, and {why}; use sparse=False")
    if broadcast_buffers:
        raise ValueError(f"broadcast_buffers: leave it out with micro_batches; {why}")
    if ignores:
        raise ValueError(f"ignored_states: leave it out with micro_batches; {why}")


def _check_not_sparse(names: Sequence[str], op: str) -> None:
    """Raises ValueError if ``op`` does not go with the sparse gradients of these parameters."""
    if names:
        way_out = "op='mean' and multiply the loss by the number of ranks, or use " if op == "sum" else ""
        raise ValueError(
            f"op: {op!r} does not go with sparse gradients, such as those of parameter {names[0]}; use {way_out}"
            "sparse=False in the embedding"
        )
