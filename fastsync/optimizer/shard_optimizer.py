"""``shard_optimizer``: the ranks step one optimizer together, each its own shard."""

from __future__ import annotations

from weakref import WeakSet

from torch.optim import Optimizer

from .._checks import check_bool
from ..sync.join import is_in_join
from ..sync.optimizer_steps import from_outside_in
from ..sync.outer_in_use import check_no_outer
from ..sync.synchronizer import GradientSynchronizer
from .checks import WAY_OUT, check_attached, check_can_wait, check_compression, check_dense, check_optimizer
from .masters import PARAMETER_WIRES, check_masters
from .shards import OptimizerShards

_given: WeakSet[GradientSynchronizer] = WeakSet()
"""The handles that an optimizer was sharded for. On a single rank nothing else tells."""


def shard_optimizer(
    sync: GradientSynchronizer,
    optimizer: Optimizer,
    *,
    master_weights: bool = False,
    parameter_compression: str = "none",
    overlap_gather: bool = False,
) -> None:
    """Lets the ranks step an optimizer together, each its own shard of the parameters that ``attach`` was given.

    Call it on every rank, after ``attach`` and before the first backward. From then on:

    - ``.grad`` stays this rank's own, which ``attach`` alone makes the mean. ``sync.averaged_gradients()`` returns the
      means, and ``sync.grad_stats()`` and ``clip_grad_norm_`` go by them.
    - ``optimizer.step()`` steps this rank's shard with its means. It waits for the other ranks. On a GPU the host does
      not, and a difference between ranks is an error one step later.
    - CPU ranks of a host have one copy of parameters and state: what one rank writes to a parameter, all see. Ranks
      that share no memory, and those on GPUs, have all parameters, and the state of their own shard.
    - ``optimizer.state_dict()`` has the whole state. Where ranks share no memory every rank has to call it.

    ``sync`` remains the handle, and its ``detach()`` ends this, too. For several optimizers attach the parameters of
    each apart. On a single rank it changes nothing without masters.

    Args:
        sync: what ``attach`` has returned, with ``op="mean"``.
        optimizer: one of torch's of these parameters whose step is elementwise, such as AdamW or SGD, or Muon, of
            which each matrix is stepped by one rank. Or one that ``fastsync.optimizer.register_elementwise`` or
            ``register_tensorwise`` was told of, or a wrapper of one.
        master_weights: give each bfloat16 and float16 parameter a float32 master, and its state float32, too. Then
            ``optimizer`` steps the masters, and the parameters are their roundings. A single rank does so as well.
        parameter_compression: how new float32 parameters travel: ``"none"``, or ``"bf16"`` for half the bytes. With
            ``"bf16"`` they have float32 masters, and each step rounds them to what bfloat16 holds, on every rank, also
            where no bytes travel.
        overlap_gather: let ``optimizer.step()`` return while new parameters are on their way to ranks that share no
            memory. Whatever uses a parameter first waits for it: a layer's forward, ``state_dict()``, an operation.
            Compiled code, ``torch.func``, nested tensors and extensions in C++ cannot wait. The guide lists these, and
            ``sync.wait_for_parameters()`` comes before them. Rows on their way take as many bytes as the parameters, or
            half of them with ``"bf16"``. Where ranks share memory it changes nothing.

    Raises:
        ValueError: an argument is refused, and ``sync`` is as it was before. Or the ranks were given different
            optimizers or settings. A rank that has not called it gets this error in its first backward.
        RuntimeError: another rank did not take part in time, or is lost. With ``overlap_gather`` what uses a parameter
            raises it, too.
    """
    check_attached(sync)
    if sync in _given:
        raise ValueError(
            "sync: it steps an optimizer already. Call sync.detach(), attach again, and pass that handle, on every "
            "rank. For several optimizers attach the parameters of each apart"
        )
    if is_in_join():
        raise ValueError(f"sync: inside join() ranks that step together would wait for each other. {WAY_OUT}")
    check_bool(master_weights, "master_weights")
    check_bool(overlap_gather, "overlap_gather")
    if not isinstance(parameter_compression, str) or parameter_compression not in PARAMETER_WIRES:
        raise ValueError(f"parameter_compression: expected 'none' or 'bf16', got {parameter_compression!r}")
    parameter_wire = PARAMETER_WIRES[parameter_compression]
    if overlap_gather:
        check_can_wait(sync)
    named = sync._named_parameters()
    inner = check_optimizer(optimizer, named)
    check_dense(sync)
    check_compression(sync.compression)
    has_masters = master_weights or parameter_wire is not None
    if has_masters:
        check_masters(inner, named)
    if sync._group.size() > 1 or has_masters:
        check_no_outer(named.values(), "sync", f"ranks that step shards cannot each change weights. {WAY_OUT}")
        if sync._is_in_elastic():
            raise ValueError(f"sync: an Elastic trains with it, and a lost rank would take its shard along. {WAY_OUT}")
        wrappers = from_outside_in(optimizer)[:-1]
        shards = OptimizerShards(sync, inner, master_weights, parameter_wire, overlap_gather, wrappers)
        shards.begin()
        sync._optimizer_shards = shards
    _given.add(sync)
