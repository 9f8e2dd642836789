"""Importing what a start needs, at one moment and without the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_TORCH_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cuda.so", os.RTLD_LOCAL))
"""In torch's own order and visibility; the second brings all others. A build without CUDA has another one there."""


def import_all(modules: Iterable[str]) -> None:
    """Import now what stages would import later, so that a stage's seconds are its own."""
    for module in modules:
        importlib.import_module(module)


def link_torch() -> None:
    """Load torch's libraries, a third of what its import takes, without the interpreter: a thread can do it while
    another one imports what is Python alone; another library would wait for these. What cannot be loaded here is left
    to the import, which says why."""
    # Not by ctypes.CDLL, which keeps the interpreter to itself meanwhile.
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    spec = find_spec("torch")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for name, visibility in _TORCH_LIBRARIES:
            load(os.fsencode(Path(place) / "lib" / name), os.RTLD_NOW | visibility)


@contextmanager
def without_collections(*, keeps_all: bool) -> Iterator[None]:
    """No garbage is collected meanwhile.

    The modules of a start make half a million objects that all stay. The collector walks over them again and again
    while they grow, for a quarter of the time that the imports take, and over all of them at each full collection
    afterwards.

    Args:
        keeps_all: leave what exists at the end out of later collections too, if anything was imported. Only for the
            program that owns the process: garbage in cycles that another one has by then would never go.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        if keeps_all and len(sys.modules) > before:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
