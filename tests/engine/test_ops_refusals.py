"""torch.ops.fastsync.* refuse what they cannot serve, say why, and leave everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastsync._C  # noqa: F401 registers torch.ops.fastsync


def _bad(message: str, operators: str = "pack unpack", **changes: Any) -> Any:
    return pytest.param(operators.split(), changes, message, id=f"{'-'.join(changes)}: {message[:40]}")


def _residuals(last: int) -> list[Tensor]:
    return [torch.ones(2), torch.ones(last)]


EACH = "pack unpack measure"
BAD_INPUTS = [
    _bad(r"grads: expected at least one tensor, got an empty list", EACH, grads=[]),
    _bad(r"grads\[0\]: expected a dense tensor, got layout Sparse; .*sparse", EACH, grads=[torch.eye(2).to_sparse()]),
    _bad(r"grads\[1\]: expected a dense tensor", EACH, grads=[torch.ones(2), torch.eye(2).to_sparse()]),
    _bad(r"grads\[0\]: expected float32, .* got ComplexFloat", EACH, grads=[torch.ones(6, dtype=torch.complex64)]),
    _bad(r"grads\[1\]: expected float32, .* got Long", EACH, grads=[torch.ones(2), torch.ones(4, dtype=torch.int64)]),
    _bad(r"grads\[0\]: expected float32, .* got Bool", EACH, grads=[torch.ones(6, dtype=torch.bool)]),
    _bad(r"grads\[1\]: expected Float like grads\[0\], got Half", EACH, grads=[torch.ones(2), torch.ones(4).half()]),
    _bad(r"grads\[1\]: expected device cpu .* got meta", EACH, grads=[torch.ones(2), torch.ones(4, device="meta")]),
    _bad(r"wire: expected a contiguous vector of 6 elements, .* got \[5\]", wire=torch.ones(5)),
    _bad(r"wire: expected a contiguous vector of 6 elements, .* got \[7\]", wire=torch.ones(7)),
    _bad(r"wire: expected a .* of 6 elements.* got \[6, 1\]", wire=torch.ones(6, 1)),
    _bad(r"wire: expected a contiguous vector of 6 elements", wire=torch.ones(12)[::2]),
    _bad(r"wire: .* \(Float\), float16, bfloat16 or uint8 .*, got Double", wire=torch.ones(6, dtype=torch.float64)),
    _bad(r"wire: .* \(Float\), float16, bfloat16 or uint8 .*, got Char", wire=torch.ones(6, dtype=torch.int8)),
    _bad(r"wire: .* \(Half\), float16, bfloat16 or uint8 .*, got Float", grads=[torch.ones(6).half()]),
    _bad(r"wire: expected a dense tensor, got layout Sparse", wire=torch.ones(6).to_sparse()),
    _bad(r"wire: expected a dense tensor, got layout Sparse", wire=torch.ones(2, 6).to_sparse()),
    _bad(r"wire: expected device cpu like the gradients, got meta", wire=torch.ones(6, device="meta")),
    _bad(r"stats: expected 4 contiguous float64 elements on cpu, got \[4\] Float", EACH, stats=torch.ones(4)),
    _bad(r"stats: expected 4 .* got \[3\] Double", EACH, stats=torch.ones(3, dtype=torch.float64)),
    _bad(r"stats: expected 4 contiguous", EACH, stats=torch.ones(8, dtype=torch.float64)[::2]),
    _bad(r"stats: .* on meta", EACH, stats=torch.ones(4, dtype=torch.float64, device="meta")),
    _bad(r"bucket_scale: expected one float32 element on cpu, got \[\] Double", bucket_scale=torch.ones(()).double()),
    _bad(r"bucket_scale: expected one float32 element on cpu, got \[2\] Float", bucket_scale=torch.ones(2)),
    _bad(r"bucket_scale: expected one float32 element on cpu, got \[0\] Float", bucket_scale=torch.ones(0)),
    _bad(r"bucket_scale: .* on meta", bucket_scale=torch.ones((), device="meta")),
    _bad(r"wire: .*vector of 264 elements, 132 for each block .* got \[6\]", "pack", wire=torch.ones(6).byte()),
    _bad(r"wire: expected blocks of int8 to begin at multiples of 4", wire=torch.ones(265).byte()[1:]),
    _bad(
        r"wire: expected blocks of int8 to begin at multiples of 4", "unpack", wire=torch.ones(2, 265).byte()[:, :264]
    ),
    _bad(r"wire: expected a matrix of contiguous rows of 6 elements", "unpack", wire=torch.ones(2, 5)),
    _bad(r"wire: expected a matrix of contiguous rows of 6 elements", "unpack", wire=torch.ones(0, 6)),
    _bad(r"wire: expected a matrix of contiguous rows of 6 elements", "unpack", wire=torch.ones(6, 2).t()),
    _bad(r"wire: expected a contiguous vector of 6 elements", "pack", wire=torch.ones(2, 6)),
    _bad(r"wire: expected a contiguous vector of 6 elements", wire=torch.ones(1, 1, 6)),
    _bad(r"residuals: expected none or as many as there are gradients \(2\), got 1", "pack", residuals=[torch.ones(2)]),
    _bad(r"residuals\[1\]: expected a contiguous Float tensor of 4 .* got \[3\]", "pack", residuals=_residuals(3)),
    _bad(r"residuals\[1\]: .* got \[4\] Half", "pack", residuals=[torch.ones(2), torch.ones(4).half()]),
    _bad(r"residuals\[1\]: expected a contiguous", "pack", residuals=[torch.ones(2), torch.ones(8)[::2]]),
    _bad(r"alignment: expected 1 to 128 elements, got 0", "pack", alignment=0),
    _bad(r"wire: expected a contiguous vector of 16 .* multiple of the alignment", "pack", alignment=8),
    _bad(r"residuals\[1\]: .* on meta", "pack", residuals=[torch.ones(2), torch.ones(4, device="meta")]),
    _bad(r"stochastic: expected False, got True for a wire of Float", "pack", stochastic=True),
    _bad(r"step: expected one int64 element on cpu, got \[\] Float", step=torch.ones(())),
    _bad(r"step: expected one int64 element on cpu, got \[2\] Long", step=torch.tensor([1, 2])),
    _bad(r"step: .* on meta", step=torch.tensor(1, device="meta")),
    _bad(r"weight: expected one float64 element on cpu, got \[\] Float", "pack", weight=torch.ones(())),
    _bad(r"weight: expected one float64 .* got \[2\] Double", "pack", weight=torch.ones(2, dtype=torch.float64)),
    _bad(r"weight: .* on meta", "pack", weight=torch.ones((), dtype=torch.float64, device="meta")),
    _bad(r"scale_share: expected a finite number above 0, got 0", "unpack", scale_share=0.0),
    _bad(r"scale_share: expected a finite number above 0, got nan", "unpack", scale_share=float("nan")),
    _bad(r"grads\[0\]: expected a tensor to write to", "unpack", grads=[torch.ones(1).expand(6)]),
    _bad(r"multiplier: expected a finite number, got nan", multiplier=float("nan")),
    _bad(r"multiplier: expected a finite number, got inf", multiplier=float("inf")),
    _bad(r"limit: expected a positive number or None, got 0", "pack", limit=0.0),
    _bad(r"limit: expected a positive number or None, got -1", "pack", limit=-1.0),
    _bad(r"limit: expected a positive number or None, got nan", "pack", limit=float("nan")),
]


@pytest.mark.parametrize(("operators", "changes", "message"), BAD_INPUTS)
def test_bad_input_is_refused_and_nothing_is_written(
    operators: list[str], changes: dict[str, Any], message: str
) -> None:
    arguments = {
        "grads": [torch.full((2,), 2.0), torch.full((2, 2), 2.0)],
        "wire": torch.full((6,), 3.0),
        "stats": torch.full((4,), 4.0, dtype=torch.float64),
        "bucket_scale": torch.full((), 8.0),
        "multiplier": 1.0,
        "limit": 1.0,
        "residuals": None,
        "alignment": 1,
        "stochastic": False,
        "step": torch.tensor(5),
        "weight": None,
        "scale_share": 1.0,
    } | changes
    before = {name: _snapshot(value) for name, value in arguments.items()}
    names = {
        "pack": [
            "grads",
            "wire",
            "stats",
            "bucket_scale",
            "residuals",
            "multiplier",
            "limit",
            "stochastic",
            "alignment",
            "step",
            "weight",
        ],
        "unpack": ["wire", "grads", "stats", "bucket_scale", "multiplier", "step", "scale_share"],
        "measure": ["grads", "stats"],
    }
    for operator in operators:
        with pytest.raises(ValueError, match=message):
            getattr(torch.ops.fastsync, operator)(**{name: arguments[name] for name in names[operator]})
        assert {name: _snapshot(value) for name, value in arguments.items()} == before


def _misaligned_wires() -> dict[str, Tensor]:
    return {"wires": torch.ones(2, 133).byte()[:, 1:], "out": torch.ones(128), "residual": torch.ones(128)}


BAD_REDUCES = [
    _bad(r"grad_dtype: expected float32, .* got Long", grad_dtype=torch.int64),
    _bad(r"wires: expected Float, which the sums are taken in, .* got Double", wires=torch.ones(2, 6).double()),
    _bad(r"wires: expected Double, which the sums are taken in, .* got Float", grad_dtype=torch.float64),
    _bad(r"wires: expected a matrix of contiguous rows, got \[6\]", wires=torch.ones(6)),
    _bad(r"wires: expected a matrix of contiguous rows, got \[0, 6\]", wires=torch.ones(0, 6)),
    _bad(r"wires: expected a matrix of contiguous rows", wires=torch.ones(6, 2).t()),
    _bad(r"wires: expected rows of whole blocks of 132 bytes, got \[2, 131\]", wires=torch.ones(2, 131).byte()),
    _bad(r"wires: expected blocks of int8 to begin", **_misaligned_wires()),
    _bad(r"wires: expected a dense tensor, got layout Sparse", wires=torch.ones(2, 6).to_sparse()),
    _bad(r"out: expected a dense tensor, got layout Sparse", out=torch.ones(6).to_sparse()),
    _bad(r"out: expected Half like the wires, or Float, .* got BFloat16", wires=torch.ones(2, 6).half()),
    _bad(r"out: expected Float like the wires, or Float, .* got Double", out=torch.ones(6).double()),
    _bad(r"out: expected a contiguous vector for 6 values, got \[5\]", out=torch.ones(5)),
    _bad(r"out: expected a contiguous vector for 6 values, got \[1, 6\]", out=torch.ones(1, 6)),
    _bad(r"out: .* for 6 values, 132 bytes for each 128 of them, got \[132\]", out=torch.ones(132).byte()),
    _bad(r"out: .* for 128 values, 132 bytes .*, got \[133\]", wires=torch.ones(2, 128), out=torch.ones(133).byte()),
    _bad(r"out: expected device cpu like the wires, got meta", out=torch.ones(6, device="meta")),
    _bad(r"residual: expected a contiguous Float tensor of 6 elements on cpu, got \[5\]", residual=torch.ones(5)),
    _bad(r"residual: .* got \[6\] Double", residual=torch.ones(6).double()),
    _bad(r"bucket_scale: expected one float32 element on cpu, got \[2\] Float", bucket_scale=torch.ones(2)),
    _bad(r"multiplier: expected a finite number, got nan", multiplier=float("nan")),
    _bad(r"limit: expected a positive number or None, got 0", limit=0.0),
    _bad(r"stochastic: expected False, got True for a wire of BFloat16", stochastic=True),
]


@pytest.mark.parametrize(("operators", "changes", "message"), BAD_REDUCES)
def test_bad_input_of_reduce_is_refused_and_nothing_is_written(
    operators: list[str], changes: dict[str, Any], message: str
) -> None:
    arguments = {
        "wires": torch.full((2, 6), 2.0),
        "out": torch.full((6,), 3.0).bfloat16(),
        "bucket_scale": torch.full((), 8.0),
        "residual": torch.full((6,), 4.0),
        "grad_dtype": torch.float32,
    } | changes
    before = {name: _snapshot(value) for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        torch.ops.fastsync.reduce(**arguments)
    assert {name: _snapshot(value) for name, value in arguments.items()} == before


def _snapshot(value: Any) -> Any:
    if isinstance(value, list):
        return [_snapshot(each) for each in value]
    if isinstance(value, Tensor):
        return "meta" if value.is_meta else value.to_dense().tolist()
    return repr(value)
