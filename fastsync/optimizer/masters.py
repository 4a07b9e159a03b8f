"""Float32 masters of rounded parameters in ``shard_optimizer``: how they follow them, and how they load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..sync.optimizer_steps import parameters_of

MASTER = "master"
"""The name of a master in the optimizer's state."""
STEP = "step"
"""The name of the only tensor there that is not of the parameter's shape."""

PARAMETER_WIRES = {"none": None, "bf16": torch.bfloat16}
"""What new float32 parameters travel in, by the name of their compression; None is as they are."""


def rounding_of(parameter: Tensor, master_weights: bool, wire: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that a step rounds a parameter to, if that needs a master; None if it does not.

    Args:
        parameter: the parameter.
        master_weights: whether 16-bit parameters have masters.
        wire: the dtype that float32 parameters travel in, if it is narrower.
    """
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return parameter.dtype if master_weights else None
    return wire if parameter.dtype == torch.float32 else None


def round_into(weight: Tensor, master: Tensor, rounding: torch.dtype) -> Tensor:
    """Writes the rounded master to the weight, and returns the weight."""
    return weight.copy_(master if weight.dtype == rounding else master.to(rounding))


def check_masters(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Raises ValueError if the optimizer's state has masters that torch's ``load_state_dict`` has rounded."""
    for name, parameter in named.items():
        master = optimizer.state.get(parameter, {}).get(MASTER)
        if isinstance(master, Tensor) and master.dtype != torch.float32:
            raise ValueError(
                f"optimizer: the master of parameter {name} was rounded to {master.dtype}, because load_state_dict() "
                "came before shard_optimizer(master_weights=True). Make the optimizer anew, and call it afterwards"
            )


def follow_weight(master: Tensor, weight: Tensor, rounding: torch.dtype, scratch: Tensor) -> None:
    """Gives the master each value of the weight that is not the master's rounding, because somebody has written it.

    Values are compared by their bits. ``scratch`` is as large as the master, and its values are lost.
    """
    as_bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
    rounded = round_into(scratch.view(weight.dtype)[: weight.numel()], master, rounding).view(as_bits)
    bits = weight.view(as_bits)
    if not master.is_cpu or not torch.equal(rounded, bits):  # on a device the host would have to wait
        master.copy_(torch.where(rounded == bits, master, weight))


class WideState:
    """Keeps the optimizer's state of some parameters in float32, where torch casts it to the parameter's dtype.

    ``load_state_dict`` hands on what is no tensor as it is. So a hook before it hides tensors, and one after it takes
    them out.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)

    def begin(self) -> None:
        """Widens the state that the parameters have. A master begins with the first step."""
        self._hooks = (
            self._optimizer.register_load_state_dict_pre_hook(self._hide),
            self._optimizer.register_load_state_dict_post_hook(self._take_out),
        )
        self._widen()

    def make(self) -> None:
        """Adds masters to the state that torch has just made, for ``torch.distributed.checkpoint`` to load into."""
        self._widen()
        for parameter in self._parameters:
            if parameter.grad is not None:  # torch has stepped it with zeros
                self._optimizer.state[parameter][MASTER] = parameter.detach().to(torch.float32, copy=True)

    def end(self) -> None:
        """Leaves the state that torch's own step of these parameters takes. It has no masters any more."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            self._cast(parameter, parameter.dtype)

    def _widen(self) -> None:
        for parameter in self._parameters:
            self._cast(parameter, torch.float32)

    def _cast(self, parameter: Tensor, dtype: torch.dtype) -> None:
        state = self._optimizer.state.get(parameter, {})
        state.update({k: v.to(dtype) for k, v in state.items() if isinstance(v, Tensor) and k != STEP})

    def _hide(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = set(map(id, self._parameters))
        # Where the lengths differ, torch raises an error next.
        wide = {n for n, parameter in zip(numbers, parameters_of(optimizer), strict=False) if id(parameter) in own}
        state = dict(state_dict["state"])
        for number in wide & state.keys():
            state[number] = {
                name: _Hidden(value) if isinstance(value, Tensor) and name != STEP else value
                for name, value in state[number].items()
            }
        return {**state_dict, "state": state}

    def _take_out(self, optimizer: Optimizer) -> None:
        for parameter in self._parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, _Hidden):
                    state[name] = value.tensor.to(parameter.device, torch.float32)


class _Hidden:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
