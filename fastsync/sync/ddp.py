"""Communication hooks for models wrapped in DistributedDataParallel."""

import weakref
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import _C
from .._checks import (
    MEAN_OF_USED,
    as_weight,
    check_bool,
    check_not_sharded,
    check_op,
    resolve_group,
    sparse_weights,
    without_compiler,
)
from .._torch_compat import (
    delays_parameters,
    has_comm_hook,
    has_python_reducer,
    names_ignored_by_ddp,
    version_of,
)
from ..autotune.choose import Candidate, in_engine
from .compression import AnyCompression, Compression
from .handle import SyncHandle, warn_of_generic_kernels
from .handles_in_use import begin_use, check_free, end_use, handles_of
from .machine import describe_machine
from .optimizer_steps import watch_optimizers
from .optimizer_watch import WatchedHandle, first_with_gradient


class HookState(SyncHandle):
    """Keeps the engine between steps for ``allreduce_hook``, ``fp16_compress_hook`` and ``bf16_compress_hook``.

    Pass one as the ``state`` of DDP's ``register_comm_hook`` to read the statistics of those hooks. With None or a
    process group they keep a state of their own. Use one state for each model, because statistics are of one backward
    at a time.

    Args:
        process_group: the group to average over; None for the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        # The state must not refer to the group, or _states would keep the group alive for good.
        self._engine: _C.HookState = _C.HookState(resolve_group(process_group))


class CommHook(HookState, WatchedHandle):
    """The handle of a hook that ``register_comm_hook`` put into a DDP model."""

    _engine: _C.HookState
    _claimed_by = (
        "by register_comm_hook on a DistributedDataParallel that has it; leave one of the two out. To attach a model "
        "that was wrapped, drop the wrapper first"
    )
    _made_by = "fastsync.register_comm_hook"
    _late_reason = (
        "it was frozen, or not there, when DistributedDataParallel took the model, and DDP decides then what it "
        "averages. Wrap the model again, and call register_comm_hook anew. If each rank is to have its own, name it in "
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
    )

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        compression: AnyCompression,
        process_group: dist.ProcessGroup,
        op: str = "mean",
        check_weights: bool = True,
    ) -> None:
        self._engine = _C.HookState(process_group, sums=op == "sum")
        self._steps_before = weakref.WeakKeyDictionary()
        # The first gradient of each optimizer's newest step, and its version.
        self._stepped_with: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Tensor], int]]
        self._stepped_with = weakref.WeakKeyDictionary()
        self._group = process_group
        self._module = ddp_model.module
        ignored: set[str] = getattr(ddp_model, "parameters_to_ignore", set())
        # DDP decides which parameters it averages when it wraps the model, and never again.
        averaged = {
            without_compiler(name): p
            for name, p in self._module.named_parameters()
            if p.requires_grad and name not in ignored
        }
        self._names, self._parameters = list(averaged), list(averaged.values())
        self._ids = frozenset(map(id, self._parameters))
        self._engine.compare_names(self._parameters, self._names)
        if check_weights:
            self._engine.compare_weights(self._parameters, self._names, describe_machine(self._parameters))
        sparse = sparse_weights(self._module)
        self._sparse = frozenset(name for name, parameter in averaged.items() if id(parameter) in sparse)
        self._ddp_model = weakref.ref(ddp_model)
        self.compression = compression
        if ddp_model not in _places:
            _places[ddp_model] = _C.HookPlace(ddp_model.reducer, ddp_model.process_group)
        _places[ddp_model].put(self._engine)
        if op == "sum":
            _C.HookState.watch_sums(self._engine, self._parameters)

    def set_weight(self, weight: float) -> None:
        """Weights this rank's gradients from the next sync on: ``.grad`` becomes ``sum(w * g) / sum(w)``.

        It means what ``GradientSynchronizer.set_weight`` does. With ``op="sum"`` the result is ``sum(w * g)``. Call it
        before ``backward()``, for the first time on every rank before the same step. Each step then waits for one small
        collective before its first bucket. In DDP's ``join`` a rank that has run out of batches has the weight 0.

        Args:
            weight: 0 or more, such as the number of the step's tokens.

        Raises:
            ValueError: it is not a number from 0 to 1e300.
            RuntimeError: it was set for this step already, and a backward has made gradients since, under ``no_sync``.
                If only some ranks set their first weight, the next step raises it on every rank.
        """
        self._engine.set_weight(as_weight(weight), self._parameters, self._names)

    def detach(self) -> None:
        """Gives the model back: from now on DDP averages gradients at full width, without the engine.

        DDP takes one hook, once, so a hook stays. It does what PyTorch's own ``allreduce_hook`` does: it divides, and
        all-reduces over DDP's process group. ``register_comm_hook`` may be called again. Call it on every rank, between
        two steps.

        Raises:
            RuntimeError: it was called inside a backward.
        """
        ddp_model = self._ddp_model()
        if ddp_model is not None and self in handles_of(ddp_model):
            _places[ddp_model].put(None)
        end_use(self)

    def join(self, *states: object) -> NoReturn:
        """Raises RuntimeError, because DDP has a join of its own."""
        raise RuntimeError(
            "fastsync: join() of a DistributedDataParallel is DDP's own; write `with ddp_model.join():`, or attach the "
            "model without the wrapper"
        )

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {without_compiler(name): parameter for name, parameter in self._module.named_parameters()}

    def _parameters_of_model(self) -> Iterable[tuple[str, Tensor]]:
        ignored = names_ignored_by_ddp(self._module)
        return ((name, parameter) for name, parameter in self._module.named_parameters() if name not in ignored)

    def _check_before_step(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError, too, if DDP has averaged no gradients since the optimizer's previous step.

        It raises as well if the optimizer steps a parameter of the model that DDP does not serve.
        """
        super()._check_before_step(optimizer)
        if self._averages():
            self._check_nothing_is_late(optimizer)
            if self._group.size() > 1 and any(True for _ in self._stepped_by(optimizer)):
                self._check_was_averaged(optimizer)

    def _averages(self) -> bool:
        ddp_model = self._ddp_model()
        return ddp_model is not None and ddp_model.require_backward_grad_sync  # false inside no_sync()

    def _way_to_average(self) -> str:
        return (
            "call the DistributedDataParallel model itself and not its .module, and give the model its device and "
            "dtype before you wrap it"
        )

    def _find_not_averaged(self, optimizer: Optimizer, is_synced: bool) -> tuple[Tensor, bool] | None:
        """Compares the gradients over the ranks if DDP has averaged none, because the user may have done it.

        A backward past DDP after one of DDP's is not found here: it may be a regulariser's, whose gradients are the
        same on all ranks. Where they are not, the ranks' weights differ after the step, see ``check_weights``.
        """
        if is_synced:
            return None
        stepped = list(self._stepped_by(optimizer))
        first = first_with_gradient(stepped)
        if first is None:
            return None
        gradient, version = self._stepped_with.get(optimizer, (None, 0))
        if (
            first.grad is not None
            and gradient is not None
            and gradient() is first.grad
            and version == version_of(first.grad)
        ):
            return first, False  # it has stepped with these gradients
        name_of = {id(parameter): name for name, parameter in zip(self._names, self._parameters, strict=True)}
        difference = _C.compare_gradients(self._group, stepped, [name_of[id(each)] for each in stepped])
        return None if difference == "" else (first, True)

    def _note_step(self, optimizer: Optimizer) -> None:
        super()._note_step(optimizer)
        for parameter in self._stepped_by(optimizer):
            if parameter.grad is not None:
                self._stepped_with[optimizer] = weakref.ref(parameter.grad), version_of(parameter.grad)
                break

    def _claimed_parameters(self) -> list[nn.Parameter]:
        return [] if self._ddp_model() is None else self._parameters

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients the hook averages."""
        return self._parameters


_places: "weakref.WeakKeyDictionary[DistributedDataParallel, _C.HookPlace]" = weakref.WeakKeyDictionary()
"""The place of our hook in each model that has one, or had."""

# The compressions of the hooks that DDP calls for one bucket at a time.
_COMPRESSIONS = {wire: in_engine([Candidate(Compression(wire))]) for wire in ("none", "fp16", "bf16")}


def register_comm_hook(
    ddp_model: DistributedDataParallel,
    compression: AnyCompression = "none",
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    op: str = "mean",
    check_weights: bool = True,
) -> CommHook:
    """Puts fastsync's C++ hook into a DDP model: from the next backward on, its buckets go through the engine.

    No Python runs per bucket and the GIL is not held. Call it on every rank, before the first backward. DDP averages
    the parameters that existed, and were not frozen, when it wrapped the model. An optimizer that steps another
    parameter of the model raises RuntimeError: wrap the model again, and register the hook anew.

    An optimizer's step outside ``no_sync`` also raises RuntimeError if DDP has averaged no gradients since its previous
    step, and samples of them differ between the ranks. So it was a backward past DDP, such as that of
    ``ddp_model.module(x)``. Gradients that you average by hand may step. All ranks have to step alike: a rank that
    steps such gradients alone waits for the others for 30 seconds. A backward past DDP that follows one of DDP's is not
    refused. If its gradients differ between ranks, so do the weights, see ``check_weights``.

    Args:
        ddp_model: the wrapped model.
        compression: as in ``attach``.
        process_group: the group to average over, or a one-dimensional ``DeviceMesh``; None for the model's own.
        op: ``"mean"``, or ``"sum"`` for a loss that is divided by the number of samples of all ranks. A backward that
            would add to the sums of the step before raises RuntimeError: call ``zero_grad()`` first.
        check_weights: as in ``attach``.

    Returns:
        The hook's handle: its statistics, its state for checkpoints, its weight, and its compression, which may be
        changed later. ``detach()`` gives the model back.

    Raises:
        ValueError: an argument is refused, or the model has a hook already or is attached. Or DDP was told to send some
            parameters past its hook, or to leave some buckets out. Or fastsync does not handle a parameter: complex
            gradients with a 16-bit wire, dtypes such as float8.
        RuntimeError: DDP uses its Python reducer, which would skip a C++ hook silently.
    """
    if isinstance(ddp_model, nn.Module):
        check_not_sharded(dict(ddp_model.named_parameters()), "ddp_model")
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ValueError(
            f"ddp_model: expected a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}; "
            "wrap the model first, or use fastsync.attach, which needs no wrapper"
        )
    if handles_of(ddp_model) or has_comm_hook(ddp_model):
        raise ValueError(
            "ddp_model: it has a communication hook already, and DDP takes one, once (mixed_precision is one, too); to "
            "change the compression, set .compression of the CommHook that the first register_comm_hook returned"
        )
    if has_python_reducer(ddp_model):
        raise RuntimeError(
            "ddp_model: DDP was built with torch._dynamo.config.optimize_ddp='python_reducer', which runs Python hooks "
            "only and would skip this one silently; use optimize_ddp='ddp_optimizer', or register "
            "fastsync.fp16_compress_hook and its like through ddp_model.register_comm_hook"
        )
    if getattr(ddp_model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "ddp_model: it was built with skip_all_reduce_unused_params, which keeps buckets from the hook, so that it "
            "cannot tell where a backward begins; build it without (find_unused_parameters alone is fine)"
        )
    if delays_parameters(ddp_model):
        raise ValueError(
            "ddp_model: it was built with delay_all_reduce_named_params, which sends these parameters past the hook; "
            "build it without"
        )
    named = dict(ddp_model.module.named_parameters())
    group = resolve_group(ddp_model.process_group if process_group is None else process_group)
    check_free(named, "ddp_model")
    if op == MEAN_OF_USED:
        raise ValueError(
            f"op: {op!r} needs fastsync.attach. DDP hands over zeros for a parameter without a gradient, so nobody can "
            "tell which ranks have one"
        )
    check_op(op)
    check_bool(check_weights, "check_weights")
    hook = CommHook(ddp_model, compression, group, op, check_weights)
    begin_use(hook, [ddp_model], kept_by=[ddp_model])
    watch_optimizers()
    return hook


def allreduce_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket at full width. The drop-in for PyTorch's ``default_hooks.allreduce_hook``.

    Args:
        state: None for the default process group, a ``ProcessGroup``, or a ``HookState``.
        bucket: handed over by DDP.

    Returns:
        A future of the averaged bucket buffer.
    """
    return _run(state, bucket, "none")


