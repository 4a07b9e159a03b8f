"""A tensor that wraps other tensors, and an optimizer that wraps another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map


class Weight(torch.Tensor):
    """8 bits and a scale. It has no memory of its own."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, q: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale


class Quantised(Weight):
    """One that tells what is inside."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Tensor:
        return Quantised(inner["q"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].q, args[0].scale)
        return func(*tree_map(lambda t: t.q.float() * t.scale if isinstance(t, Quantised) else t, args), **kwargs or {})


class Opaque(Weight):
    """One that does not tell what is inside, and lets few of torch's operations through."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale)
        if func is not torch.ops.aten.t.default:
            raise NotImplementedError(f"Opaque dispatch: {func}")
        return (args[0].q.float() * args[0].scale).t()


class OpaqueOfLibrary(Opaque):
    """As a library's base class has it, whose subclasses are meant to tell."""

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("subclasses should implement this")


class OpaqueWithoutPointer(Opaque):
    """As torch's own tensors without memory have it."""

    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")


class OptimizerWrapper(Optimizer):
    """Steps another optimizer, whose groups it shares. It has no hooks of its own, as Accelerate's has none."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)
