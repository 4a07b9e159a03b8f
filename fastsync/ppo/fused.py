"""Fused CPU operators (csrc/ppo). They replace plain functions and layers that they were proven equal to.

An operator replaces a function under ``@Operator`` only while the function's source has the fingerprint noted here;
``tests/ppo/test_ops.py`` compares the two. An operator replaces a ``torch.nn.Sequential`` only while it consists of
small linear layers with tanh between them, without hooks. The operator of ``minibatch_loss`` needs such layers, and
unchanged sources of the loss and of the policy's methods. Everything else runs as it is written.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .. import _ppo
from .._torch_compat import calls_global_hooks, has_own_call, own_modules, own_parameters
from .fingerprint import fingerprint

Result = TypeVar("Result")

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""The metrics that ``ppo_loss`` returns."""

SMALL = 1 << 16
"""The most weights of a layer that an operator computes."""

_is_enabled = True
_ran: dict[str, bool] = {}
"""Whether the operator ran at the last call, by the names of functions and layers."""
_seen = threading.local()
"""``policies`` exists inside ``look_once``. It maps policies to their weights and biases, or to None."""


def enable(enabled: bool, own: Sequence[Callable[..., Any]] = ()) -> None:
    """Turns operators on or off from now on. ``what_ran`` then also names the functions in ``own``."""
    global _is_enabled, _ran
    _is_enabled = enabled
    _ran = {getattr(each, "__name__", repr(each)): False for each in own if not isinstance(each, Operator)}


def what_ran() -> str:
    """Returns a sentence in two lines: which functions and layers ran by operators, and which by plain PyTorch."""
    by_operator = ", ".join(name for name, is_fused in _ran.items() if is_fused)
    plain = ", ".join(name for name, is_fused in _ran.items() if not is_fused)
    if not by_operator:
        return "everything runs in plain PyTorch"
    return f"fused operators run for {by_operator};\nplain PyTorch runs for everything else{plain and f': {plain}'}"


@contextmanager
def look_once() -> Iterator[None]:
    """Inside the ``with`` block, the operator of ``minibatch_loss`` inspects a policy once, not in every minibatch."""
    _seen.policies = {}
    try:
        yield
    finally:
        del _seen.policies


# Each of these replaces a plain function. It returns None for arguments that the operator cannot compute.
def _categorical(logits: Tensor, actions: Tensor) -> Any:
    return _ppo.categorical(logits, actions) if _suits(logits) else None


def _choose(logits: Tensor, noise: Tensor) -> Any:
    return _ppo.choose(logits, noise) if _suits(logits) else None


def _ppo_loss(new: Any, batch: Any, settings: Any, remaining: float) -> Any:
    if not _suits(new.log_prob):
        return None
    learnt = new.log_prob, new.entropy, new.values
    return _with_names(_ppo.ppo_objective(*learnt, *_constants(batch, settings, remaining)))


def _minibatch_loss(policy: Any, batch: Any, settings: Any, remaining: float, loss: Any) -> Any:
    # The operator is one node of the autograd graph. It needs a policy of two perceptrons and one choice a step.
    policies: dict[nn.Module, Any] = getattr(_seen, "policies", {})
    if policy not in policies:
        policies[policy] = _perceptrons(policy)
    is_full = settings.precision == "fp32" and _suits(batch.observations) and not torch.is_autocast_enabled("cpu")
    if policies[policy] is None or not is_full or not _is_proven("ppo_loss", loss) or not torch.is_grad_enabled():
        return None
    rows = batch.observations, batch.actions
    return _with_names(_ppo.ppo_minibatch(*rows, *policies[policy], *_constants(batch, settings, remaining)))


def _constants(batch: Any, settings: Any, remaining: float) -> tuple[Any, ...]:
    clip = settings.clip_coef * remaining if settings.anneal_clip else settings.clip_coef
    columns = batch.log_probs, batch.advantages, batch.values, batch.returns, batch.weights
    return *columns, clip, settings.vf_coef, settings.ent_coef, settings.clip_value_loss


def _with_names(result: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return result[0], dict(zip(METRICS, result[1].unbind(), strict=True))


_OPERATORS: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "categorical": ("a4ee9130bb217a2f", _categorical, ()),
    "choose": ("516f1ff02e1456a2", _choose, ()),
    "ppo_loss": ("4af4ff858aba0eed", _ppo_loss, ()),
    "minibatch_loss": ("31970e4fc3638683", _minibatch_loss, ("autocast",)),
}
"""Maps the name of a plain function to three things: a fingerprint, the operator that was proven equal, and the names
of more functions that the fingerprint includes."""

