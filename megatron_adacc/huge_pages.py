"""Large new memory on a Linux CPU in huge pages.

The C library takes blocks of 32 MiB or more (the largest value of its mmap threshold) from the kernel anew each time,
which zeroes them page by page at the first touch: filling 32 MiB takes 10.8 ms in pages of 4 KiB and 2.3 ms in pages of
2 MiB where it was measured. Most kernels give huge pages to who asks (/sys/kernel/mm/transparent_hugepage/enabled says
madvise or always); to others asking changes nothing.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

LEAST_BYTES = 2**25  # smaller blocks mostly come from the C library's heap, where they were touched before
MADV_HUGEPAGE = 14  # linux/mman.h
PAGE_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def advise(address: int, nbytes: int) -> bool:
    """Ask for huge pages for the block, if it is large; nothing is read or written. Whether the kernel took it."""
    if nbytes < LEAST_BYTES:
        return False
    size, madvise = huge_page_bytes(), _madvise()
    if not size or madvise is None:
        return False
    start, end = -(-address // size) * size, (address + nbytes) // size * size
    return start < end and madvise(start, end - start, MADV_HUGEPAGE) == 0


@functools.cache
def huge_page_bytes(file: Path = PAGE_SIZE_FILE) -> int:
    """The size of a transparent huge page, 0 where the system has none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


@functools.cache
def _madvise() -> Any:
    """The C library's madvise(address, length, advice), None where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
