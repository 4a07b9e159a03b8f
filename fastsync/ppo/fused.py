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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .. import _ppo

Result = TypeVar("Result")

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""The metrics that ``ppo_loss`` returns."""

SMALL = 1 << 16
"""The most weights of a layer that an operator computes."""

_is_enabled = True
_ran: dict[str, bool] = {}
"""Whether the operator ran at the last call, by the names of functions and layers."""
_known: dict[str, Operator[Any]] = {}
"""The functions under ``@Operator``, by their names."""
_seen: dict[nn.Module, Any] | None = None
"""What is known of modules, inside of ``look_once``."""


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


@contextmanager
def look_once() -> Iterator[None]:
    """Inside, each policy's layers and hooks are looked at once, for looking takes as long as a small layer does."""
    global _seen
    before, _seen = _seen, {}
    try:
        yield
    finally:
        _seen = before


def _look(module: nn.Module, at: Callable[[], Result]) -> Result:
    if _seen is None:
        return at()
    if module not in _seen:
        _seen[module] = at()
    result: Result = _seen[module]
    return result


# ---- what replaces a function: it returns None for what it cannot compute --------------------------------------------


def _categorical(logits: Tensor, actions: Tensor) -> Any:
    return _ppo.categorical(logits, actions) if _suits(logits) else None


def _choose(logits: Tensor, noise: Tensor) -> Any:
    return _ppo.choose(logits, noise) if _suits(logits) else None


def _ppo_loss(new: Any, batch: Any, settings: Any, remaining: float) -> Any:
    if not _suits(new.log_prob):
        return None
    columns = batch.log_probs, batch.advantages, batch.values, batch.returns, batch.weights
    return _with_names(_ppo.ppo_objective(*new[:3], *columns, *_coefficients(settings, remaining)))


def _minibatch_loss(policy: Any, batch: Any, settings: Any, remaining: float, loss: Any) -> Any:
    """One node of the graph, for a policy of two perceptrons and one choice a step."""
    can = loss is _known["ppo_loss"] and loss.is_proven and settings.precision == "fp32" and torch.is_grad_enabled()
    layers = _look(policy, lambda: _perceptrons(policy)) if can and _suits_layers(batch.observations) else None
    if layers is None:
        return None
    rows = batch.observations, batch.actions
    columns = batch.log_probs, batch.advantages, batch.values, batch.returns, batch.weights
    return _with_names(_ppo.ppo_minibatch(*rows, *columns, *layers, *_coefficients(settings, remaining)))


def _coefficients(settings: Any, remaining: float) -> tuple[float, float, float, bool]:
    clip = settings.clip_coef * remaining if settings.anneal_clip else settings.clip_coef
    return clip, settings.vf_coef, settings.ent_coef, settings.clip_value_loss


def _with_names(result: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = result
    return loss, dict(zip(METRICS, metrics.unbind(), strict=True))


_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "categorical": ("6de9fae8a7ad79cb", _categorical),
    "choose": ("1c79cdf067ea4aac", _choose),
    "ppo_loss": ("03ae43829a136a04", _ppo_loss),
    "minibatch_loss": ("0e335790be27afe9", _minibatch_loss),
}
"""By the name of a plain function: the fingerprint that the operator was proven equal to, and the operator."""

_METHODS = ("forward", "features", "outputs", "value", "_in_full_precision")
_PROVEN = "fab5d27990fd7278"
"""The fingerprint of a policy's methods, and of its distribution's, that ``minibatch_loss`` was proven equal for."""


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Hashes functions' source without decorators, docstrings and comments. Empty where there is none."""
    text = ""
    for function in functions:
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):  # the last of a lambda within an expression
            return ""
        if not isinstance(definition, ast.FunctionDef):
            return ""
        if ast.get_docstring(definition) is not None:
            definition.body = definition.body[1:]
        text += ast.unparse(definition.args) + "".join(map(ast.unparse, definition.body))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Operator(Generic[Result]):
    """Decorates a plain function. A call runs its operator if that computes the same, else the function."""

    def __init__(self, plain: Callable[..., Result]) -> None:
        functools.update_wrapper(self, plain)
        self.plain = plain
        self._proven, self._operator = _OPERATORS[plain.__name__]
        _known.setdefault(plain.__name__, self)

    @functools.cached_property
    def is_proven(self) -> bool:
        """Whether the operator was proven equal to the function as it is written now."""
        return fingerprint(self.plain) == self._proven

    def __call__(self, *args: Any) -> Result:
        can = _is_enabled and self.is_proven and not torch.compiler.is_compiling()
        result: Result | None = self._operator(*args) if can else None
        _ran[self.plain.__name__] = result is not None
        return self.plain(*args) if result is None else result


# ---- layers ----------------------------------------------------------------------------------------------------------


class Perceptron(nn.Sequential):
    """Linear layers with tanh between them, which one operator computes if it can; see ``fuse``.

    Calling small layers one by one takes longer than computing them. They run layer by layer under autocast, which
    casts in each layer, under torch.compile, off CPUs, in float64, and as soon as a layer has another type or hooks.
    """

    name = "layers"  # in the policy

    def forward(self, rows: Tensor) -> Tensor:
        """[..., outputs] of [..., inputs]."""
        can = _suits_layers(rows) and not torch.compiler.is_compiling()
        operands = _look(self, self.operands) if can else None
        _ran[self.name] = operands is not None
        if operands is None:
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        outputs: Tensor = _ppo.perceptron(rows, *operands)
        return outputs

    def operands(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Returns weights and biases; None where the operator cannot compute the layers."""
        layers = list(self._modules.values())
        if not _alternate(layers):
            return None
        # Reading the layers' dicts is faster than their attributes.
        linear: list[Any] = [layer._parameters for layer in layers[::2]]
        return [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]


def _suits(rows: Tensor) -> bool:
    return rows.dtype is torch.float32 and rows.device.type == "cpu"


def _suits_layers(rows: Tensor) -> bool:
    return _suits(rows) and not torch.is_autocast_enabled("cpu")


def _perceptrons(policy: Any) -> list[list[Tensor]] | None:
    """Returns weights and biases of actor and critic; None unless these and one choice a step are all of the policy."""
    if policy.trunk is not None or policy.normalizer is not None or policy.distribution.shape or _has_hooks(policy):
        return None
    methods = [*(getattr(policy, name) for name in _METHODS), policy.distribution.log_prob_and_entropy]
    if not _known["categorical"].is_proven or not _are_proven(*(getattr(each, "__func__", each) for each in methods)):
        return None
    operands = list[list[Tensor]]()
    for layers in (policy.actor, policy.critic):
        of_layers = layers.operands() if type(layers) is Perceptron and not _has_hooks(layers) else None
        if of_layers is None:
            return None
        operands += of_layers
    return operands


@functools.cache
def _are_proven(*methods: Any) -> bool:
    return fingerprint(*methods) == _PROVEN


def _has_hooks(module: Any) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _alternate(layers: list[Any]) -> bool:
    """Returns whether these are linear layers with biases and tanh between them, without hooks."""
    for index, layer in enumerate(layers):
        if type(layer) is not (nn.Tanh if index % 2 else nn.Linear) or _has_hooks(layer):
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
