"""What ranks do in the tests of network namespaces: nothing that needs torch, which takes seconds to import."""

from __future__ import annotations

import os
import time


def rank_that(what: str) -> str:
    rank = os.environ["RANK"]
    if what == "returns":
        return f"{rank} of {os.environ['WORLD_SIZE']}"
    if rank == "1":
        raise RuntimeError("this rank has had enough")
    time.sleep(1000)
    return ""
