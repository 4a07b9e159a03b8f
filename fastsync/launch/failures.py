"""A launch that failed: which rank was the first, why, and where in the code of those who launched it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_FRAME = re.compile(r'^  File "(.+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_BETWEEN = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
"""Code through which every rank comes to what it was launched for."""


def describe(error: ChildFailedError) -> tuple[str, str]:
    """Tells where the rank that failed first has failed, and which it was and why.

    Returns:
        Of a rank that raised, the lines of its traceback that are about neither fastsync nor torch nor an environment's
        wrappers, all of them where none is left; empty where its process died, or an environment's process has said it
        already. And half a sentence.
    """
    rank, failure = error.get_first_failure()
    message: Any = failure.message  # a dict where the rank has raised, a string where its process has died
    if not isinstance(message, dict):
        return "", f"rank {rank} failed first: {message}"
    traceback = message["extraInfo"]["py_callstack"]
    frames = list(_FRAME.finditer(traceback))
    if frames and frames[-1][1].endswith("/gymnasium/vector/async_vector_env.py"):
        traceback = ""
    others = [frame[0] for frame in frames if not _is_between(frame[1])]
    return "".join(others) or traceback, f"rank {rank} failed first: {message['message']}"


def _is_between(path: str) -> bool:
    in_gymnasium = re.search(r"/gymnasium/(core\.py|wrappers/|vector/)", path)
    return path.startswith(_BETWEEN) or in_gymnasium is not None
