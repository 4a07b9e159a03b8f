"""Passes over memory that fail as where there is no memory left."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from tests.passes import passes_of

PASSES = ("pack", "unpack", "reduce")


class FailingPass:
    """One of a CPU's passes, which can be made to raise std::bad_alloc."""

    def __init__(self, name: str) -> None:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        passes = get_pointer(passes_of("cpu"), None)
        assert passes is not None
        at = passes + PASSES.index(name) * ctypes.sizeof(ctypes.c_void_p)
        self._function = ctypes.c_void_p.from_address(at)
        self._before = self._function.value

    def set_failing(self, fails: bool) -> None:
        raises = ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv
        self._function.value = ctypes.cast(raises, ctypes.c_void_p).value if fails else self._before


@contextmanager
def no_memory_to(name: str, fails: bool = True) -> Iterator[None]:
    """So it is inside the block, if ``fails``."""
    failing = FailingPass(name)
    failing.set_failing(fails)
    try:
        yield
    finally:
        failing.set_failing(False)
