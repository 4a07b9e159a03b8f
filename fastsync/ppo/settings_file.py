"""Settings as YAML: files that users write, presets, and what a run keeps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from fastsync.ppo.config import Settings
from fastsync.wording import did_you_mean

PRESETS = Path(__file__).parent / "presets"
PRESET_WORLD_SIZE = 2
"""Ranks that presets are made for."""


def preset_names() -> list[str]:
    """Lists what ``--config`` finds by name."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def is_preset(source: str) -> bool:
    """Tells whether ``load_settings`` takes a preset."""
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
            raise ValueError(f"{name!r} is no setting{did_you_mean(str(name), hints)}")
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
        f"config={source!r} is neither a file nor a preset{did_you_mean(source, names)}; presets: {', '.join(names)}"
    )


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Makes the value what the setting's type wants."""
    is_optional = type(None) in get_args(hint)
    if value is None and is_optional:
        return None
    kind = get_args(hint)[0] if is_optional else hint
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name}={value!r} must be a list, such as [64, 64]")
        return tuple(_convert(name, item, get_args(kind)[0]) for item in value)
    number = value
    if isinstance(value, str) and kind not in (bool, str):
        with suppress(ValueError):
            number = float(value)  # YAML 1.1 takes 1e-3 for text: it wants 1.0e-3
    if kind in (bool, str):
        fits = isinstance(value, kind)
    else:
        fits = type(number) in (int, float) and (kind is float or number % 1 == 0)
    if not fits:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text; put it in quotes"}[kind]
        raise ValueError(f"{name}={value!r} must be {wanted}{' or null' if is_optional else ''}")
    return kind(number)
