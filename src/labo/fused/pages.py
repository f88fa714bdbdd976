"""Large buffers on large pages.

A buffer of the size of the logits is new memory in every step, and the system hands it out page by
page. With pages of 2 MiB instead of 4 KiB that takes a fraction of the time, which is comparable to
that of the loss itself. Linux gives them on request, as NumPy requests them for its arrays too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from torch import Tensor

_SMALLEST = 8 << 20  # bytes of a buffer for which it is worth a call


def _find_madvise() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux" or os.environ.get("LABO_HUGE_PAGES") == "0":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found


_MADVISE = _find_madvise()


def on_large_pages(x: Tensor) -> Tensor:
    """The tensor, contiguous and just allocated. If it is large, large pages are requested for it.

    The request may be refused, and nothing but the speed depends on it. The environment variable
    ``LABO_HUGE_PAGES=0`` turns it off.
    """
    if x.nbytes < _SMALLEST or _MADVISE is None or type(x) is not Tensor or not x.is_cpu:
        return x
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    _MADVISE(start, whole, mmap.MADV_HUGEPAGE)
    return x