_METHODS = ("forward", "features", "outputs", "allowed", "value", "_in_full_precision")
_PROVEN = "ef31c8ec458f0fd5"
"""The fingerprint of a policy's methods, and of its distribution's, that ``minibatch_loss`` was proven equal for."""


class Operator(Generic[Result]):
    """Decorates a plain function. A call runs its operator if that computes the same, else the function."""

    def __init__(self, plain: Callable[..., Result]) -> None:
        functools.update_wrapper(self, plain)
        self.plain = plain
        self._proven, self._operator, self._uses = _OPERATORS[plain.__name__]

    @functools.cached_property
    def is_proven(self) -> bool:
        """Whether the operator was proven equal to the function as it is written now."""
        return fingerprint(self.plain, *(self.plain.__globals__[name] for name in self._uses)) == self._proven

    def __call__(self, *args: Any) -> Result:
        can = _is_enabled and self.is_proven and not torch.compiler.is_compiling()
        result: Result | None = self._operator(*args) if can else None
        _ran[self.plain.__name__] = result is not None
        return self.plain(*args) if result is None else result


class Perceptron(nn.Sequential):
    """Linear layers with tanh between them, which one operator computes if it can; see ``fuse``.

    Calling small layers one by one takes longer than computing them. The layers still run one by one under autocast,
    which casts in each layer, under torch.compile, on other devices and in float64. They do as well if a layer has
    another type or hooks.
    """

    name = "layers"  # in the policy

    def forward(self, rows: Tensor) -> Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        can = _suits(rows) and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
        operands = self.operands() if can else None
        _ran[self.name] = operands is not None
        if operands is None:
            layer_by_layer: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
            return layer_by_layer
        outputs: Tensor = _ppo.perceptron(rows, *operands)
        return outputs

    def operands(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Returns weights and biases; None where the operator cannot compute the layers."""
        layers: list[Any] = list(own_modules(self).values())
        if not _alternate(layers) or calls_global_hooks():
            return None
        # Reading the layers' dicts is faster than their attributes.
        linear: list[Any] = [own_parameters(layer) for layer in layers[::2]]
        return [layer["weight"] for layer in linear], [layer["bias"] for layer in linear]


def _suits(rows: Tensor) -> bool:
    return rows.dtype is torch.float32 and rows.device.type == "cpu"


def _perceptrons(policy: Any) -> list[list[Tensor]] | None:
    """Returns weights and biases of actor and critic; None if the policy is more than two perceptrons and a choice."""
    kind, distribution, networks = type(policy), policy.distribution, (policy.actor, policy.critic)
    others = policy.trunk, policy.recurrent, policy.normalizer, policy.parts
    if any(each is not None for each in others) or distribution.shape:
        return None
    if any(type(network) is not Perceptron for network in networks) or any(map(_is_changed, (policy, *networks))):
        return None
    evaluate = type(distribution).log_prob_and_entropy
    changed = vars(policy).keys() & set(_METHODS) or "log_prob_and_entropy" in vars(distribution)
    if changed or not _are_proven(*(getattr(kind, name) for name in _METHODS), evaluate):
        return None
    actor, critic = (network.operands() for network in networks)
    can = _is_proven("categorical", evaluate.__globals__.get("categorical"))
    return [*actor, *critic] if can and actor is not None and critic is not None else None


@functools.cache
def _are_proven(*methods: Any) -> bool:
    return fingerprint(*methods) == _PROVEN


def _is_proven(name: str, function: Any) -> bool:
    return isinstance(function, Operator) and function.plain.__name__ == name and function.is_proven


def _is_changed(module: Any) -> bool:
    """Returns whether a call of the module does more than its class's ``forward``."""
    return has_own_call(module) or type(module).__call__ is not nn.Module.__call__


def _alternate(layers: list[Any]) -> bool:
    """Returns whether these are linear layers with biases and tanh between them, without hooks."""
    kind, other = nn.Linear, nn.Tanh  # type: tuple[type[nn.Module], type[nn.Module]]
    for layer in layers:
        if type(layer) is not kind or has_own_call(layer):
            return False
        if kind is nn.Linear and own_parameters(layer).get("bias") is None:
            return False
        kind, other = other, kind
    return kind is nn.Tanh


def fuse(policy: nn.Module) -> None:
    """Makes each ``nn.Sequential`` in a policy a ``Perceptron`` if an operator can compute it.

    The weights of each layer have to fit into a core's second-level cache. For larger ones libraries are faster.
    """
    for name, module in policy.named_modules():
        layers = list(module.children())
        can = type(module) is nn.Sequential and _alternate(layers)
        if can and all(layer.weight.numel() <= SMALL for layer in layers[::2]):
            module.__class__, module.name = Perceptron, name
