"""Which tensors gradients are averaged for: those of a module or loose ones, by name, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .checks import check_dense, check_not_sharded, shares_memory


def trainable_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Picks those that can have gradients, by name, loose ones by index. Raises ValueError if there are none.

    Args:
        argument: what the caller calls them, for errors.
    """
    return with_gradients(named_parameters(module_or_params, argument), argument)


def with_gradients(named: Mapping[str, Tensor], argument: str) -> dict[str, Tensor]:
    """Picks those that can have gradients. Raises ValueError if none requires one."""
    able: dict[str, Tensor] = {name: p for name, p in named.items() if p.is_floating_point() or p.is_complex()}
    if not any(parameter.requires_grad for parameter in able.values()):
        raise ValueError(f"{argument}: none of its {len(named)} parameters requires a gradient; nothing to synchronise")
    return able


def named_parameters(module_or_params: nn.Module | Iterable[Tensor] | Tensor, argument: str) -> dict[str, Tensor]:
    """Names a module's parameters, or loose ones by index. Raises ValueError for what cannot be synchronised."""
    if isinstance(module_or_params, nn.Module):
        _check_unwrapped(module_or_params, argument)
        check_dense(module_or_params, argument)
        # torch.compile's wrapper must not show in the names, for checkpoints come from models with and without it.
        named: dict[str, Tensor] = {
            name.replace("_orig_mod.", ""): p for name, p in module_or_params.named_parameters()
        }
    else:
        given = listed(module_or_params, argument)
        for index, parameter in enumerate(given):
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"{argument}: expected a module or tensors, but number {index} is a {type(parameter).__name__}"
                    + ("; pass the module or its parameters, not names" if isinstance(parameter, str | tuple) else "")
                    + ("; pass its parameters()" if isinstance(parameter, nn.Module) else "")
                )
        unique = {id(parameter): (str(index), parameter) for index, parameter in reversed(list(enumerate(given)))}
        named = dict(reversed(list(unique.values())))
    for name, parameter in named.items():
        _check_parameter(name, parameter, argument)
    check_not_sharded(named, argument)
    return named


def listed(params: Iterable[Tensor] | Tensor, argument: str) -> list[Tensor]:
    """Lists loose parameters, one or many. Raises ValueError for what is neither, such as an optimizer."""
    if not isinstance(params, Iterable):
        raise ValueError(
            f"{argument}: expected a module or tensors, got {type(params).__name__}; pass the module or its parameters"
        )
    return [params] if isinstance(params, Tensor) else list(params)


def _check_unwrapped(module: nn.Module, argument: str) -> None:
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{argument}: {name or 'the module'} is wrapped in DistributedDataParallel, which averages gradients "
                "itself; use fastsync.register_comm_hook(ddp_model), or attach to the model without the wrapper"
            )


def _check_parameter(name: str, parameter: Tensor, argument: str) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"{argument}: parameter {name} is not initialised yet; run a forward first")
    if not parameter.is_leaf:
        raise ValueError(
            f"{argument}: tensor {name} is no leaf of the graph (it came from {parameter.grad_fn}), so it has no "
            ".grad; pass the parameters it was computed from"
        )
    if shares_memory(parameter):
        raise ValueError(
            f"{argument}: elements of parameter {name} share memory (shape {list(parameter.shape)}, strides "
            f"{list(parameter.stride())}), so no optimizer can step it; attach what it was expanded from"
        )
