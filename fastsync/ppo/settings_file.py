"""Settings as YAML: files that users write, presets, and what a run keeps of its own."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fastsync.ppo.config import Settings

PRESETS = Path(__file__).parent / "presets"
PRESET_WORLD_SIZE = 2
"""Ranks that presets are made for."""


def preset_names() -> list[str]:
    """What ``--config`` finds by name."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def is_preset(source: str) -> bool:
    """Whether ``load_settings`` takes a preset."""
    return _find(source).parent == PRESETS


def load_settings(source: str) -> Settings:
    """Settings from a YAML file, or from the preset of that name where there is no such file.

    What the file does not mention has its default.

    Raises:
        ValueError: there is neither, or the content is not what settings are; the message names the file.
    """
    path = _find(source)
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold lines such as 'total_steps: 100000', not a {type(content).__name__}")
    try:
        return settings_from(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Settings from plain data, such as YAML gives.

    Raises:
        ValueError: a name that is no setting, or a value that it cannot have.
    """
    hints = get_type_hints(Settings)
    for name in values:
        if name not in hints:
            raise ValueError(f"{name!r} is no setting{_near(str(name), hints)}")
    return Settings(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def dump_settings(settings: Settings) -> str:
    """All settings as YAML that ``load_settings`` understands, in the order of their definition."""
    content = asdict(settings) | {"hidden_sizes": list(settings.hidden_sizes)}
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def _find(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESETS / f"{source}.yaml"
    if preset.parent == PRESETS and preset.is_file():
        return preset
    names = preset_names()
    raise ValueError(
        f"config={source!r} is neither a file nor a preset{_near(source, names)}; presets: {', '.join(names)}"
    )


def _near(name: str, names: Iterable[str]) -> str:
    """A question that ends in the names most like this one, if any are."""
    known = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known) or difflib.get_close_matches(
        name.lower(), known, cutoff=0.5
    )
    return f"; did you mean {' or '.join(known[found] for found in near)}?" if near else ""


def _convert(name: str, value: Any, hint: Any) -> Any:
    """The value as the setting's type wants it."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    (kind,) = (option for option in options if option is not type(None))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}{_near(str(value), choices)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name}={value!r} must be a list, such as [64, 64]")
        return tuple(_convert(name, item, get_args(kind)[0]) for item in value)
    converted = _convert_scalar(value, kind)
    if converted is None:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text; put it in quotes"}[kind]
        raise ValueError(f"{name}={value!r} must be {wanted}{' or null' if type(None) in options else ''}")
    return converted


def _convert_scalar(value: Any, kind: type) -> Any:
    """The value in that type, or None if it does not fit."""
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    if isinstance(value, str):
        # YAML 1.1 takes 1e-3 for text: it wants 1.0e-3.
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is float:
        return float(value)
    return int(value) if value == value // 1 and abs(value) != float("inf") else None
