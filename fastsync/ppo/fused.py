"""Operators for CPUs (csrc/ppo) in the place of plain functions and layers: of those that they were proven equal to.

A function that ``@Operator`` marks is computed by its operator only while its source is the one whose fingerprint is
noted here; ``tests/ppo/test_ops.py`` holds the two against each other. A ``torch.nn.Sequential`` is, only while it is
linear layers with tanh, ReLU or ELU between them, and nothing hangs on them. All else runs as it is written.
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

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.ELU: "elu"}
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
    """Linear layers with an activation between them, by one operator where it can: see ``fuse``.

    Small layers take less time to compute than to call one by one, forward and backward. It is layer by layer under
    autocast, whose casts belong to each, while it is traced, and as soon as a layer is of another type or has hooks.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """[..., outputs] of [..., inputs]."""
        layers = list(self._modules.values())
        activation = None
        if not torch.is_autocast_enabled(rows.device.type) and not torch.compiler.is_compiling():
            activation = _activation_between(layers)
        if activation is None:
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        # Where the layers keep their parameters, which is quicker than to ask the layers.
        linear = [layer._parameters for layer in layers[::2]]
        weights, biases = [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]
        outputs: Tensor = torch.ops.fastsync.perceptron.default(rows, weights, biases, activation)
        return outputs


@functools.lru_cache(maxsize=256)
def _activation_of(types: tuple[type[nn.Module], ...]) -> str | None:
    """What stands between linear layers; None where it is something else, or differs."""
    between = set(types[1::2]) or {nn.Tanh}
    if len(types) % 2 == 0 or set(types[::2]) != {nn.Linear} or len(between) > 1:
        return None
    return _ACTIVATIONS.get(between.pop())


def _activation_between(layers: list[Any]) -> str | None:
    activation = _activation_of(tuple([type(layer) for layer in layers]))
    if activation is None:
        return None
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return None
    return None if activation == "elu" and any(layer.alpha != 1 for layer in layers[1::2]) else activation


def fuse(policy: nn.Module) -> None:
    """Lets each ``nn.Sequential`` in a policy that can be one operator be one, as long as it can."""
    for module in policy.modules():
        is_plain = type(module) is nn.Sequential and _activation_between(list(module.children())) is not None
        if is_plain and all(layer.bias is not None for layer in list(module.children())[::2]):
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
