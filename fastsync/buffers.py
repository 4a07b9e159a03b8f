"""A module's buffers, looked up where they are, for a module may put another tensor in one's place."""

from __future__ import annotations

import weakref

from torch import Tensor, nn


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

    def tensors(self) -> list[Tensor]:
        """As ``named``, without the names."""
        return list(self.named().values())
