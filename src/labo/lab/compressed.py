"""Compressed files and archives, read to their end and with a limit on what they inflate to.

gzip, xz and bzip2 have a checksum at the end of a file. It is checked only by a reader that reads
to the end, so readers here do. Archives are read in memory. Nothing is extracted to disk, so the
path of a member cannot lead out of a folder.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
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


# ------------------------------------------------------------------ named files


_SUFFIXES = ("", ".gz", ".xz")


def _read_file(path: Path) -> bytes:
    with open_compressed(path) as file:
        try:
            return file.read()
        except DAMAGED as error:
            raise DataError(f"{path}: truncated or damaged compressed file ({error})") from error


def _read_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    contents = {}
    for name in names:
        paths = (folder / (name + suffix) for suffix in _SUFFIXES)
        if path := next((path for path in paths if path.is_file()), None):
            contents[name] = _read_file(path)
    return contents


def _read_archive(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    contents = {}
    with open_compressed(archive) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    name = PurePosixPath(member.name).name
                    content = tar.extractfile(member) if member.isfile() and name in names else None
                    if content is not None:
                        contents[name] = content.read()
                        if len(contents[name]) != member.size:
                            raise EOFError(f"{member.name} is cut off")
            while stream.read(1 << 20):  # to the end, for the sake of its checksum
                pass
        except (*DAMAGED, tarfile.TarError, ValueError, OverflowError) as error:
            raise DataError(f"{archive}: damaged, or not a tar archive ({error})") from error
    return contents


def read_files(root: Path, names: Collection[str]) -> dict[str, bytes]:
    """Those of the named files that are in a folder or an archive, decompressed, by name.

    In a folder a file may also end in .gz or .xz; in a tar archive the folders inside do not
    matter. ``root`` need not exist.
    """
    if root.is_dir():
        return _read_folder(root, names)
    return _read_archive(root, names) if root.is_file() else {}
