"""Fused CPU operators (csrc/ppo). They replace plain functions and layers that they were proven equal to.

An operator replaces a function under ``@Operator`` only while the function's source has the fingerprint noted here;
``tests/ppo/test_ops.py`` compares the two. An operator replaces a ``torch.nn.Sequential`` only while it consists of
small linear layers with tanh between them, without hooks. Everything else runs as it is written.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .. import _ppo  # noqa: F401 registers torch.ops.fastsync.*

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""The metrics that ``ppo_loss`` returns."""

SMALL = 1 << 16
"""The most weights of a layer that an operator computes."""

_is_enabled = True
_ran: dict[str, bool] = {}
"""Whether the operator ran at the last call, by the names of functions and layers."""


def enable(enabled: bool, own: Sequence[Callable[..., Any]] = ()) -> None:
    """With False no operator replaces a function from now on. ``what_ran`` names functions in ``own``, too."""
    global _is_enabled, _ran
    _is_enabled = enabled
    _ran = {getattr(each, "__name__", repr(each)): False for each in own if not isinstance(each, Operator)}


def what_ran() -> str:
    """Returns a sentence: for which functions and layers operators ran, and for which plain PyTorch."""
    by_operator = ", ".join(name for name, is_fused in _ran.items() if is_fused)
    plain = ", ".join(name for name, is_fused in _ran.items() if not is_fused)
    if not by_operator:
        return "everything runs in plain PyTorch"
    return f"fused operators run for {by_operator}; plain PyTorch runs for everything else{plain and f': {plain}'}"


def _ppo_loss(new: Any, batch: Any, settings: Any, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = torch.ops.fastsync.ppo_objective.default(
        new.log_prob, new.entropy, new.values, batch.log_probs, batch.advantages, batch.values, batch.returns,
        batch.weights, settings.clip_coef * remaining if settings.anneal_clip else settings.clip_coef,
        settings.vf_coef, settings.ent_coef, settings.clip_value_loss,
    )  # fmt: skip
    return loss, dict(zip(METRICS, metrics.unbind(), strict=True))


_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ppo_loss": ("03ae43829a136a04", _ppo_loss),
    "categorical": ("6de9fae8a7ad79cb", torch.ops.fastsync.categorical.default),
}
"""By the name of a plain function: the fingerprint that the operator was proven equal to, and the operator."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Hashes a function's source without decorators, docstring and comments. Empty if there is no source."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError):
        return ""
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    text = ast.unparse(definition.args) + "".join(map(ast.unparse, definition.body))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Result = TypeVar("Result")


class Operator(Generic[Result]):
    """Decorates a plain function. A call runs its operator if that computes the same, else the function."""

    def __init__(self, plain: Callable[..., Result]) -> None:
        functools.update_wrapper(self, plain)
        self.plain = plain
        self._proven, self._operator = _OPERATORS[plain.__name__]

    @functools.cached_property
    def is_proven(self) -> bool:
        """Whether the operator was proven equal to the function as it is written now."""
        return fingerprint(self.plain) == self._proven

    def __call__(self, *args: Any) -> Result:
        tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
        can = _is_enabled and self.is_proven and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
        _ran[self.plain.__name__] = can
        return self._operator(*args) if can else self.plain(*args)


class Perceptron(nn.Sequential):
    """Linear layers with tanh between them, which one operator computes if it can; see ``fuse``.

    Calling small layers one by one takes longer than computing them. They run layer by layer under autocast, which
    casts in each layer, under torch.compile, off CPUs, in float64, and as soon as a layer has another type or hooks.
    """

    name = "layers"  # in the policy

    def forward(self, rows: Tensor) -> Tensor:
        """[..., outputs] of [..., inputs]."""
        layers = list(self._modules.values())
        can = rows.dtype is torch.float32 and rows.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        can = can and not torch.compiler.is_compiling() and _alternate(layers)
        _ran[self.name] = can
        if not can:
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        # Reading the layers' dicts is faster than their attributes.
        linear = [layer._parameters for layer in layers[::2]]
        weights, biases = [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]
        outputs: Tensor = torch.ops.fastsync.perceptron.default(rows, weights, biases)
        return outputs


def _alternate(layers: list[Any]) -> bool:
    """Returns whether these are linear layers with biases and tanh between them, without hooks."""
    for index, layer in enumerate(layers):
        if type(layer) is not (nn.Tanh if index % 2 else nn.Linear):
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
        if layer._parameters.get("bias", 0) is None:  # a linear layer without bias
            return False
    return len(layers) % 2 == 1


def fuse(policy: nn.Module) -> None:
    """Makes each ``nn.Sequential`` in a policy a ``Perceptron`` if an operator can compute it.

    Its weights have to fit into a core's second-level cache. With larger ones libraries are faster.
    """
    for name, module in policy.named_modules():
        layers = list(module.children())
        can = type(module) is nn.Sequential and _alternate(layers)
        if can and all(layer.weight.numel() <= SMALL for layer in layers[::2]):
            module.__class__, module.name = Perceptron, name
