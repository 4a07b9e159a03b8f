"""What the server imports that ranks are forked from: torch, what trainings log with, and what tests are written in."""

# ruff: noqa: F401

import ctypes
import gc
from pathlib import Path

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.utils.tensorboard

import fastsync.ppo.ppo
import tests.engine.attached
import tests.ranks

HUGE_PAGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), which kernels before 6.1 refuse


def put_into_huge_pages() -> None:
    """Of a rank's time most goes into copying tables of pages, which shrink to a few entries where the kernel can."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(place, 16) for place in places.split("-"))
            for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), COLLAPSE)


# A rank that looked for garbage among all this would take a copy of each page, and a third of a second.
gc.collect()
gc.freeze()
put_into_huge_pages()
