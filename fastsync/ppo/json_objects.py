"""JSON objects on command lines, such as '{"continuous": true}'."""

from __future__ import annotations

import json
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec


def json_object(text: str) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError for other text, and shows what is accepted."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        value = error
    if not isinstance(value, dict):
        raise ValueError(f"""expected a JSON object, such as '{{"continuous": true}}', got {text!r}""")
    return value


JSON_OBJECT = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: json_object(words[0]),
    is_instance=lambda value: value is None or isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)
"""The rule for an option that is annotated with it."""
