"""Memory of gradients that glibc's malloc keeps when they are freed, for the next backward to take.

Otherwise it hands back to the system what lies at the end of the heap, and the next gradients come page by page, each
of which the system has to clear. That takes longer than to add the gradients up.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_ON_HEAP = 32 * 2**20
"""What glibc takes at most for M_MMAP_THRESHOLD."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")

_USUAL_TRIM_THRESHOLD = 128 * 2**10
"""glibc's own, in bytes."""

_num_kept = 0


def keep_freed(num_bytes: int) -> None:
    """Has malloc keep so many freed bytes more, in the whole process, or fewer if the number is negative.

    Tensors of more than 32 MiB have pages of their own, which always go back. It does nothing where the user has
    settings of malloc in the environment, or where it is not glibc's.
    """
    global _num_kept
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    _num_kept += num_bytes
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    mallopt(_M_TRIM_THRESHOLD, min(max(_num_kept, _USUAL_TRIM_THRESHOLD), 2**31 - 1))  # it takes an int
