"""Compressed files, read to their end and with a limit on what they inflate to.

gzip, xz and bzip2 have a checksum at the end of a file. It is checked only by a reader that reads
to the end, so readers here do.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError
from .run.files import open_regular

# What the decompressors raise on a damaged or truncated file.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)

MAX_INFLATION = "LABO_MAX_INFLATION"  # environment: how many times its size a file may inflate to
_DEFAULT_INFLATION = 200
_ALWAYS_ALLOWED = 1 << 28  # bytes that any file may inflate to

_FORMATS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"BZh": bz2.open,
}


class _Inflated(io.RawIOBase):
    """A decompressed stream that ends with an error when it grows out of proportion."""

    def __init__(self, file: BinaryIO, inflated: BinaryIO, path: Path) -> None:
        self.file, self.inflated, self.path = file, inflated, path
        self.factor = _factor()
        self.limit = max(_ALWAYS_ALLOWED, self.factor * os.fstat(file.fileno()).st_size)
        self.total = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.inflated.read(len(buffer))
        self.total += len(data)
        if self.total > self.limit:
            raise DataError(
                f"{self.path}: inflates to more than {self.factor} times its size; set "
                f"{MAX_INFLATION} to a larger factor if that is meant"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.inflated.close()
            self.file.close()
        super().close()


def _factor() -> int:
    given = os.environ.get(MAX_INFLATION, "")
    return int(given) if given.isdecimal() and int(given) else _DEFAULT_INFLATION


def open_compressed(path: Path) -> BinaryIO:
    """Open a file that may be compressed, whatever its name says.

    Some browsers unpack a file and keep its ending, so the format is told by the first bytes.
    """
    file: BinaryIO = open_regular(path)
    head = file.read(8)
    file.seek(0)
    for magic, opener in _FORMATS.items():
        if head.startswith(magic):
            return io.BufferedReader(_Inflated(file, opener(file), path), 1 << 16)
    return file