def fp16_compress_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as float16 that cannot overflow. The drop-in for PyTorch's ``fp16_compress_hook``.

    See ``allreduce_hook`` for the arguments.
    """
    return _run(state, bucket, "fp16")


def bf16_compress_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as bfloat16, on Gloo as on NCCL. The drop-in for PyTorch's ``bf16_compress_hook``.

    See ``allreduce_hook`` for the arguments.
    """
    return _run(state, bucket, "bf16")


# DDP refuses any hook of the name "bf16_compress_hook" where NCCL is missing; this one does not need it.
bf16_compress_hook.__name__ = "fastsync_bf16_compress_hook"


def _run(state: object, bucket: GradBucket, wire: str) -> torch.futures.Future[Tensor]:
    found = _state_for(state)
    warn_of_generic_kernels(bucket.buffer().device.type)
    return found._engine.run(bucket, _COMPRESSIONS[wire])


_states: "weakref.WeakKeyDictionary[dist.ProcessGroup, HookState]" = weakref.WeakKeyDictionary()


def _state_for(state: object) -> HookState:
    if isinstance(state, HookState):
        return state
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise ValueError(
            f"state: expected None, a ProcessGroup or a fastsync.sync.ddp.HookState, got {type(state).__name__}; it is "
            "the first argument of ddp_model.register_comm_hook"
        )
    group = resolve_group(state)
    if group not in _states:
        _states[group] = HookState(group)
    return _states[group]
