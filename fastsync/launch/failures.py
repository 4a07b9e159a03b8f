"""A launch that failed: which rank failed first, why, and where in the user's code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_FRAME = re.compile(r'^  File "(.+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_BETWEEN = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
"""Code between the launch and what each rank was launched for."""
_ABOUT_ANOTHER = re.compile(
    r"(RuntimeError|Dist\w*Error): .*(rank \d+ has |no answer|[Cc]onnection |[Tt]imed? ?out)", re.DOTALL
)
"""Errors of a rank that waited for one that was gone."""


def describe(error: ChildFailedError) -> tuple[str, str]:
    """Finds the rank that failed first, and where it failed.

    Returns:
        The traceback of a rank that raised, without the frames of fastsync, torch and environments' wrappers unless
        there are no others. It is empty where the process died, or an environment's process has printed it already.
        And half a sentence that names the rank and the reason.
    """
    rank, failure = error.get_first_failure()
    message: Any = failure.message  # a dict where the rank has raised, a string where its process has died
    if not isinstance(message, dict):
        return "", f"rank {rank} failed first: {message}"
    if _ABOUT_ANOTHER.match(message["message"]):
        for other, lost in error.failures.items():
            if lost.exitcode < 0:
                return "", f"rank {other} failed first: {lost.message}"
        rank, message = _cause(Path(failure.error_file), rank - failure.local_rank) or (rank, message)
    traceback = message["extraInfo"]["py_callstack"]
    frames = list(_FRAME.finditer(traceback))
    if frames and frames[-1][1].endswith("/gymnasium/vector/async_vector_env.py"):
        traceback = ""
    others = [frame[0] for frame in frames if not _is_between(frame[1])]
    return "".join(others) or traceback, f"rank {rank} failed first: {message['message']}"


def _cause(error_file: Path, first_rank: int) -> tuple[int, Any] | None:
    """Finds a rank of this machine whose error is not about another rank. The launcher reads only one rank's file.

    Each rank's file lies in a folder that is named after its local rank. Ranks of this machine count from first_rank.
    """
    for path in sorted(error_file.parent.parent.glob(f"*/{error_file.name}")):
        try:
            message = json.loads(path.read_text())["message"]
        except ValueError:  # the disk is full, or the rank was killed as it wrote
            continue
        if isinstance(message, dict) and not _ABOUT_ANOTHER.match(message["message"]):
            return first_rank + int(path.parent.name), message
    return None


def _is_between(path: str) -> bool:
    in_gymnasium = re.search(r"/gymnasium/(core\.py|wrappers/|vector/)", path)
    return path.startswith(_BETWEEN) or in_gymnasium is not None
