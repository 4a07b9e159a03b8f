"""``attach(broadcast_buffers=True)``: the buffers of a module, which all ranks take with each sync."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from .._torch_compat import own_buffers, unseen_by_autograd
from ..distributed import as_bytes
from .ignored_states import IgnoredStates
from .sync_weights import replace_inference_buffers


class SentBuffers:
    """The buffers of a module, which are sent as bytes beside the gradients. It does not keep the module alive.

    The buffers are looked up in each step, because a module may replace them. All ranks take those of rank 0. Inside
    ``join`` they take those of the first rank that still has batches.
    """

    def __init__(self, owner: nn.Module, are_sent: bool, ignored: IgnoredStates) -> None:
        self.are_sent = are_sent
        self._ignored = ignored
        self._sent: list[Tensor] = []
        self._modules = [
            (prefix, weakref.ref(module)) for prefix, module in owner.named_modules() if own_buffers(module)
        ]

    def named(self) -> dict[str, Tensor]:
        """Returns the buffers that the module has now, by name. A shared buffer has its first name."""
        alive = [(prefix, module) for prefix, known in self._modules if (module := known()) is not None]
        replace_inference_buffers((module for _, module in alive), but=self._ignored.ids())
        named = [each for prefix, module in alive for each in module.named_buffers(prefix, recurse=False)]
        first_name = {id(buffer): name for name, buffer in reversed(named)}
        ignored = self._ignored.ids()
        return {n: buffer for n, buffer in named if n == first_name[id(buffer)] and id(buffer) not in ignored}

    def description(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        lines = [f"buffer of shape {list(buffer.shape)}, {buffer.dtype}" for buffer in self.named().values()]
        return "\n".join(["broadcast_buffers True", *lines, ""])

    def values(self, is_first: Tensor) -> Tensor:
        """Returns the bytes to send, as float32, and a 1 at the end. All ranks except the first send zeros."""
        self._sent = list(self.named().values())
        all_bytes = torch.cat([as_bytes(buffer).to(is_first.device, non_blocking=True) for buffer in self._sent])
        return torch.cat(
            [torch.where(is_first, all_bytes.float(), 0.0), torch.ones(1, dtype=torch.float32, device=is_first.device)]
        )

    def arrive(self, sums: Tensor) -> None:
        """Writes the buffers. They stay as they are if a rank has failed, or if no rank has batches.

        Autograd does not see it, as with DDP: another forward, whose backward is to come, may have used them.
        """
        have_come = sums[-1] > 0
        parts = sums[:-1].to(torch.uint8).split([buffer.nbytes for buffer in self._sent])
        with unseen_by_autograd(self._sent):
            for buffer, part in zip(self._sent, parts, strict=True):
                values = part.clone().view(buffer.dtype).view(buffer.shape)  # a clone begins at an even address
                buffer.copy_(torch.where(have_come, values, buffer.to(values.device)))
        self._sent = []
