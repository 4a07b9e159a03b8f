"""On PYTHONPATH while PufferLib 3.0 is built: with NO_OCEAN=1 its setup.py reads a name that it then has not set."""

import builtins

builtins.c_extension_paths = []  # type: ignore[attr-defined]
