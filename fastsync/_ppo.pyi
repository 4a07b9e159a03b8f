# The trainer's operators, described in csrc/ppo/operators.h.
from typing import Any

def __getattr__(name: str) -> Any: ...
