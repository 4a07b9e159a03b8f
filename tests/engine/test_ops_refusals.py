"""torch.ops.fastsync.* refuse what would have them read or write beyond a tensor, and leave everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastsync._C  # noqa: F401 registers torch.ops.fastsync

GRADS = {"grads": [torch.full((2,), 2.0), torch.full((2, 2), 2.0)]}
STATS = {"stats": torch.full((4,), 4.0, dtype=torch.float64)}
WIRE = {"wire": torch.full((6,), 3.0)}
SUMS = {"wires": torch.full((2, 6), 2.0), "out": torch.full((6,), 3.0).bfloat16()}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pack": GRADS | WIRE | STATS,
    "unpack": WIRE | GRADS | STATS,
    "measure": GRADS | STATS,
    "reduce": SUMS,
}
BLOCKS = torch.zeros(2, 132, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("operators", "name", "value"),
    [
        ("pack unpack measure", "grads", []),
        ("pack unpack measure", "grads", [torch.ones(2), torch.ones(4).to_sparse()]),
        ("pack unpack measure", "grads", [torch.ones(6, dtype=torch.int64)]),
        ("pack unpack measure", "grads", [torch.ones(2), torch.ones(4).double()]),
        ("pack unpack measure", "grads", [torch.ones(2, 3).t()]),
        ("pack unpack measure", "grads", [torch.ones(6, device="meta")]),
        ("pack unpack measure", "stats", torch.ones(3).double()),
        ("pack unpack measure", "stats", torch.ones(4)),
        ("pack unpack", "wire", torch.ones(5)),
        ("pack unpack", "wire", torch.ones(12)[::2]),
        ("pack unpack", "wire", torch.ones(6).double()),
        ("pack unpack", "wire", torch.zeros(263, dtype=torch.uint8)),
        ("pack unpack", "wire", torch.zeros(265, dtype=torch.uint8)[1:]),  # its scales are no floats to a CPU
        ("unpack", "wire", torch.ones(0, 6)),
        ("pack unpack", "bucket_scale", torch.ones(2)),
        ("pack unpack", "bucket_scale", torch.ones((), dtype=torch.float64)),
        ("pack", "weight", torch.ones(())),
        ("pack", "residuals", [torch.ones(2)]),
        ("pack", "residuals", [torch.ones(2), torch.ones(3)]),
        ("pack", "residuals", [torch.ones(2), torch.ones(4).double()]),
        ("pack", "alignment", 0),
        ("reduce", "wires", torch.ones(6)),
        ("reduce", "wires", torch.ones(6, 2).t()),
        ("reduce", "wires", torch.ones(2, 6).double()),
        ("reduce", "wires", torch.ones(2, 6).half()),
        ("reduce", "wires", BLOCKS[:, 1:]),
        ("reduce", "out", torch.ones(5)),
        ("reduce", "out", BLOCKS[0]),
        ("reduce", "out", torch.ones(6, device="meta")),
        ("reduce", "residual", torch.ones(5)),
        ("reduce", "residual", torch.ones(6).double()),
        ("reduce", "bucket_scale", torch.ones(2)),
        ("reduce", "grad_dtype", torch.float64),
    ],
)
def test_what_would_reach_beyond_a_tensor_is_refused(operators: str, name: str, value: Any) -> None:
    for operator in operators.split():
        arguments = ARGUMENTS[operator] | {name: value}
        before = _values(list(arguments.values()))
        with pytest.raises(ValueError, match=": expected "):
            getattr(torch.ops.fastsync, operator)(**arguments)
        assert _values(list(arguments.values())) == before


def _values(value: Any) -> Any:
    if isinstance(value, list):
        return [_values(each) for each in value]
    if isinstance(value, Tensor):
        return "meta" if value.is_meta else value.to_dense().tolist()
    return value
