"""Chooses a compression by measurement."""

from ..sync.compression import Auto
from .choose import Candidate, GroupProfile
from .measure import measure_group

__all__ = ["Auto", "Candidate", "GroupProfile", "measure_group"]
