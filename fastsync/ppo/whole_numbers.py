"""Whole numbers on command lines and in files of settings, as people write them: 1000000, 1_000_000 or 1e6."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

WHOLE_NUMBERS = ConstructorRegistry()
"""The rule for ``tyro.cli(..., registry=WHOLE_NUMBERS)``. tyro's own rule takes digits only."""


def whole_number(text: str) -> int:
    """Reads a whole number. Raises ValueError for other text, and says which forms are accepted."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or value != value.to_integral_value():
        raise ValueError(f"expected a whole number, such as 1000000, 1_000_000 or 1e6, got {text!r}")
    return int(value)


@WHOLE_NUMBERS.primitive_rule
def _whole_number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )
