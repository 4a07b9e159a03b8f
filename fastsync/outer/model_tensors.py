"""The tensors of a model that ``DiLoCo`` averages. Each mean looks them up anew, because training may change them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._checks import is_wrapper, plain_parts, without_compiler
from .._torch_compat import is_saved, known_ranks
from ..distributed import as_bytes, broadcast_tensors
from ..sync.handles_in_use import groups_of
from ..sync.in_ddp import check_not_in_ddp
from ..sync.optimizer_steps import parameters_of
from .master_weights import check_masters_are_known, local, masters_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class ModelTensors:
    """A model's weights, which an outer optimizer moves, and its other tensors that are averaged."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizers = optimizers
        self._at_start = self._named_parameters()
        self.weights = {name: p for name, p in self._at_start.items() if p.requires_grad}

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Tells whether the optimizer has one of the weights."""
        ids = {id(weight) for weight in self._parameters().values()} | {id(weight) for weight in self.weights.values()}
        return not ids.isdisjoint(map(id, parameters_of(optimizer)))

    def check_masters_are_known(self) -> None:
        """Raises ValueError after a step if an optimizer may keep copies of the weights, and does not tell."""
        check_masters_are_known(self._optimizers, self._parameters())

    def ranks_that_train_together(self) -> set[int]:
        """Returns the ranks between which gradients or shards of the weights travel at each step, as far as is known.

        It knows handles of fastsync, DistributedDataParallel, and ``fully_shard``.

        Raises:
            ValueError: DistributedDataParallel averages the weights, and is no part of the model, so its ranks are not
                known.
        """
        weights = [*self._parameters().values()]
        found = [known_ranks(group) for group in groups_of(weights)]
        found += [set(each.device_mesh.mesh.flatten().tolist()) for each in weights if isinstance(each, DTensor)]
        found += [known_ranks(ddp.process_group) for ddp in self._ddps]
        if not found:
            way_out = "pass the DistributedDataParallel, which knows the ranks of this site"
            check_not_in_ddp(self.weights, "model", way_out)
        return {dist.get_rank()}.union(*found)

    def plain(self) -> dict[str, Tensor]:
        """Returns this rank's shard of each parameter and buffer. Wrapped tensors replace those that wrap them."""
        buffers = {without_compiler(name): buffer for name, buffer in self._model.named_buffers()}
        named = {**self._parameters(), **buffers}
        return plain_parts({name: local(each) for name, each in named.items()})

    def beside_weights(self) -> dict[str, Tensor]:
        """Returns copies on the host of this rank's shards of frozen parameters, and of all buffers."""
        return {name: each.cpu().clone() for name, each in self.plain().items() if name not in self.weights}

    @torch.no_grad()
    def load_beside_weights(self, values: Mapping[str, Tensor]) -> None:
        """Takes over what ``beside_weights()`` has returned on another rank."""
        plain = self.plain()
        for name, value in values.items():
            write(plain[name], value)

    @torch.no_grad()
    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Gives all ranks the first one's parameters and buffers, through the host. All must have the same ones."""
        plain = self.plain().values()
        on_host = [each.cpu().clone() if each.is_inference() else each.cpu() for each in plain]
        masters = masters_of(self._optimizers, self.weights)
        broadcast_tensors(on_host, group)
        for each, arrived in zip(plain, on_host, strict=True):
            if arrived is not each:
                write(each, arrived)
        for name, master in masters.items():
            if group.rank() != 0:
                local(master).copy_(local(self.weights[name]))

    def own(self, names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs: this rank's shard of each weight, and of the tensor that the optimizer steps for it."""
        now = self.now()
        masters = masters_of(self._optimizers, now)
        pairs = [(local(now[name]), masters.get(name)) for name in names]
        return [(weight, weight if master is None else local(master)) for weight, master in pairs]

    def now(self) -> dict[str, Tensor]:
        """Returns the weights that the model has now.

        Raises:
            RuntimeError: one of them is gone, or has another shape or type.
        """
        now = self._parameters()
        for name, weight in self.weights.items():
            if name not in now or (now[name].shape, now[name].dtype) != (weight.shape, weight.dtype):
                raise RuntimeError(
                    f"fastsync: parameter {name} of {list(weight.shape)}, {weight.dtype} is averaged between sites, "
                    "and the model has another one or none by now; make a new DiLoCo after such a change, on every rank"
                )
        return {name: now[name] for name in self.weights}

    def others(self) -> dict[str, Tensor]:
        """Returns this rank's shard of the floating parameters that were frozen or missing at the start."""
        return {
            name: torch.view_as_real(local(parameter)) if parameter.is_complex() else local(parameter)
            for name, parameter in self._parameters().items()
            if name not in self.weights
            and (parameter.is_floating_point() or parameter.is_complex())
            and not is_wrapper(local(parameter))
        }

    def buffers(self) -> dict[str, Tensor]:
        """Returns the floating buffers of the state dict."""
        modules = dict(self._model.named_modules())
        found = {}
        for name, buffer in self._model.named_buffers():
            prefix, _, own_name = name.rpartition(".")
            if buffer.is_floating_point() and is_saved(modules[prefix], own_name):
                found[without_compiler(name)] = buffer
        return found

    def describe(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        parameters = {name: self._at_start.get(name, each) for name, each in self._parameters().items()}
        return "\n".join(
            f"{name} {each.dtype} {list(local(each).shape)}" for name, each in (parameters | self.buffers()).items()
        )

    def fingerprint(self) -> int:
        """Returns a number that is equal on ranks that hold the same weights."""
        now = self._parameters()
        return fingerprint(str(marks({name: local(now[name]) for name in self.weights if name in now})))

    def _parameters(self) -> dict[str, Tensor]:
        # While fully_shard has gathered a parameter, the model holds the whole one instead of the shard.
        return {
            name: first if isinstance(first := self._at_start.get(name), DTensor) else parameter
            for name, parameter in self._named_parameters().items()
        }

    def _named_parameters(self) -> dict[str, Tensor]:
        return {without_compiler(name): parameter for name, parameter in self._model.named_parameters()}


@torch.no_grad()
def write(tensor: Tensor, values: Tensor) -> None:
    """Writes to a parameter or buffer. One that was made in inference mode can only be written to in that mode."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def marks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor, which tells whether its values have changed."""
    words = {name: as_bytes(each).view(_WORDS[each.element_size()]) for name, each in tensors.items()}
    return {name: int(each.sum(dtype=torch.int64)) for name, each in words.items()}


def fingerprint(text: str) -> int:
    """Returns a hash of a text, of 56 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
