"""The way in for models wrapped in DistributedDataParallel: communication hooks."""

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from . import _C
from .compression import Compression, as_compression
from .reference import MAX_SCALE_EXPONENT
from .stats import GradStats, SyncStats

_GRAD_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)


class HookState:
    """What the engine keeps between steps for ``allreduce_hook``, ``fp16_compress_hook`` and ``bf16_compress_hook``.

    Pass one as the ``state`` of DDP's ``register_comm_hook`` to read the statistics of those hooks; passing None or a
    process group makes them keep a state of their own. One model, one state: statistics are of one backward at a time.

    Args:
        process_group: the group to average over; None for the default group.
        module: the model whose parameters ``state_dict`` names; not needed otherwise.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, module: nn.Module | None = None) -> None:
        self._engine = _C.HookState(_resolve_group(process_group))
        self._module = module

    @property
    def grad_stats(self) -> GradStats:
        """Statistics of the newest backward that was synchronised. Raises RuntimeError before the first."""
        return GradStats.from_rows(self._engine.grad_stats())

    def stats(self) -> SyncStats:
        """What synchronisation has cost so far. On a GPU, steps the device has not finished yet are estimated."""
        return SyncStats.from_totals(self._engine.totals())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped: each parameter's fp16 scale, by name.

        The scales are equal on all ranks. Reads them on the host, so it waits for the device.
        """
        scale_of = {id(parameter): scale for parameter, scale in self._engine.scales()}
        named = self._named_parameters()
        return {"scales": {name: scale_of[id(p)] for name, p in named.items() if id(p) in scale_of}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the scales of ``state_dict()``. Call it on every rank, with the same state.

        Raises:
            ValueError: it is no state of a hook, a name is no parameter of the model, or a scale is not a power of two
                within ``2**±reference.MAX_SCALE_EXPONENT``.
        """
        named = self._named_parameters()
        scales = state_dict.get("scales") if isinstance(state_dict, dict) else None
        if not isinstance(scales, dict):
            got = f"keys {list(state_dict)[:3]}" if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"state_dict: expected what state_dict() returns, a dict with 'scales', got {got}")
        for name, scale in scales.items():
            if name not in named:
                raise ValueError(f"state_dict: the model has no parameter named {name!r}; is it another model's state?")
            if not _is_scale(scale):
                raise ValueError(
                    f"state_dict: the scale of {name!r} is {scale!r}, not a power of two from 2**-{MAX_SCALE_EXPONENT} "
                    f"to 2**{MAX_SCALE_EXPONENT}"
                )
        self._engine.set_scales([(parameter, scales[name]) for name, parameter in named.items() if name in scales])

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        if self._module is None:
            raise ValueError("this HookState does not know its model: create it with HookState(module=model)")
        return dict(self._module.named_parameters())


class CommHook(HookState):
    """The handle of a hook that ``register_comm_hook`` put into a DDP model."""

    def __init__(
        self, ddp_model: DistributedDataParallel, compression: Compression, process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(process_group, module=ddp_model.module)
        ignored: set[str] = getattr(ddp_model, "parameters_to_ignore", set())
        # DDP too decides once, when it wraps a model, which parameters it serves.
        self._parameters = [
            p for name, p in self._named_parameters().items() if p.requires_grad and name not in ignored
        ]
        self._claimed_step = -1
        self.compression = compression
        _C.register_hook(ddp_model.reducer, self._engine)

    @property
    def compression(self) -> Compression:
        """What travels. May be set, to a ``Compression`` or its shorthand, between steps: on all ranks at the same."""
        return self._compression

    @compression.setter
    def compression(self, compression: Compression | str) -> None:
        chosen = as_compression(compression)
        _check_parameters(self._named_parameters(), chosen)
        self._compression = chosen
        self._engine.set_wire(chosen.wire)

    def claim_norm(self) -> None:
        """Marks the newest norm as used up, for clipping: it is no longer that of the gradients.

        Raises:
            RuntimeError: it has been used up, and no backward was synchronised since.
        """
        num_steps = self._engine.num_steps()
        if num_steps == self._claimed_step:
            raise RuntimeError(
                "fastsync.clip_grad_norm_: no backward was synchronised since these gradients were clipped, so their "
                "norm is not known; clip once after each synchronised backward (the norm before clipping stays in "
                "hook.grad_stats), or use torch.nn.utils.clip_grad_norm_"
            )
        self._claimed_step = num_steps

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients the hook averages."""
        return self._parameters


_registered: "weakref.WeakKeyDictionary[nn.Module, CommHook]" = weakref.WeakKeyDictionary()


def register_comm_hook(
    ddp_model: DistributedDataParallel,
    compression: Compression | str = "none",
    *,
    process_group: dist.ProcessGroup | None = None,
) -> CommHook:
    """Puts fastsync's C++ hook into a DDP model: from the next backward on, its buckets go through the engine.

    No Python runs per bucket and the GIL is not held. Call it on every rank, before the first backward.

    Args:
        ddp_model: the wrapped model.
        compression: what travels, a ``Compression`` or its shorthand ``"none"``, ``"bf16"``, ``"fp16"``.
        process_group: the group to average over; None for the model's own.

    Returns:
        The hook's handle: its statistics, its state for checkpoints, and its compression, which may be changed later.

    Raises:
        ValueError: an argument is not what it should be, the model has a hook already, it holds what the engine does
            not handle (sparse gradients, complex parameters with a 16-bit wire, dtypes such as float8), or DDP was told
            to send some parameters past its hook or to leave some buckets out.
        RuntimeError: DDP runs in the mode compiled with the Python reducer, which would skip a C++ hook silently.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ValueError(
            f"ddp_model: expected a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}; "
            "wrap the model first"
        )
    if ddp_model.mixed_precision is not None:
        raise ValueError(
            "ddp_model: it was built with mixed_precision, for which DDP registers a hook of its own; use "
            "torch.autocast and compression instead"
        )
    if ddp_model in _registered or ddp_model._comm_hooks:
        raise ValueError(
            "ddp_model: it has a communication hook already, and DDP takes one, once; to change what travels, set "
            ".compression of the CommHook that the first register_comm_hook returned"
        )
    if ddp_model._use_python_reducer:
        raise RuntimeError(
            "ddp_model: DDP was built with torch._dynamo.config.optimize_ddp='python_reducer', which runs Python hooks "
            "only and would skip this one silently; use optimize_ddp='ddp_optimizer', or register "
            "fastsync.fp16_compress_hook and its like through ddp_model.register_comm_hook"
        )
    _check_options(ddp_model)
    _check_dense(ddp_model.module)
    _check_parameters(dict(ddp_model.module.named_parameters()), as_compression(compression))
    group = _resolve_group(ddp_model.process_group if process_group is None else process_group)
    _check_group(group, ddp_model.module)
    hook = CommHook(ddp_model, as_compression(compression), group)
    _registered[ddp_model] = hook
    return hook


def allreduce_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket at full width. The drop-in for PyTorch's ``default_hooks.allreduce_hook``.

    Args:
        state: None for the default process group, a ``ProcessGroup``, or a ``HookState``.
        bucket: handed over by DDP.

    Returns:
        A future of the averaged bucket buffer.
    """
    return _state_for(state)._engine.run(bucket, "none")


def fp16_compress_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as float16 that cannot overflow. The drop-in for PyTorch's ``fp16_compress_hook``.

    See ``allreduce_hook`` for the arguments.
    """
    return _state_for(state)._engine.run(bucket, "fp16")


def bf16_compress_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as bfloat16, on Gloo as on NCCL. The drop-in for PyTorch's ``bf16_compress_hook``.

    See ``allreduce_hook`` for the arguments.
    """
    return _state_for(state)._engine.run(bucket, "bf16")


# DDP refuses any hook of the name "bf16_compress_hook" where NCCL is missing; this one does not need it.
bf16_compress_hook.__name__ = "fastsync_bf16_compress_hook"

_states: "weakref.WeakKeyDictionary[dist.ProcessGroup, HookState]" = weakref.WeakKeyDictionary()


def _state_for(state: object) -> HookState:
    if isinstance(state, HookState):
        return state
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise ValueError(
            f"state: expected None, a ProcessGroup or a fastsync.HookState, got {type(state).__name__}; it is the "
            "first argument of ddp_model.register_comm_hook"
        )
    group = _resolve_group(state)
    if group not in _states:
        _states[group] = HookState(group)
    return _states[group]


def _resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if process_group is not None:
        raise ValueError(
            f"process_group: expected a ProcessGroup that this rank is a member of, or None, got {process_group!r}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "process_group: None stands for the default group, and there is none yet; call "
            "torch.distributed.init_process_group first"
        )
    default = dist.group.WORLD
    assert default is not None
    return default


def _is_scale(scale: object) -> bool:
    if not isinstance(scale, float):
        return False
    fraction, exponent = math.frexp(scale)
    return fraction == 0.5 and abs(exponent - 1) <= MAX_SCALE_EXPONENT


def _check_options(ddp_model: DistributedDataParallel) -> None:
    if getattr(ddp_model, "_delay_all_reduce_params", []):
        raise ValueError(
            "ddp_model: it was built with delay_all_reduce_named_params, whose gradients DDP averages past its hook; "
            "build it without"
        )
    if getattr(ddp_model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "ddp_model: it was built with skip_all_reduce_unused_params, which keeps buckets from the hook, so that it "
            "cannot tell where a backward begins; build it without (find_unused_parameters alone is fine)"
        )


def _check_dense(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"ddp_model: {name}.weight gets sparse gradients ({type(child).__name__} with sparse=True), which "
                "fastsync does not handle; build it with sparse=False"
            )


def _check_parameters(named: dict[str, nn.Parameter], compression: Compression) -> None:
    for name, parameter in named.items():
        if not parameter.requires_grad or parameter.dtype in _GRAD_DTYPES:
            continue
        if parameter.dtype not in _COMPLEX_DTYPES:
            raise ValueError(
                f"ddp_model: parameter {name} is {parameter.dtype}; fastsync handles float32, float64, float16, "
                "bfloat16 and complex gradients"
            )
        if compression.wire != "none":
            raise ValueError(
                f"compression: {compression.wire!r} cannot carry parameter {name}, which is {parameter.dtype}; use "
                "compression='none' for models with complex parameters"
            )


def _check_group(group: dist.ProcessGroup, module: nn.Module) -> None:
    have = {device.type for device in group._device_types}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.device.type not in have:
            raise ValueError(
                f"process_group: it serves {', '.join(sorted(have))}, but parameter {name} is on {parameter.device}; "
                "use a group whose backend does (Gloo for cpu, NCCL for cuda)"
            )
