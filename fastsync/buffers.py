"""A module's buffers, looked up where they are, for a module may put another tensor in one's place."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from .checks import shares_memory


class Buffers:
    """Those that the module has now, wherever in it; the module is not kept alive."""

    def __init__(self, owner: nn.Module) -> None:
        self._places: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        seen: set[int] = set()
        for prefix, module in owner.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places[f"{prefix}.{name}" if prefix else name] = weakref.ref(module), name

    def named(self) -> dict[str, Tensor]:
        """Returns what is there by now, by name."""
        found: dict[str, Tensor] = {}
        for full_name, (module_ref, name) in self._places.items():
            module = module_ref()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None:
                found[full_name] = buffer
        return found

    def check_can_be_sent(self, argument: str) -> None:
        """Raises ValueError where one cannot be written element by element, so that it cannot become rank 0's."""
        for name, buffer in self.named().items():
            if buffer.layout != torch.strided:
                what, way_out = f"buffer {name} is {buffer.layout}, which fastsync does not send", ""
            elif shares_memory(buffer):
                what, way_out = f"elements of buffer {name} share memory", "register a clone() of it, or "
            else:
                continue
            raise ValueError(
                f"{argument}: {what}; {way_out}leave it to each rank, with init_sync=False and broadcast_buffers=False"
            )

    def tensors(self) -> list[Tensor]:
        """As ``named``, without the names."""
        return list(self.named().values())
