"""What several tests of the engine need."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore


@pytest.fixture
def store() -> TCPStore:
    """A store that outlives the ranks, as a launcher's."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
