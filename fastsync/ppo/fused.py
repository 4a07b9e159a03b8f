"""Operators for CPUs (csrc/ppo) in the place of plain functions and layers: of those that they were proven equal to.

A function that ``@Operator`` marks is computed by its operator only while its source is the one whose fingerprint is
noted here; ``tests/ppo/test_ops.py`` holds the two against each other. A ``torch.nn.Sequential`` is, only while it is
small linear layers with tanh between them, and nothing hangs on them. All else runs as it is written.
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

FIGURES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""What ``ppo_loss`` tells of a minibatch."""

SMALL = 1 << 16
"""The most weights of a layer that an operator computes."""

_is_enabled = True


def enable(enabled: bool) -> None:
    """With False no operator takes the place of a function from now on. Of layers ``fuse`` decides."""
    global _is_enabled
    _is_enabled = enabled


def _ppo_loss(new: Any, batch: Any, settings: Any, remaining: float) -> tuple[Tensor, dict[str, Tensor]]:
    loss, figures = torch.ops.fastsync.ppo_objective.default(
        new.log_prob, new.entropy, new.values, batch.log_probs, batch.advantages, batch.values, batch.returns,
        batch.weights, settings.clip_coef * remaining if settings.anneal_clip else settings.clip_coef,
        settings.vf_coef, settings.ent_coef, settings.clip_value_loss,
    )  # fmt: skip
    return loss, dict(zip(FIGURES, figures.unbind(), strict=True))


_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ppo_loss": ("96fb5015d0cc69c3", _ppo_loss),
    "discounted_sums": ("d7ea576ac0b5eb02", torch.ops.fastsync.discounted_sums.default),
    "categorical": ("6de9fae8a7ad79cb", torch.ops.fastsync.categorical.default),
}
"""By the name of the plain function: the fingerprint of what the operator was proven equal to, and the operator."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Of what a function does: its source without decorators, docstring and comments. Empty where there is none."""
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
    """A plain function that is marked by this, and an operator that computes the same where it can."""

    def __init__(self, plain: Callable[..., Result]) -> None:
        functools.update_wrapper(self, plain)
        self.plain = plain
        self._proven, self._operator = _OPERATORS[plain.__name__]

    @functools.cached_property
    def is_proven(self) -> bool:
        """Whether the function is still the one that the operator was proven equal to."""
        return fingerprint(self.plain) == self._proven

    def __call__(self, *args: Any) -> Result:
        tensor = args[0] if isinstance(args[0], Tensor) else args[0][0]
        if _is_enabled and self.is_proven and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
            return self._operator(*args)  # type: ignore[no-any-return]
        return self.plain(*args)


class Perceptron(nn.Sequential):
    """Linear layers with tanh between them, by one operator where it can: see ``fuse``.

    Small layers take less time to compute than to call one by one, forward and backward. It is layer by layer under
    autocast, whose casts belong to each, while it is traced, off CPUs, in float64, and as soon as a layer is of another
    type or has hooks.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """[..., outputs] of [..., inputs]."""
        layers = list(self._modules.values())
        is_plain = rows.dtype is torch.float32 and rows.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if not is_plain or torch.compiler.is_compiling() or not _alternate(layers):
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        # Where the layers keep their parameters, which is quicker than to ask the layers.
        linear = [layer._parameters for layer in layers[::2]]
        weights, biases = [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]
        outputs: Tensor = torch.ops.fastsync.perceptron.default(rows, weights, biases)
        return outputs


def _alternate(layers: list[Any]) -> bool:
    """Whether they are linear layers with tanh between them, on which nothing hangs."""
    for index, layer in enumerate(layers):
        if type(layer) is not (nn.Tanh if index % 2 else nn.Linear):
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    return len(layers) % 2 == 1


def fuse(policy: nn.Module) -> None:
    """Lets each ``nn.Sequential`` in a policy that can be one operator be one, as long as it can.

    Its weights have to be small enough for a core's second cache. With larger ones libraries are ahead.
    """
    for module in policy.modules():
        layers = list(module.children())
        if type(module) is nn.Sequential and _alternate(layers):
            linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
            if all(layer.bias is not None and layer.weight.numel() <= SMALL for layer in linear):
                module.__class__ = Perceptron


def what_runs(policy: Any, functions: Sequence[Callable[..., Any]], device: torch.device) -> str:
    """A sentence: what operators compute, of a policy and of the functions and what these call, and what does not."""
    if not _is_enabled or device.type != "cpu":
        return "all of it runs in plain PyTorch"
    log_prob = policy.distribution.log_prob_and_entropy
    called = [each for function in (*functions, log_prob) for each in _operators_of(function)]
    fused = [name for name, module in policy.named_modules() if isinstance(module, Perceptron)]
    fused += [each.__name__ for each in called if each.is_proven]  # type: ignore[attr-defined]
    plain = [each for each in (*functions, *called) if not isinstance(each, Operator) or not each.is_proven]
    names = ", ".join(getattr(each, "__name__", repr(each)) for each in dict.fromkeys(plain))
    what = f"fused operators compute {', '.join(dict.fromkeys(fused))}" if fused else "no fused operator is of use"
    return f"{what}; all else runs in plain PyTorch{f': {names}' if names else ''}"


def _operators_of(function: Callable[..., Any]) -> list[Operator[Any]]:
    """It itself, or those that it calls by their names."""
    if isinstance(function, Operator):
        return [function]
    function = inspect.unwrap(getattr(function, "__func__", function))
    scope = getattr(function, "__globals__", {})
    names = function.__code__.co_names if hasattr(function, "__code__") else ()
    return [scope[name] for name in names if isinstance(scope.get(name), Operator)]
